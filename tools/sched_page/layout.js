// Where things are, in units of width at zoom 1: sections from left to right, lanes by device.
const WORK = 1600;  // width of all work together
const VIEW = 0.6, LEAST = 1.2;  // widths of views and of the smallest work
const GAP = 46, SEAM = 26, NEXT = 10;  // between sections, before copies, before other splits

class Layout {
  constructor(model, measure) {
    this.model = model;
    this.blocks = [];  // runs of nodes of one split in one section, in order
    this.columns = [];  // sections that are drawn
    this.groups = [];  // folds
    const shown = this.shownSections();
    this.copying = (split) => (measure === "equal" ? 0 : measure === "seconds" ? split.copying ?? 0
      : split.copies.reduce((all, id) => all + model.byId.get(id).moved, 0));
    this.measureOf = (n) => (measure === "equal" ? (n.is_view ? 0 : 1) : n[measure] ?? 0);
    let sum = 0;
    for (const s of shown)
      for (let i = s.start; i < s.stop; i++) {
        const n = model.nodes[i], split = model.splits[n.split];
        sum += this.measureOf(n) + (i === split.start ? this.copying(split) : 0);
      }
    this.scale = (measure === "equal" ? 14 * Math.max(1, sum) : WORK) / Math.max(sum, 1e-12);
    let x = 0;
    for (const f of model.folds) x = this.addFold(f, x);
    this.width = Math.max(1, x - GAP);
  }

  shownSections() {
    const { folds, sections } = this.model;
    return folds.flatMap((f) =>
      sections.slice(f.first, f.first + f.period * (f.open ? f.repeats : 1)));
  }

  addFold(f, x) {
    const start = x;
    const n = f.period * (f.open ? f.repeats : 1);
    for (let k = 0; k < n; k++) x = this.addSection(this.model.sections[f.first + k], x);
    const closed = !f.open && f.repeats > 1;
    if (closed) x += 16;  // room for the edges of the layers behind
    this.groups.push({ fold: f, x: start, stop: x - GAP, closed });
    return x;
  }

  addSection(section, x) {
    const start = x, { nodes, splits } = this.model;
    let i = section.start;
    while (i < section.stop) {
      const split = splits[nodes[i].split], stop = Math.min(section.stop, split.stop);
      const begins = i === split.start, wait = begins ? this.scale * this.copying(split) : 0;
      if (begins && split.copies.length) x += SEAM + wait;
      else if (i > section.start) x += NEXT;
      x = this.addBlock(split, i, stop, x, begins);
      this.blocks.at(-1).wait = wait;
      i = stop;
    }
    this.columns.push({ section, x: start, stop: x });
    return x + GAP;
  }

  addBlock(split, start, stop, x, begins) {
    const widths = [];
    for (let i = start; i < stop; i++) {
      const n = this.model.nodes[i];
      widths.push(n.is_view ? VIEW : LEAST + this.scale * this.measureOf(n));
    }
    const sum = widths.reduce((a, b) => a + b, 0), grow = Math.max(1, 30 / sum);
    const edges = [x];
    for (const w of widths) edges.push((x += w * grow));
    const lane = this.model.lane.get(split.backend);
    this.blocks.push({ split, start, stop, lane, begins, x: edges[0], end: x, edges });
    return x;
  }

  // ---------------------------------------------------------------- looking things up
  // The last item that starts at or before x.
  static before(items, x, of = (item) => item.x) {
    let low = 0, high = items.length - 1, found = -1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (of(items[middle]) <= x) { found = middle; low = middle + 1; } else high = middle - 1;
    }
    return found;
  }

  blockOf(node) {
    const at = Layout.before(this.blocks, node.at, (b) => b.start);
    const block = this.blocks[at];
    return block && node.at < block.stop ? block : null;
  }

  spanOf(node) {
    const block = this.blockOf(node);
    if (!block) return null;
    const i = node.at - block.start;
    return { block, x: block.edges[i], end: block.edges[i + 1] };
  }

  // The copies before a split's first block, by the lane they come from.
  arrows(block) {
    if (!block.begins) return [];
    const found = new Map();
    for (const id of block.split.copies) {
      const copy = this.model.byId.get(id), kind = arrowKind(copy.kind);
      const key = `${copy.origin} ${kind}`;
      if (!found.has(key)) found.set(key, { origin: copy.origin, kind, copies: [], moved: 0 });
      const arrow = found.get(key);
      arrow.copies.push(copy);
      arrow.moved += copy.moved;
    }
    return [...found.values()];
  }
}

function arrowKind(kind) {
  if (kind === "weight" || kind === "used experts") return "weights";
  return kind === "input" ? "inputs" : "results";
}
