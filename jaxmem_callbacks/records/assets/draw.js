// Elements, sizes and scales that every view shares. Texts of a run reach the page as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.setAttribute("class", value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// Give a node these children, in lists or not, and no others.
export function put(node, ...children) {
  node.replaceChildren();
  return filled(node, {}, children);
}

export function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  let size = Number(count), unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) { size /= 1024; unit += 1; }
  return `${fixed(size, unit === 0 || Math.abs(size) >= 100 ? 0 : 1)} ${UNITS[unit]}`;
}

// With so many digits, a tie to the even one: as the tables of the same page, which Python has written.
function fixed(number, digits) {
  const scaled = Math.abs(number) * 10 ** digits, low = Math.floor(scaled);
  return scaled - low === 0.5 && low % 2 === 0 ? (Math.sign(number) * low / 10 ** digits).toFixed(digits) : number.toFixed(digits);
}

export function signed(count) {
  return count > 0 ? `+${bytes(count)}` : count < 0 ? `\u2212${bytes(-count)}` : "0";
}

export function whole(number) {
  return number === null || number === undefined ? "unknown" : Number(number).toLocaleString("en-US");
}

export function percent(share) {
  if (!Number.isFinite(share)) return "unknown";
  return `${fixed(100 * share, Math.abs(share) < 0.0995 && share !== 0 ? 1 : 0)}%`;
}

export function clock(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Round values from `low` to `high`, about `count` of them; of bytes in powers of 1024.
export function ticks(low, high, count, inBytes = false) {
  const span = high - low;
  if (!(span > 0)) return [low];
  let unit = 1;
  if (inBytes) while (unit * 1024 <= span) unit *= 1024;
  const rough = span / unit / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = unit * power * [1, 2, 5, 10].find(factor => factor * power >= rough * (1 - 1e-9));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at + 0 || 0);
  return found;
}

export function scale(from, to, start, end) {
  const span = to - from || 1;
  const at = value => start + (value - from) / span * (end - start);
  at.back = place => from + (place - start) / ((end - start) || 1) * span;
  return at;
}

// Call `draw(width)` now and whenever the node's width changes.
export function sized(node, draw) {
  let known = 0;
  new ResizeObserver(() => {
    const width = Math.floor(node.clientWidth);
    if (width > 0 && width !== known) { known = width; draw(width); }
  }).observe(node);
  return node;
}

// How wide a text is in the page's font, in pixels.
const pen = document.createElement("canvas").getContext("2d");
let family = null;

export function wide(text, weight = 400, size = 12) {
  family ??= getComputedStyle(document.body).fontFamily;
  pen.font = `${weight} ${size}px ${family}`;
  return pen.measureText(text).width;
}

// As much of a text as there is room for, in pixels; nothing where that would be no more than two letters.
export function fit(text, room, weight = 400) {
  if (wide(text, weight) <= room) return text;
  let most = text.length - 1;
  while (most > 2 && wide(`${text.slice(0, most)}\u2026`, weight) > room) most -= 1;
  return most > 2 ? `${text.slice(0, most)}\u2026` : "";
}

// One box of words beside the pointer, for the whole page.
let box = null;

export function tip(event, ...rows) {
  if (box === null || !box.isConnected) {
    box = el("div", { class: "tip", role: "status" });
    document.body.append(box);
  }
  box.replaceChildren(...rows.flat().filter(row => row).map(row => row instanceof Node ? row : el("div", {}, row)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const spot = event.clientX === undefined || (event.clientX === 0 && event.clientY === 0 && event.target)
    ? event.target.getBoundingClientRect() : null;
  const x = spot ? spot.left + spot.width / 2 : event.clientX, y = spot ? spot.top : event.clientY;
  const left = x + 16 + width < window.innerWidth ? x + 16 : x - 16 - width;
  const top = y + 16 + height < window.innerHeight ? y + 16 : y - 16 - height;
  box.style.left = `${Math.max(6, left)}px`;
  box.style.top = `${Math.max(6, top)}px`;
}

export function untip() {
  if (box !== null) box.hidden = true;
}

export function swatch(style) {
  return el("i", { class: `swatch ${style}` });
}

// Of one choice among few; `pick` is called with the value.
export function switches(label, choices, chosen, pick) {
  const buttons = choices.map(([value, words]) => el("button", {
    type: "button", "aria-pressed": String(value === chosen), title: words,
    onclick: () => {
      buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(choices[at][0] === value)));
      pick(value);
    },
  }, words));
  return el("div", { class: "switches", role: "group", "aria-label": label }, buttons);
}

export function choose(label, choices, chosen, pick) {
  const list = el("select", { "aria-label": label, onchange: () => pick(choices[list.selectedIndex][0]) },
    choices.map(([value, words]) => el("option", { selected: value === chosen }, words)));
  const whole = el("label", { class: "choose" }, el("span", {}, label), list);
  whole.pick = value => { list.selectedIndex = choices.findIndex(([one]) => one === value); pick(value); };
  return whole;
}

// Words that lead to another place of the page.
export function link(words, go) {
  return el("button", { type: "button", class: "link", onclick: go }, words);
}

// Blocks of a document: sentences, tables, lists and lines to paste.
export function blocks(list, level = 3) {
  return (list || []).map(block => {
    if (block.code) return pasted(block.code.join("\n"));
    if (block.items) return el("ul", {}, block.items.map(item => el("li", {}, item)));
    if (block.rows) return table(block);
    if (block.blocks) {
      return el("section", { class: block.style || null, id: block.name || null },
        block.title ? el(`h${level}`, {}, block.title) : null, blocks(block.blocks, Math.min(level + 1, 6)));
    }
    return el("p", { class: block.style || null }, block.label ? [el("strong", {}, block.label), " "] : null, block.text);
  });
}

export function table({ columns = [], rows, sides = [], bars = null }) {
  const cell = value => value instanceof Node ? value : value && value.to ? el("a", { href: `#${value.to}` }, value.text) : broken(value);
  const style = (value, at) => [sides[at] === "right" ? "right" : "", String(value).length < 12 ? "short" : ""].filter(Boolean).join(" ") || null;
  const two = columns.length === 2;
  return el("div", { class: "scroll" }, el("table", { class: two ? "facts" : columns.length === 1 ? "text" : null },
    columns.some(name => name) ? el("thead", {}, el("tr", {}, columns.map((name, at) => el("th", { class: style(name, at) }, name)),
      bars ? el("th", {}) : null)) : null,
    el("tbody", {}, rows.map((row, number) => el("tr", {}, row.map((value, at) => el("td", { class: style(value, at) }, cell(value))),
      bars ? el("td", { class: "bar" }, bar(bars[number])) : null)))));
}

// A text that may end a line behind a slash, as in the path of a file or a module.
function broken(text) {
  return String(text).split(/(?<=\w\/)(?=\w)/).flatMap((part, at) => at ? [el("wbr"), part] : [part]);
}

function bar(share) {
  const line = el("i", {});
  line.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  return el("span", { class: "bar-line", "aria-hidden": "true" }, line);
}

// Lines to paste, with a button that copies them.
export function pasted(text) {
  const button = el("button", { type: "button", class: "copy", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  const code = el("code", {}, text);
  return el("div", { class: "paste" }, el("pre", {}, code), button);
}
