// Numbers and texts as people read them.
const $ = (id) => document.getElementById(id);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1024; i++; }
  return `${n.toFixed(i === 0 || n >= 100 ? 0 : n >= 10 ? 1 : 2)} ${units[i]}`;
}

function time(s) {
  if (s === null || s === undefined) return "";
  if (s >= 1) return `${s.toFixed(2)} s`;
  return s >= 1e-3 ? `${(1e3 * s).toFixed(2)} ms` : `${(1e6 * s).toFixed(1)} µs`;
}

const number = (n) => n.toLocaleString("en");
const shape = (ne) => `[${ne.join(", ")}]`;

function counted(n, what) {
  if (n === 1) return `1 ${what}`;
  return `${number(n)} ${what.endsWith("y") ? what.slice(0, -1) + "ies" : what + "s"}`;
}

function flops(n) {
  const units = ["", "k", "M", "G", "T"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i++; }
  return `${n.toFixed(n >= 100 || i === 0 ? 0 : 1)} ${units[i]}FLOP`;
}

// An element; children are elements or texts, so that names are never read as markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "mark") element.style.setProperty("--mark", value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

const shownName = (thing) => thing.name.trim() || thing.id;
