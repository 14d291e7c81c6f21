// Puts the page together and keeps its parts in step.
const data = JSON.parse($("data").textContent);
const models = data.graphs.map((graph) => new Model(graph));
let model = models[0];

const view = new View(new Painter($("canvas")), {
  select: (node, copies) => select(node ?? copies),
  hover: showTip,
  toggle: (fold) => { if (fold && fold.repeats > 1) toggle([fold], !fold.open); },
  toggleAll,
});
const lists = new Lists(go);

function graphName(m) {
  return m.n_tokens === 1 ? `${m.name}: 1 token` : `${m.name}: ${number(m.n_tokens)} tokens`;
}

function relayout() {
  view.show(model, new Layout(model, $("measure").value));
  const many = model.folds.filter((f) => f.repeats > 1);
  $("fold").hidden = !many.length;
  $("fold").textContent = many.some((f) => !f.open) ? "Open layers" : "Fold layers";
  const devices = model.devices.map((d) => `${d.name} ${counted(d.splits, "split")}, ${counted(d.nodes, "node")}`);
  $("canvas").setAttribute("aria-label", `${graphName(model)} in ${counted(model.splits.length, "split")} ` +
    `with ${counted(model.copies.length, "copy")}; ${devices.join("; ")}. The lists below say the same in words.`);
}

function showGraph(chosen) {
  model = chosen;
  [...$("graphs").children].forEach((b, i) => {
    b.setAttribute("aria-checked", models[i] === model);
    b.tabIndex = models[i] === model ? 0 : -1;
  });
  const byTime = $("measure").querySelector('[value="seconds"]');
  byTime.disabled = !model.timed;
  if (!model.timed && $("measure").value === "seconds") $("measure").value = "traffic";
  view.selected = null;
  relayout();
  summary(model);
  details(model, null, go);
  lists.name = model.copies.length ? "Copies" : "Nodes";
  search();
  lists.show(model);
  view.all();
}

// ---------------------------------------------------------------- choosing
function select(thing) {
  view.selected = thing && thing.id?.[0] === "n" ? thing : null;
  details(model, thing, go);
  if (view.selected) $("live").textContent = `${shownName(thing)}, ${thing.op}, on ${thing.backend}: ${thing.reason}`;
  view.draw();
}

// Shows a node, or what a copy or leaf is needed for; opens the layers that hide it.
function go(thing) {
  const node = thing.id[0] === "n" ? thing : thing.id[0] === "c" ? model.nodes[model.splits[thing.split].start] : model.byId.get(firstReader(thing));
  if (node && model.isFolded(node)) toggle([node.section.fold], true);
  select(thing);
  if (node) view.centre(node);
}

function firstReader(leaf) {
  const first = leaf.readers[0];
  return first && first[0] === "c" ? model.byId.get(first).readers[0] : first;
}

function toggle(folds, open) {
  for (const f of folds) f.open = open;
  relayout();
  if (view.selected && model.isFolded(view.selected)) select(null);
  view.all();
  if (view.selected) view.reveal(view.selected);
}

function toggleAll() {
  const many = model.folds.filter((f) => f.repeats > 1);
  toggle(many, many.some((f) => !f.open));
}

function showTip(hit, x, y) {
  const box = $("tip");
  box.hidden = !hit;
  if (!hit) return;
  box.replaceChildren(...tip(model, hit).filter(Boolean));
  const { offsetLeft, offsetTop, clientWidth } = $("canvas");
  const left = offsetLeft + x + 16, wide = box.offsetWidth;
  box.style.left = `${left + wide > offsetLeft + clientWidth ? Math.max(4, offsetLeft + x - wide - 12) : left}px`;
  box.style.top = `${offsetTop + y + 18}px`;
}

// ---------------------------------------------------------------- search
let found = [], current = -1;

function search() {
  const text = $("query").value;
  found = model.find(text);
  current = -1;
  view.found = text.trim() ? new Set(found.map((n) => n.id)) : null;
  $("hits").textContent = text.trim() ? counted(found.length, "hit") : "";
  lists.only = view.found;
  if (view.found && lists.model === model) lists.name = "Nodes";
  if (lists.model === model) lists.show(model);
  view.draw();
}

function next(step) {
  if (!found.length) return;
  current = (current + step + found.length) % found.length;
  $("hits").textContent = `${current + 1} of ${number(found.length)}`;
  go(found[current]);
}

// ---------------------------------------------------------------- wiring
models.forEach((m) => $("graphs").append(
  make("button", { role: "radio", onclick: () => showGraph(m) }, graphName(m))));
$("graphs").addEventListener("keydown", (e) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
  if (!step) return;
  const i = (models.indexOf(model) + step + models.length) % models.length;
  showGraph(models[i]);
  $("graphs").children[i].focus();
});
$("query").addEventListener("input", search);
$("search").addEventListener("submit", (e) => { e.preventDefault(); next(1); });
$("query").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && e.shiftKey) { e.preventDefault(); next(-1); }
});
$("measure").addEventListener("change", () => { relayout(); view.all(); });
$("in").addEventListener("click", () => view.zoomAt(1.6, LEFT + view.room / 2));
$("out").addEventListener("click", () => view.zoomAt(1 / 1.6, LEFT + view.room / 2));
$("reset").addEventListener("click", () => view.all());
$("fold").addEventListener("click", toggleAll);

const darkness = window.matchMedia("(prefers-color-scheme: dark)");
function themed() {
  view.theme = document.documentElement.dataset.theme ?? (darkness.matches ? "dark" : "light");
  view.draw();
}
darkness.addEventListener("change", themed);
$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = view.theme === "dark" ? "light" : "dark";
  themed();
});
document.addEventListener("keydown", (e) => {
  if (e.key === "/" && !e.target.matches("input, select")) { e.preventDefault(); $("query").focus(); }
});
let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { view.painter.fit(model.devices.length); view.pan(0); }, 60);
});
showGraph(model);
themed();
