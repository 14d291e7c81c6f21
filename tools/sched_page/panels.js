// Everything around the picture: totals, details of one thing, lists.
const CHUNK = 300;  // rows that a list shows at once

function dot(model, device) { return make("span", { class: "dot", mark: model.colour(device) }); }

function summary(model) {
  const cards = [];
  for (const d of model.devices) {
    const mine = model.memory.filter((m) => m.device === d.name);
    const sum = (key) => mine.reduce((a, m) => a + m[key], 0);
    const [weights, memory, compute] = ["weights", "memory", "compute"].map(sum);
    const total = Math.max(1, weights + memory + compute);
    const parts = [[weights, "weights"], [memory, "keys, values, states"], [compute, "compute"]];
    const work = [counted(d.splits, "split"), counted(d.nodes, "node"), bytes(d.traffic) + " read and written"];
    if (d.seconds !== null && d.nodes) work.push(`${time(d.seconds)} modelled`);
    cards.push(make("div", { class: "card", mark: model.colour(d.name) },
      make("b", {}, d.name), " ", make("span", { class: "faint" }, d.description),
      make("div", {}, work.join(" · ")),
      make("div", { class: "bar", "aria-hidden": "true" },
        ...parts.map(([n]) => make("i", { style: `width:${(100 * n) / total}%` }))),
      make("small", {}, "memory: " + (parts.filter(([n]) => n).map(([n, what]) => `${bytes(n)} ${what}`).join(" + ") || "none"))));
  }
  for (const s of model.seams)
    cards.push(make("div", { class: "card", mark: model.colour(s.origin) },
      make("b", {}, `${s.origin} → ${s.target}`),
      make("div", {}, `${counted(s.copies, "copy")}, ${bytes(s.moved)}`),
      make("small", {}, s.moved < s.bytes ? `expected; all of the experts are ${bytes(s.bytes)}` : "each time the graph runs")));
  if (model.seconds !== null) {
    const copying = model.splits.reduce((sum, s) => sum + s.copying, 0);
    cards.push(make("div", { class: "card" }, make("b", {}, `${time(model.seconds)} modelled`),
      make("div", {}, `${number(+(model.n_tokens / model.seconds).toPrecision(3))} tokens/s`),
      make("small", {}, copying ? `${time(copying)} of it for copies` : "nothing is copied")));
  }
  $("summary").replaceChildren(...cards);
}

// ---------------------------------------------------------------- details
function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return make("dl", {}, ...shown.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function kindOf(thing) {
  return { n: "node", l: thing.kind, c: `copy (${thing.kind})` }[thing.id[0]];
}

function links(model, ids, go) {
  const shown = ids.slice(0, 40).map((id) => {
    const thing = model.byId.get(id);
    return make("li", {}, make("button", { onclick: () => go(thing) },
      dot(model, thing.backend ?? thing.target), `${shownName(thing)} `,
      make("span", { class: "faint" }, `${thing.op ?? kindOf(thing)} ${thing.type} ${shape(thing.ne)}`)));
  });
  if (ids.length > shown.length) shown.push(make("li", {}, `and ${number(ids.length - shown.length)} more`));
  return make("ul", { class: "links" }, ...shown);
}

function related(model, thing, go) {
  const found = [];
  const sources = thing.sources ?? (thing.source ? [thing.source] : []);
  if (sources.length) found.push(make("h2", {}, "Reads"), links(model, sources, go));
  if (thing.readers.length) found.push(make("h2", {}, "Is read by"), links(model, thing.readers, go));
  return found;
}

function nodeDetails(model, n, go) {
  const copies = model.splits[n.split].copies.length;
  return [
    make("h2", {}, shownName(n)),
    make("p", { class: "faint" }, `${n.op} · node ${n.at} · ${n.section.name}`),
    make("p", { class: "why", mark: model.colour(n.backend) }, make("b", {}, n.backend),
      `: ${n.reason}`, n.cause ? make("span", { class: "faint" }, ` (${n.cause})`) : null),
    facts([
      ["result", `${n.type} ${shape(n.ne)}, ${bytes(n.bytes)}`],
      ["work", n.is_view ? "none: a view" : `${bytes(n.traffic)} read and written, ${flops(n.flops)}`],
      ["modelled", n.is_view ? "" : time(n.seconds)],
      ["split", `${n.split} on ${model.splits[n.split].backend}${copies ? `, after ${counted(copies, "copy")}` : ""}`],
      ["output", n.is_output ? "yes: its memory is kept" : ""],
    ]),
    ...related(model, n, go),
  ];
}

function leafDetails(model, l, go) {
  return [
    make("h2", {}, shownName(l)), make("p", { class: "faint" }, l.kind),
    make("p", { class: "why", mark: model.colour(l.backend) }, make("b", {}, l.backend), `: ${l.reason}`),
    facts([["data", `${l.type} ${shape(l.ne)}, ${bytes(l.bytes)}`], ["buffer", l.buffer || "in the graph's own memory"]]),
    ...related(model, l, go),
  ];
}

function copyDetails(model, c, go) {
  return [
    make("h2", {}, shownName(c)),
    make("p", { class: "faint" }, `${kindOf(c)} before split ${c.split}`),
    make("p", { class: "why", mark: model.colour(c.target) }, make("b", {}, `${c.origin} → ${c.target}`),
      `: ${c.target} cannot read it where it lies`),
    facts([["data", `${c.type} ${shape(c.ne)}, ${bytes(c.bytes)}`],
      ["back", c.back ? `after the split it is copied to ${c.origin} again` : ""],
      ["moved", c.moved < c.bytes ? `${bytes(c.moved)} expected: only the experts in use` : bytes(c.moved)]]),
    ...related(model, c, go),
  ];
}

function copiesDetails(model, copies, go) {
  const moved = copies.reduce((sum, c) => sum + c.moved, 0);
  return [
    make("h2", {}, `${counted(copies.length, "copy")} before split ${copies[0].split}`),
    make("p", { class: "why", mark: model.colour(copies[0].origin) },
      make("b", {}, `${copies[0].origin} → ${copies[0].target}`), `: ${bytes(moved)}`),
    links(model, copies.map((c) => c.id), go),
  ];
}

function details(model, thing, go) {
  const parts = Array.isArray(thing) ? copiesDetails(model, thing, go)
    : thing ? { n: nodeDetails, l: leafDetails, c: copyDetails }[thing.id[0]](model, thing, go)
      : [make("h2", {}, "Details"), make("p", { class: "faint" },
        "Point at a block for a glance, click or press → for what it is, where it runs and why. " +
        "Blocks are operations in the order they run, arrows are copies between devices " +
        "(solid: results, dashed: weights, dotted: inputs), hatched bars the time they take. Narrow bars of half height are views: no work.")];
  $("details").replaceChildren(...parts);
}

function tip(model, hit) {
  if (hit.fold) {
    const n = hit.fold.repeats, what = hit.fold.open ? "Click to show one of them." : "Click to open them.";
    const { traffic, seconds, copying } = model.foldWork(hit.fold);
    const together = [`${bytes(traffic)} read and written`];
    if (seconds !== null) together.push(`${time(seconds)} computing, ${time(copying)} copying (modelled)`);
    return [make("b", {}, model.foldName(hit.fold)),
      make("div", {}, `${n} times the same operations on the same devices; the first is shown.`),
      make("div", {}, `Together: ${together.join(" · ")}`), make("div", { class: "faint" }, what)];
  }
  if (hit.copies) {
    const [c] = hit.copies, moved = hit.copies.reduce((sum, x) => sum + x.moved, 0);
    const took = hit.split.copying ? [make("div", {}, `all copies before split ${hit.split.index}: ${time(hit.split.copying)} modelled`)] : [];
    const names = hit.copies.slice(0, 6).map((x) => make("div", {}, `${x.name}: ${bytes(x.moved)}`));
    return [make("b", {}, `${c.origin} → ${c.target}: ${counted(hit.copies.length, "copy")}, ${bytes(moved)}`), ...took, ...names,
      hit.copies.length > 6 ? make("div", { class: "faint" }, `and ${hit.copies.length - 6} more`) : null];
  }
  const n = hit.node;
  return [make("b", {}, shownName(n)), make("div", {}, `${n.op} ${n.type} ${shape(n.ne)}, ${bytes(n.bytes)}`),
    n.is_view ? null : make("div", {}, [bytes(n.traffic) + " read and written", time(n.seconds)].filter(Boolean).join(" · ")),
    make("div", { class: "faint" }, `${n.backend}: ${n.reason}`)];
}

// ---------------------------------------------------------------- lists
const LISTS = {
  Copies: {
    rows: (m) => m.copies,
    columns: [
      ["Split", (c) => c.split, "n"], ["From", (c) => c.origin], ["To", (c) => c.target],
      ["Tensor", (c, m) => shownName(m.byId.get(c.source)), "go"], ["What", (c) => c.kind],
      ["Shape", (c) => `${c.type} ${shape(c.ne)}`], ["Size", (c) => c.bytes, "b"], ["Moved", (c) => c.moved, "b"],
    ],
  },
  Splits: {
    rows: (m) => m.splits,
    columns: [
      ["Split", (s) => s.index, "n"], ["Device", (s) => s.backend],
      ["First node", (s, m) => shownName(m.nodes[s.start]), "go"], ["Nodes", (s) => s.stop - s.start, "n"],
      ["Layers", (s, m) => layersOf(m, s)], ["Copies", (s) => s.copies.length, "n"],
      ["Moved", (s, m) => s.copies.reduce((sum, id) => sum + m.byId.get(id).moved, 0), "b"],
      ["Read and written", (s, m) => m.nodes.slice(s.start, s.stop).reduce((sum, n) => sum + n.traffic, 0), "b"],
      ["Copying", (s) => s.copying ?? 0, "t"],
      ["Computing", (s, m) => m.nodes.slice(s.start, s.stop).reduce((sum, n) => sum + (n.seconds ?? 0), 0), "t"],
    ],
    go: (s, m) => m.nodes[s.start],
  },
  Nodes: {
    rows: (m) => m.nodes,
    columns: [
      ["Node", (n) => n.at, "n"], ["Name", (n) => shownName(n), "go"], ["Operation", (n) => n.op],
      ["Device", (n) => n.backend], ["Why", (n) => n.reason, "why2"], ["Shape", (n) => `${n.type} ${shape(n.ne)}`],
      ["Read and written", (n) => n.traffic, "b"], ["Modelled", (n) => n.seconds ?? 0, "t"],
    ],
  },
  Weights: {
    rows: (m) => m.leafs,
    columns: [
      ["Name", (l) => shownName(l), "go"], ["Kind", (l) => l.kind], ["Buffer", (l) => l.buffer],
      ["Device", (l) => l.backend], ["Shape", (l) => `${l.type} ${shape(l.ne)}`], ["Size", (l) => l.bytes, "b"],
    ],
  },
  Memory: {
    rows: (m) => m.memory,
    columns: [
      ["Buffer", (r) => r.buffer], ["Device", (r) => r.device], ["Weights", (r) => r.weights, "b"],
      ["Keys, values, states", (r) => r.memory, "b"], ["Compute (this graph)", (r) => r.compute, "b"],
    ],
  },
};

function layersOf(model, split) {
  const first = model.nodes[split.start].section, last = model.nodes[split.stop - 1].section;
  return first === last ? first.name : `${first.name} – ${last.name}`;
}

class Lists {
  constructor(go) {
    this.go = go;
    this.name = "Copies";
    this.only = null;  // ids that a search has found
    for (const name of Object.keys(LISTS))
      $("tabs").append(make("button", { role: "tab", id: `tab-${name}`, "aria-controls": "list", onclick: () => this.pick(name) }, name));
    $("tabs").addEventListener("keydown", (e) => this.key(e));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const names = Object.keys(LISTS), n = names.length;
    this.pick(names[(names.indexOf(this.name) + step + n) % n]);
    $(`tab-${this.name}`).focus();
  }

  pick(name) {
    this.name = name;
    this.sorted = null;
    this.show();
  }

  show(model = this.model) {
    this.model = model;
    const found = LISTS[this.name];
    for (const name of Object.keys(LISTS)) {
      const tab = $(`tab-${name}`), mine = name === this.name;
      tab.textContent = `${name} ${number(LISTS[name].rows(model).length)}`;
      tab.setAttribute("aria-selected", mine);
      tab.tabIndex = mine ? 0 : -1;
    }
    $("list").setAttribute("aria-labelledby", `tab-${this.name}`);
    let rows = found.rows(model);
    if (this.only && this.name === "Nodes") rows = rows.filter((n) => this.only.has(n.id));
    if (this.sorted) {
      const [column, sign] = this.sorted, value = found.columns[column][1];
      const of = new Map(rows.map((r) => [r, value(r, model)]));
      rows = [...rows].sort((a, b) => sign * (of.get(a) < of.get(b) ? -1 : of.get(a) > of.get(b) ? 1 : 0));
    }
    const body = make("tbody");
    const table = make("table", {}, this.head(found), body);
    $("list").replaceChildren(rows.length ? table : make("p", { class: "faint" }, this.name === "Copies" ? "Nothing is copied: every node finds what it reads where it runs." : "None."));
    this.more(found, rows, body, 0);
  }

  head(found) {
    const cells = found.columns.map(([name, , kind], i) => {
      const sign = this.sorted && this.sorted[0] === i ? this.sorted[1] : 0;
      const flip = () => {
        this.sorted = [i, sign ? -sign : "nbt".includes(kind ?? "-") ? -1 : 1];
        this.show();
        $("list").querySelectorAll("th button")[i].focus();
      };
      return make("th", { scope: "col", class: "nbt".includes(kind ?? "-") ? "n" : null, "aria-sort": sign ? (sign > 0 ? "ascending" : "descending") : null },
        make("button", { onclick: flip }, name + (sign ? (sign > 0 ? " ▲" : " ▼") : "")));
    });
    return make("thead", {}, make("tr", {}, ...cells));
  }

  more(found, rows, body, start) {
    const part = rows.slice(start, start + CHUNK);
    body.append(...part.map((row) => make("tr", {}, ...found.columns.map(([, value, kind]) => this.cell(found, row, value, kind)))));
    const left = rows.length - start - part.length;
    if (left <= 0) return;
    const button = make("button", { onclick: () => { button.remove(); this.more(found, rows, body, start + CHUNK); } }, `Show more (${number(left)} left)`);
    $("list").append(button);
  }

  cell(found, row, value, kind) {
    const raw = value(row, this.model);
    if (kind === "go") {
      const target = found.go ? found.go(row, this.model) : row;
      return make("td", {}, make("button", { onclick: () => this.go(target) }, raw));
    }
    if (kind === "b") return make("td", { class: "n" }, raw ? bytes(raw) : "–");
    if (kind === "t") return make("td", { class: "n" }, raw ? time(raw) : "–");
    return make("td", { class: kind ?? null }, typeof raw === "number" ? number(raw) : raw);
  }
}
