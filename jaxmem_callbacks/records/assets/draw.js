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

// The long axis of a figure, which is zoomed and moved: by dragging, wheel, keys and buttons, in all figures alike. `view` keeps `from`,
// `to` (null: all of it) and `here`, a place that is marked. A drawing begins with `over`, the ends of the axis, and gives its scale to `on`.
export function lens(host, view, again, all) {
  const shade = el("div", { class: "chosen" });
  let first = 0, last = 1, least = 1, x = null, pressed = null;
  const set = (low, high) => {
    const span = Math.min(Math.max(high - low, least), last - first), middle = (low + high) / 2;
    const begin = Math.min(Math.max(middle - span / 2, first), last - span);
    [view.from, view.to] = span < last - first ? [begin, begin + span] : [null, null];
    const focused = host.contains(document.activeElement);
    again();
    if (focused && !host.contains(document.activeElement)) host.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
  };
  const ends = () => [view.from ?? first, view.to ?? last];
  const zoom = (factor, place) => {
    const [from, to] = ends(), at = place >= from && place <= to ? place : (from + to) / 2;
    set(at - (at - from) * factor, at + (to - at) * factor);
  };
  const move = share => { const [from, to] = ends(), by = share * (to - from); set(from + by, to + by); };
  const reset = () => { view.here = null; set(first, last); };
  const actions = [["\u2039", "earlier", () => move(-0.5)], ["\u2212", "zoom out", () => zoom(2, self.place)],
    ["+", "zoom in", () => zoom(0.5, self.place)], ["\u203a", "later", () => move(0.5)], [all, all, reset]];
  const buttons = actions.map(([words, title, act]) => el("button", { type: "button", title, "aria-label": title, onclick: act }, words));
  const self = {
    place: undefined,  // where keys and buttons zoom, where it is in sight
    controls: el("div", { class: "switches lens", role: "group", "aria-label": "zoom" }, buttons),
    // From where to where is drawn, of an axis with these ends of which at least so much is seen.
    over(...known) {
      [first, last, least] = known;
      if (!(last - first > least)) last = first + least;
      const [from, to] = ends();
      buttons.forEach((button, at) => { button.disabled = [from <= first, view.from === null, to - from <= least, to >= last, view.from === null && !view.here][at]; });
      return [from, to];
    },
    on(known) { x = known; },
    // Move so far that a stretch can be seen, and no further.
    reveal(low, high) {
      const [from, to] = ends(), by = low < from ? low - from : high > to ? Math.min(high - to, low - from) : 0;
      if (by) set(from + by, to + by);
    },
    // Zoom in on a stretch, with as much around it as a part of the whole.
    around(low, high) { const more = (last - first) / 12; set(low - more, high + more); },
    set,
  };
  const within = value => { const [from, to] = ends(); return Math.min(Math.max(value, from), to); };
  const across = clientX => within(x.back(clientX - host.getBoundingClientRect().left));
  host.addEventListener("pointerdown", event => {
    const [from, to] = ends();
    if (x && event.button === 0) pressed = { at: event.clientX, from, to, unit: (to - from) / (x(to) - x(from)), moves: event.shiftKey, begun: false };
  });
  host.addEventListener("pointermove", event => {
    if (pressed && !(event.buttons & 1)) pressed = null;
    if (!pressed || (!pressed.begun && Math.abs(event.clientX - pressed.at) <= 6)) return;
    if (!pressed.begun) { pressed.begun = true; host.setPointerCapture(event.pointerId); }
    untip();
    if (pressed.moves) {
      const by = (pressed.at - event.clientX) * pressed.unit;
      set(pressed.from + by, pressed.to + by);
      return;
    }
    const [low, high] = [pressed.at, event.clientX].map(across).sort((a, b) => a - b);
    shade.style.left = `${x(low)}px`;
    shade.style.width = `${x(high) - x(low)}px`;
    host.append(shade);
  });
  const end = event => {
    const done = pressed;
    pressed = null;
    shade.remove();
    if (done && done.begun && !done.moves && event.type === "pointerup") set(...[done.at, event.clientX].map(across).sort((a, b) => a - b));
  };
  host.addEventListener("pointerup", end);
  host.addEventListener("pointercancel", end);
  host.addEventListener("dblclick", reset);
  host.addEventListener("wheel", event => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, across(event.clientX));
    else if (sideways && x && view.from !== null) {
      const [from, to] = ends(), by = sideways * (to - from) / (x(to) - x(from));
      set(from + by, to + by);
    }
    else return;
    event.preventDefault();
  }, { passive: false });
  host.addEventListener("keydown", event => {
    if (event.defaultPrevented) return;
    const act = { "+": 2, "=": 2, "-": 1, 0: 4, Escape: 4 }[event.key], by = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (act !== undefined) actions[act][2]();
    else if (by && view.from !== null) move(by);
    else return;
    event.preventDefault();
  });
  return self;
}

// A part of a picture in which what goes beyond its edges is not seen.
export function framed(x, y, width, height, ...children) {
  return svg("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` }, children);
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

// A mouse has left a figure. A finger has only been lifted: its words stay until another tap.
export function gone(event, act) {
  if (event.pointerType !== "touch") act();
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
