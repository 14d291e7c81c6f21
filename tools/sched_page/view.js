// What part of a layout is in sight, and how pointer and keys change it.
class View {
  constructor(painter, events) {
    this.painter = painter;
    this.events = events;  // select(node), hover(hit, x, y), toggle(fold)
    this.pointers = new Map();
    this.found = this.selected = this.hover = this.hoverGroup = null;
    this.theme = "";
    const { canvas } = painter;
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    canvas.addEventListener("pointerup", (e) => this.up(e));
    canvas.addEventListener("pointercancel", (e) => this.up(e));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("dblclick", (e) => { if (e.offsetY > 24) this.zoomAt(3, e.offsetX); });
  }

  show(model, layout) {
    this.model = model;
    this.layout = layout;
    this.hover = this.hoverGroup = null;
    this.painter.fit(model.devices.length);
  }

  get room() { return this.painter.width - LEFT - 24; }
  get least() { return Math.min(1, this.room / this.layout.width) * 0.9; }
  get most() { return 120; }
  screen(x) { return LEFT + 12 + (x - this.left) * this.zoom; }
  world(x) { return this.left + (x - LEFT - 12) / this.zoom; }

  all() {
    this.zoom = this.room / this.layout.width;
    this.left = 0;
    this.draw();
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.painter.paint(this);
    });
  }

  zoomAt(factor, x) {
    const fixed = this.world(x);
    this.zoom = Math.max(this.least, Math.min(this.most, this.zoom * factor));
    this.left = fixed - (x - LEFT - 12) / this.zoom;
    this.pan(0);
  }

  pan(pixels) {
    const spare = this.room / this.zoom;
    this.left += pixels / this.zoom;
    const most = Math.max(0, this.layout.width - spare * 0.5);
    this.left = Math.max(Math.min(0, this.layout.width - spare) - spare * 0.5, Math.min(most, this.left));
    this.draw();
  }

  // Brings a node into sight, large enough to be read.
  centre(node) {
    const span = this.layout.spanOf(node);
    if (!span) return;
    const wanted = 40 / Math.max(span.end - span.x, 0.1);
    this.zoom = Math.max(this.zoom, Math.min(this.most, wanted));
    this.left = (span.x + span.end) / 2 - this.room / 2 / this.zoom;
    this.pan(0);
  }

  // Pans as little as needed.
  reveal(node) {
    const span = this.layout.spanOf(node);
    if (!span) return;
    const a = this.screen(span.x), b = this.screen(span.end);
    if (b - a < 3) this.centre(node);
    else if (a < LEFT + 20) this.pan(a - LEFT - 60);
    else if (b > this.painter.width - 20) this.pan(b - this.painter.width + 60);
    else this.draw();
  }

  // ---------------------------------------------------------------- pointer
  wheel(event) {
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 20 : event.deltaMode === 2 ? 300 : 1;
    const dx = event.deltaX * pixels, dy = event.deltaY * pixels;
    if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) this.pan(dx || dy);
    else this.zoomAt(Math.exp(-dy * 0.0022), event.offsetX);
  }

  down(event) {
    this.painter.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event.offsetX);
    this.moved = this.pointers.size > 1 ? 99 : 0;
    this.events.hover(null);
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) return this.hovering(event);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
    this.pointers.set(event.pointerId, event.offsetX);
    this.moved += Math.abs(event.offsetX - before);
    if (this.moved < 4) return undefined;
    this.painter.canvas.classList.add("drag");
    if (!others.length) return this.pan(before - event.offsetX);
    const fixed = others[0][1], old = Math.abs(before - fixed), now = Math.abs(event.offsetX - fixed);
    if (old > 8 && now > 8) this.zoomAt(now / old, (fixed + event.offsetX) / 2);
    return undefined;
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    this.painter.canvas.classList.remove("drag");
    if (this.moved >= 4 || event.type === "pointercancel") return;
    const hit = this.hit(event.offsetX, event.offsetY);
    if (hit?.fold) this.events.toggle(hit.fold);
    else this.events.select(hit?.node ?? null, hit?.copies ?? null);
  }

  leave() {
    if (this.pointers.size) return;
    this.hover = this.hoverGroup = null;
    this.events.hover(null);
    this.draw();
  }

  hovering(event) {
    const hit = this.hit(event.offsetX, event.offsetY);
    this.hover = hit?.node ?? null;
    this.hoverGroup = hit?.group ?? null;
    this.painter.canvas.style.cursor = hit ? "pointer" : "";
    this.events.hover(hit, event.offsetX, event.offsetY);
    this.draw();
  }

  // What is at a point: {fold, group}, {node} or {copies, split}.
  hit(x, y) {
    const { layout, painter } = this, at = this.world(x);
    if (x < LEFT) return null;
    if (y < 24) {
      const group = layout.groups.find((g) => g.x - 6 <= at && at <= g.stop + 6);
      return group && group.fold.repeats > 1 ? { fold: group.fold, group } : null;
    }
    const index = Layout.before(layout.blocks, at), block = layout.blocks[index];
    if (block && at < block.end) {
      const top = painter.laneTop(block.lane);
      if (y < top || y > top + painter.laneHeight) return null;
      const i = Layout.before(block.edges, at, (e) => e);
      return { node: this.model.nodes[block.start + Math.min(i, block.stop - block.start - 1)] };
    }
    const next = layout.blocks[index + 1];
    const near = next && Math.max(24, (SEAM + next.wait) * this.zoom);
    if (!next || this.screen(next.x) - x > near) return null;
    const arrows = layout.arrows(next), i = this.nearest(next, arrows, x);
    return i === null ? null : { copies: arrows[i].copies, split: next.split };
  }

  nearest(block, arrows, x) {
    const at = (i) => this.screen(block.x) - 4 - Math.min(8, this.zoom * SEAM / 4) * (i + 0.6);
    const order = arrows.map((_, i) => i).sort((a, b) => Math.abs(at(a) - x) - Math.abs(at(b) - x));
    return order.length ? order[0] : null;
  }

  // ---------------------------------------------------------------- keys
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? null : { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const middle = LEFT + this.room / 2;
    const actions = {
      "+": () => this.zoomAt(1.5, middle), "=": () => this.zoomAt(1.5, middle),
      "-": () => this.zoomAt(1 / 1.5, middle), "0": () => this.all(),
      ArrowLeft: () => this.pan(-120), ArrowRight: () => this.pan(120),
      ArrowUp: () => this.stepBlock(-1), ArrowDown: () => this.stepBlock(1),
      Home: () => this.stepTo(0), End: () => this.stepTo(this.layout.blocks.length - 1),
      Enter: () => this.events.toggle(this.selected?.section.fold ?? null),
      Escape: () => this.events.select(null), f: () => this.events.toggleAll(),
    };
    if (step) this.stepNode(step);
    else if (actions[event.key]) actions[event.key]();
    else return;
    event.preventDefault();
  }

  stepNode(step) {
    const { blocks } = this.layout;
    let index = this.selected ? blocks.indexOf(this.layout.blockOf(this.selected)) : -1;
    let at = index < 0 ? -1 : this.selected.at + step;
    if (index < 0) { index = Math.max(0, Layout.before(blocks, this.world(LEFT))); at = blocks[index].start; }
    else if (at >= blocks[index].stop) at = blocks[index + 1]?.start ?? -1;
    else if (at < blocks[index].start) at = (blocks[index - 1]?.stop ?? 0) - 1;
    if (at >= 0) this.go(this.model.nodes[at]);
  }

  stepBlock(step) {
    const { blocks } = this.layout;
    const index = this.selected ? blocks.indexOf(this.layout.blockOf(this.selected)) : -step;
    this.stepTo(index + step);
  }

  stepTo(index) {
    const block = this.layout.blocks[index];
    if (block) this.go(this.model.nodes[block.start]);
  }

  go(node) {
    this.events.select(node);
    this.reveal(node);
  }
}
