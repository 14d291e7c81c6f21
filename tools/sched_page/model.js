// One graph of the data, with the relations that looking at it needs.
class Model {
  constructor(graph) {
    Object.assign(this, graph);
    this.byId = new Map();
    for (const thing of [...this.nodes, ...this.leafs, ...this.copies]) {
      this.byId.set(thing.id, thing);
      thing.readers = [];
    }
    this.nodes.forEach((node, i) => { node.at = i; });
    for (const node of this.nodes)
      for (const id of new Set(node.sources)) this.byId.get(id).readers.push(node.id);
    for (const copy of this.copies) this.byId.get(copy.source).readers.push(copy.id);
    this.timed = this.devices.every((d) => d.nodes === 0 || d.seconds !== null);
    this.lane = new Map(this.devices.map((d, i) => [d.name, i]));
    this.sections.forEach((s) => {
      for (let i = s.start; i < s.stop; i++) this.nodes[i].section = s;
    });
    this.folds.forEach((f) => {
      f.open = f.repeats === 1;
      for (let k = 0; k < f.period * f.repeats; k++) this.sections[f.first + k].fold = f;
    });
  }

  colour(device) { return this.colours[device] ?? "#888888"; }

  // The nodes that a search finds: by their own names or those of what they read.
  find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const fits = (t) => words.every((w) => t.toLowerCase().includes(w));
    const named = new Set();
    for (const thing of [...this.leafs, ...this.copies])
      if (fits(thing.name)) thing.readers.forEach((id) => named.add(id));
    return this.nodes.filter((n) =>
      named.has(n.id) || fits(`${n.name} ${n.op} ${n.id} ${n.backend} ${n.cause}`));
  }

  // Whether a node is not drawn because a layer like its own stands for it.
  isFolded(node) {
    const f = node.section.fold;
    return !f.open && this.sections.indexOf(node.section) >= f.first + f.period;
  }

  // Bytes, and modelled seconds if they are known, of all the layers of a fold.
  foldWork(f) {
    const first = this.sections[f.first].start;
    const stop = this.sections[f.first + f.period * f.repeats - 1].stop;
    const nodes = this.nodes.slice(first, stop);
    const splits = this.splits.filter((s) => first <= s.start && s.start < stop);
    return {
      traffic: nodes.reduce((sum, n) => sum + n.traffic, 0),
      seconds: this.timed ? nodes.reduce((sum, n) => sum + n.seconds, 0) : null,
      copying: this.timed ? splits.reduce((sum, s) => sum + s.copying, 0) : null,
    };
  }

  foldName(f) {
    const last = this.sections[f.first + f.period * f.repeats - 1];
    const first = this.sections[f.first];
    return f.repeats === 1 ? first.name : `layers ${first.layer}–${last.layer}`;
  }
}
