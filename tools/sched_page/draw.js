// Paints a layout on a canvas: only what is in sight, and only as fine as can be seen.
const HEAD = 46, FOOT = 8, LEFT = 74;
const FONT = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const HEAVY = /^(MUL_MAT|FLASH_ATTN|OUT_PROD|SSM_|GATED_|CONV)/;  // shown a little darker
const SMALL = FONT.replace("12px", "11px");

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#101418" : "#ffffff";
}

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.ink = canvas.getContext("2d");
  }

  // Sizes the canvas for its place and the number of lanes.
  fit(lanes) {
    const ratio = window.devicePixelRatio || 1;
    this.laneHeight = Math.max(64, Math.min(170, 360 / lanes));
    this.laneGap = 44;
    const height = HEAD + FOOT + lanes * this.laneHeight + (lanes - 1) * this.laneGap;
    const width = this.canvas.clientWidth || this.canvas.parentElement.clientWidth;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.width = width;
    this.height = height;
  }

  laneTop(lane) { return HEAD + lane * (this.laneHeight + this.laneGap); }

  paint(view) {
    const probe = (name) => {
      // light-dark() resolves only in a real property
      this.canvas.style.outlineColor = `var(${name})`;
      const value = getComputedStyle(this.canvas).outlineColor;
      this.canvas.style.outlineColor = "";
      return value;
    };
    if (this.themed !== view.theme) {
      this.themed = view.theme;
      this.colours = {};
      for (const name of ["panel", "line", "text", "faint", "accent", "lane"])
        this.colours[name] = probe(`--${name}`);
    }
    const { ink } = this;
    ink.clearRect(0, 0, this.width, this.height);
    ink.textBaseline = "middle";
    this.lanes(view);
    ink.save();
    ink.beginPath();
    ink.rect(LEFT, 0, this.width - LEFT, this.height);
    ink.clip();
    this.heads(view);
    const { blocks } = view.layout;
    const first = Math.max(0, Layout.before(blocks, view.world(LEFT)));
    const inSight = (b) => view.screen(b.x - b.wait) < this.width + 60;
    for (let i = first; i < blocks.length && inSight(blocks[i]); i++)
      this.block(view, blocks[i]);
    this.labels = [];
    for (let i = first; i < blocks.length && inSight(blocks[i]); i++)
      this.seams(view, blocks[i]);
    this.sizes();
    this.relations(view);
    ink.restore();
  }

  // ---------------------------------------------------------------- frame
  lanes(view) {
    const { ink, colours } = this;
    view.model.devices.forEach((device, i) => {
      const y = this.laneTop(i);
      ink.fillStyle = colours.lane;
      ink.fillRect(LEFT, y, this.width - LEFT, this.laneHeight);
      ink.fillStyle = view.model.colour(device.name);
      ink.fillRect(LEFT - 5, y, 5, this.laneHeight);
      ink.fillStyle = colours.text;
      ink.font = "600 " + FONT;
      ink.textAlign = "left";
      this.text(device.name, 2, y + this.laneHeight / 2 - 8, LEFT - 10);
      ink.fillStyle = colours.faint;
      ink.font = SMALL;
      this.text(counted(device.splits, "split"), 2, y + this.laneHeight / 2 + 8, LEFT - 10);
    });
  }

  heads(view) {
    const { ink, colours } = this;
    for (const group of view.layout.groups) {
      const a = view.screen(group.x) - 6, b = view.screen(group.stop) + 6;
      if (b < LEFT || a > this.width || group.fold.repeats === 1) continue;
      ink.fillStyle = colours.lane;
      ink.strokeStyle = group === view.hoverGroup ? colours.accent : colours.line;
      ink.lineWidth = 1;
      if (group.closed)
        for (const shift of [8, 4]) {
          ink.beginPath();
          ink.roundRect(a + shift, 2 + 20 - shift, b - a - 8, this.height - 24, 6);
          ink.stroke();
        }
      ink.beginPath();
      ink.roundRect(a, 2, b - a - (group.closed ? 8 : 0), 18, 5);
      ink.fill();
      ink.stroke();
      ink.font = "600 " + SMALL;
      ink.fillStyle = colours.accent;
      ink.textAlign = "left";
      const sign = group.closed ? "▸" : "▾", name = view.model.foldName(group.fold);
      const left = Math.max(a, LEFT) + 6;
      const long = `${sign} ${name}: ${group.fold.repeats} × the same`;
      const room = Math.min(b, this.width) - left - 14;
      const label = [long, `${sign} ${name}`, `${sign} ${group.fold.repeats} ×`, sign]
        .find((t) => ink.measureText(t).width <= room);
      if (label) ink.fillText(label, left, 11.5);
    }
    ink.font = SMALL;
    const { columns } = view.layout;
    columns.forEach((column, i) => {
      const a = view.screen(column.x), b = view.screen(column.stop);
      if (b < LEFT || a > this.width) return;
      ink.fillStyle = colours.line;
      ink.fillRect(a, HEAD - 6, b - a, 1);
      ink.fillStyle = colours.faint;
      const after = columns[i + 1] ? view.screen(columns[i + 1].x) - 8 : this.width;
      const left = Math.max(a, LEFT + 2), room = Math.min(after, this.width) - left;
      const label = [column.section.name, String(column.section.layer ?? "")]
        .find((t) => t && ink.measureText(t).width <= room);
      if (label) ink.fillText(label, left, HEAD - 16);
    });
  }

  text(text, x, y, room) {
    if (room < 8) return;
    const { ink } = this;
    let shown = text;
    if (ink.measureText(shown).width > room) {
      let low = 0, high = shown.length;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (ink.measureText(text.slice(0, middle) + "…").width <= room) low = middle;
        else high = middle - 1;
      }
      if (low < 2) return;
      shown = text.slice(0, low) + "…";
    }
    ink.fillText(shown, x, y);
  }

  // ---------------------------------------------------------------- blocks and nodes
  block(view, block) {
    const a = view.screen(block.x), b = view.screen(block.end), { ink } = this;
    if (b < LEFT) return;
    const y = this.laneTop(block.lane), h = this.laneHeight;
    const colour = view.model.colour(block.split.backend);
    const fine = (b - a) / (block.stop - block.start) >= 2.5;
    ink.globalAlpha = fine ? 0.25 : view.found ? 0.35 : 1;
    ink.fillStyle = colour;
    ink.beginPath();
    ink.roundRect(a, y, b - a, h, Math.min(4, (b - a) / 2));
    ink.fill();
    ink.globalAlpha = 1;
    if (fine || view.found) this.nodes(view, block, colour, y, fine);
    if (!fine) {
      ink.fillStyle = inkOn(colour);
      ink.font = SMALL;
      ink.textAlign = "left";
      this.text(counted(block.stop - block.start, "node"), a + 4, y + h / 2, b - a - 8);
    }
  }

  nodes(view, block, colour, y, fine) {
    const { ink } = this, h = this.laneHeight;
    const from = Math.max(0, Layout.before(block.edges, view.world(LEFT), (e) => e));
    for (let i = from; i < block.edges.length - 1; i++) {
      const a = view.screen(block.edges[i]), b = view.screen(block.edges[i + 1]);
      if (a > this.width) break;
      const node = view.model.nodes[block.start + i];
      const found = !view.found || view.found.has(node.id);
      if (!fine && !found) continue;
      const top = node.is_view ? y + h * 0.35 : y, tall = node.is_view ? h * 0.3 : h;
      ink.globalAlpha = found ? (node.is_view ? 0.55 : 1) : 0.25;
      ink.fillStyle = colour;
      ink.fillRect(a, top, Math.max(b - a - (b - a > 3 ? 1 : 0), 1), tall);
      if (HEAVY.test(node.op)) {
        ink.fillStyle = "#00000026";
        ink.fillRect(a, top, Math.max(b - a - 1, 1), tall);
      }
      ink.globalAlpha = found ? 1 : 0.5;
      if (b - a >= 13) this.label(view, node, a, b, y, inkOn(colour));
      ink.globalAlpha = 1;
      if (node === view.selected || node === view.hover) {
        ink.strokeStyle = this.colours.text;
        ink.lineWidth = node === view.selected ? 3 : 1.5;
        ink.strokeRect(a, y, Math.max(b - a - 1, 2), h);
      }
    }
  }

  label(view, node, a, b, y, colour) {
    const { ink } = this, h = this.laneHeight, left = Math.max(a, LEFT);
    ink.fillStyle = colour;
    ink.textAlign = "left";
    if (b - a < 84 || node.is_view) {
      if (node.is_view && b - a < 84) return;
      ink.save();
      ink.translate(left + Math.min(b - left, this.width) / 2, y + h - 6);
      if (!node.is_view) ink.rotate(-Math.PI / 2);
      else ink.translate(-(b - left) / 2 + 5, -h / 2 + 6);
      ink.font = SMALL;
      const room = node.is_view ? b - left - 10 : h - 12;
      if (b - a >= 30 && !node.is_view) {
        this.text(node.op, 0, -7, room);
        this.text(shownName(node), 0, 8, room);
      } else this.text(b - a >= 30 ? shownName(node) : node.op, 0, 0, room);
      ink.restore();
      return;
    }
    const room = Math.min(b, this.width) - left - 10;
    ink.font = "600 " + SMALL;
    this.text(shownName(node), left + 5, y + 12, room);
    ink.font = SMALL;
    const lines = [node.op, `${node.type} ${shape(node.ne)}`, bytes(node.traffic), node.cause];
    if (node.seconds !== null) lines.splice(3, 0, time(node.seconds));
    lines.forEach((line, i) => {
      const at = y + 28 + 15 * i;
      if (at < y + h - 6) this.text(line, left + 5, at, room);
    });
  }

  // ---------------------------------------------------------------- copies and relations
  seams(view, block) {
    const { ink } = this, x = view.screen(block.x);
    if (x < LEFT - 40) return;
    this.wait(view, block, x);
    view.layout.arrows(block).forEach((arrow, i) => {
      const from = view.model.lane.get(arrow.origin), to = block.lane;
      if (from === undefined) return;
      const down = from < to, at = x - 4 - Math.min(8, view.zoom * SEAM / 4) * (i + 0.6);
      const start = this.laneTop(from) + (down ? this.laneHeight : 0);
      const stop = this.laneTop(to) + (down ? 0 : this.laneHeight);
      const origin = from === to ? start - 14 : start, end = from === to ? start : stop;
      ink.strokeStyle = ink.fillStyle = view.model.colour(arrow.origin);
      ink.lineWidth = Math.min(6, 1 + Math.log2(1 + arrow.moved / 4096) / 3);
      ink.setLineDash({ weights: [6, 3], inputs: [2, 3], results: [] }[arrow.kind]);
      const tip = Math.min(8, Math.abs(end - origin) / 2), sign = end > origin ? 1 : -1;
      ink.beginPath();
      ink.moveTo(at, origin);
      ink.lineTo(at, end - sign * tip);
      ink.stroke();
      ink.setLineDash([]);
      ink.beginPath();
      ink.moveTo(at, end);
      ink.lineTo(at - 5, end - sign * tip);
      ink.lineTo(at + 5, end - sign * tip);
      ink.fill();
      this.labels.push({ x: at, y: (origin + end) / 2 - sign * 4, moved: arrow.moved });
    });
  }

  // The time or bytes of the copies before a block.
  wait(view, block, x) {
    const { ink, colours } = this, from = Math.max(view.screen(block.x - block.wait), LEFT) - 4;
    const y = this.laneTop(block.lane), h = this.laneHeight, wide = x - 4 - from;
    if (!block.wait || wide < 1) return;
    ink.save();
    ink.beginPath();
    ink.rect(from, y, wide, h);
    ink.clip();
    ink.fillStyle = colours.line;
    ink.fillRect(from, y, wide, h);
    ink.strokeStyle = colours.lane;
    ink.lineWidth = 2;
    ink.beginPath();
    for (let at = from - h; at < x; at += 9) {
      ink.moveTo(at, y + h);
      ink.lineTo(at + h, y);
    }
    ink.stroke();
    const took = view.model.timed ? time(block.split.copying) : "";
    const label = `copies ${took}`.trim();
    if (wide > ink.measureText(label).width + 12) {
      ink.font = SMALL;
      ink.textAlign = "left";
      ink.fillStyle = colours.lane;
      ink.fillRect(from + 4, y + h / 2 - 9, ink.measureText(label).width + 8, 18);
      ink.fillStyle = colours.text;
      ink.fillText(label, from + 8, y + h / 2);
    }
    ink.restore();
  }

  // Bytes beside the arrows that leave room before the next one; close arrows share a number.
  sizes() {
    const { ink } = this, groups = [];
    for (const one of this.labels.sort((a, b) => a.x - b.x)) {
      const last = groups.at(-1);
      if (last && one.x - last.x < 12 && one.y === last.y) {
        last.moved += one.moved;
        last.x = one.x;
      } else groups.push({ ...one });
    }
    ink.font = SMALL;
    ink.fillStyle = this.colours.faint;
    ink.textAlign = "left";
    groups.forEach(({ x, y, moved }, i) => {
      const label = bytes(moved), room = (groups[i + 1]?.x ?? this.width) - x - 14;
      if (ink.measureText(label).width <= room) ink.fillText(label, x + 7, y);
    });
  }

  // Lines from what the selected node reads, and to what reads it.
  relations(view) {
    const node = view.selected;
    if (!node || !view.layout.spanOf(node)) return;
    const origin = (id) => {
      const thing = view.model.byId.get(id);
      return thing.id[0] === "c" ? view.model.byId.get(thing.source) : thing;
    };
    for (const id of node.sources) this.line(view, origin(id), node);
    for (const id of node.readers) {
      const reader = view.model.byId.get(id);
      const targets = reader.id[0] === "c" ? reader.readers : [id];
      targets.forEach((target) => this.line(view, node, view.model.byId.get(target)));
    }
  }

  line(view, from, to) {
    const a = from.id[0] === "n" && view.layout.spanOf(from), b = view.layout.spanOf(to);
    if (!a || !b) return;
    const { ink } = this;
    const y1 = this.laneTop(a.block.lane) + this.laneHeight * 0.5;
    const y2 = this.laneTop(b.block.lane) + this.laneHeight * 0.5;
    const x1 = view.screen((a.x + a.end) / 2), x2 = view.screen((b.x + b.end) / 2);
    ink.strokeStyle = this.colours.text;
    ink.lineWidth = 1.5;
    ink.beginPath();
    ink.moveTo(x1, y1);
    const bow = y1 === y2 ? -Math.min(60, 10 + Math.abs(x2 - x1) / 4) : 0;
    ink.bezierCurveTo(x1 + (x2 - x1) * 0.3, y1 + bow, x1 + (x2 - x1) * 0.7, y2 + bow, x2, y2);
    ink.stroke();
    ink.fillStyle = this.colours.text;
    ink.beginPath();
    ink.arc(x2, y2, 3.5, 0, 7);
    ink.fill();
  }
}
