// What makes the peak: a treemap of groups down to buffers, the largest of them in a table, and two programs side by side.

import { bytes, choose, el, fit, link, percent, put, signed, sized, svg, swatch, table, tip, untip, whole, wide } from "./draw.js";

// Group -> class of its colour; what is not named takes a grey.
const COLOURS = {
  parameters: "s0", arguments: "s0", "optimizer state": "s1", gradients: "s2", "saved activations": "s3", temporaries: "s4",
  batch: "s5", results: "s6", state: "s9", constants: "s8", other: "s7",
  "other arrays": "s8",
};

export function colour(group) {
  return COLOURS[group] || "rest";
}

const ALIKE = ["group", "operation", "shape", "bytes", "source"];

// A value among others: of those that look the same there, the one that has the same place among them as it has in its own list.
function twin(value, own, others) {
  const alike = list => list.filter(one => ALIKE.every(key => one[key] === value[key]));
  const found = alike(others);
  return found[alike(own).indexOf(value) % found.length];
}

function atThePeak({ step }) {
  return step ? step.blocks.filter(block => block.first <= step.peak_at && step.peak_at <= block.last) : [];
}

// The block of the schedule that is a buffer of the peak, and the reverse; undefined where there is none.
export function blockOf(program, buffer) {
  return twin(buffer, program.peak.buffers, atThePeak(program));
}

export function bufferOf(program, block) {
  return program.peak ? twin(block, atThePeak(program), program.peak.buffers) : undefined;
}

export function whatMakesThePeak(run, page) {
  const programs = (run.programs || []).filter(one => one.peak && one.peak.bytes > 0)
    .sort((a, b) => (b.bytes ?? b.peak.bytes) - (a.bytes ?? a.peak.bytes));
  if (!programs.length) {
    return el("p", { class: "soft" }, "No program reported what it needs. Make the step with jm.jit_step, and it does.");
  }
  const view = page.keep(run, "peak", { program: programs[0], group: null, against: null });
  view.program = programs.find(one => one.name === view.program.name) || programs[0];
  view.against = null;
  const map = el("div", { class: "treemap", role: "application",
    "aria-label": "Treemap of the peak. Arrow keys go through it, Enter opens a group, Escape closes it." });
  const about = el("div", { class: "about" });
  const beside = el("div", {});
  const head = el("div", { class: "crumbs" });
  let width = 0;
  let cells = new Map();
  const go = buffer => page.go(run, "step", { program: view.program, block: blockOf(view.program, buffer) });
  const again = () => {
    if (width) cells = draw(view, map, head, width, again, go);
    describe(view, about, again, go);
    beside.replaceChildren(view.against ? grown(view.program, view.against) : "");
  };
  sized(map, now => { width = now; cells = draw(view, map, head, width, again, go); });
  const others = page.runs.flatMap(other => (other.programs || []).filter(one => one.peak && !(other === run && one === view.program))
    .map(one => [one, `${other === run ? "" : `${other.name}: `}${one.name}`]));
  const pick = value => { view.program = value; view.group = null; again(); };
  const list = programs.length > 1 ? choose("program", programs.map(one => [one, `${one.name}, ${bytes(one.bytes ?? one.peak.bytes)}`]), view.program, pick) : { pick };
  page.shows(run, "peak", ({ program, buffer }) => {
    list.pick(programs.find(one => one.name === program));
    if (buffer) { view.group = buffer.group; again(); }
    return cells.get(buffer) || map.querySelector(".cell");
  });
  const controls = programs.length < 2 && !others.length ? null : el("div", { class: "controls" },
    list instanceof Node ? list : null,
    others.length ? choose("compared with", [[null, "nothing"], ...others], null, value => { view.against = value; again(); }) : null);
  again();
  return el("div", {}, controls, head, map, about, beside);
}

// The peak's groups with their named buffers and what is left of each.
function tree(peak) {
  return peak.groups.map(group => {
    const parts = peak.buffers.filter(buffer => buffer.group === group.name);
    const rest = group.bytes - parts.reduce((sum, buffer) => sum + buffer.bytes, 0);
    const more = group.count === null ? null : group.count - parts.length;
    const children = [...parts];
    if (rest > 0 || !parts.length) {
      children.push({ group: group.name, bytes: parts.length ? rest : group.bytes, rest: true,
        shape: parts.length ? `${more > 0 ? `${whole(more)} smaller ones` : "the rest"}` : "" });
    }
    return { ...group, children };
  }).filter(group => group.bytes > 0).sort((a, b) => b.bytes - a.bytes);
}

function draw(view, map, head, width, again, go) {
  const peak = view.program.peak, groups = tree(peak);
  const shown = view.group ? groups.filter(group => group.name === view.group) : groups;
  const height = Math.round(Math.min(Math.max(width * 0.42, 260), 430));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  const cells = [], known = new Map();
  for (const [group, box] of squarified(shown, { x: 0, y: 0, width, height })) {
    const headed = box.height > 46 && box.width > 70 ? 20 : 0;
    const part = svg("g", { class: `group ${colour(group.name)}` });
    part.append(svg("rect", { class: "ground", x: box.x + 1, y: box.y + 1, width: Math.max(box.width - 2, 0), height: Math.max(box.height - 2, 0), rx: 4 }));
    if (headed) {
      part.append(svg("text", { class: "heading", x: box.x + 8, y: box.y + 15 }, fit(`${group.name}  ${bytes(group.bytes)}`, box.width - 14, 600)));
    }
    const inner = { x: box.x + 2, y: box.y + 2 + headed, width: box.width - 4, height: box.height - 4 - headed };
    for (const [buffer, cell] of squarified(group.children, inner)) {
      const node = svg("g", { class: `cell${buffer.rest ? " rest-of" : ""}`, tabindex: cells.length ? -1 : 0, role: "button",
        "aria-label": `${group.name}: ${buffer.shape || ""} ${buffer.operation || ""} ${bytes(buffer.bytes)}` },
      svg("rect", { x: cell.x + 1, y: cell.y + 1, width: Math.max(cell.width - 2, 0.5), height: Math.max(cell.height - 2, 0.5), rx: 3 }));
      if (cell.width > 54) {
        const [first, ...more] = labels(buffer, group, cell.width - 13);
        if (first && cell.height > 20) node.append(svg("text", { x: cell.x + 7, y: cell.y + 16 }, first));
        more.slice(0, Math.max(Math.floor((cell.height - 22) / 15), 0)).forEach((text, number) =>
          node.append(svg("text", { class: "second", x: cell.x + 7, y: cell.y + 31 + 15 * number }, text)));
      }
      // In an opened group a buffer leads to its block within the step, and what has none closes the group.
      const leads = view.group && !buffer.rest && blockOf(view.program, buffer);
      known.set(buffer, node);
      const words = event => tip(event, el("strong", {}, `${bytes(buffer.bytes)}, ${percent(buffer.bytes / peak.bytes)} of the peak`),
        el("div", {}, swatch(colour(group.name)), group.name), buffer.shape, buffer.operation, buffer.source, buffer.why,
        leads ? el("div", { class: "apart" }, "Click shows it within the step.") : null);
      node.addEventListener("pointermove", words);
      node.addEventListener("pointerleave", untip);
      node.addEventListener("focus", () => words({ target: node }));
      node.addEventListener("blur", untip);
      node.addEventListener("click", () => {
        untip();
        if (leads) { go(buffer); return; }
        view.group = view.group ? null : group.name;
        again();
      });
      cells.push(node);
      part.append(node);
    }
    picture.append(part);
  }
  map.onkeydown = event => {
    const at = cells.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && at >= 0) cells[(at + step + cells.length) % cells.length].focus();
    else if (event.key === "Enter" && at >= 0) {
      cells[at].dispatchEvent(new Event("click"));
      if (document.activeElement === document.body) map.querySelector(".cell")?.focus();
    }
    else if (event.key === "Escape" && view.group) { view.group = null; again(); map.querySelector(".cell")?.focus(); }
    else return;
    event.preventDefault();
  };
  map.replaceChildren(picture);
  put(head, el("button", { type: "button", class: "quiet", disabled: !view.group, onclick: () => { view.group = null; again(); } },
    view.program.name), ...(view.group ? [" \u203a ", el("strong", {}, view.group)] : []),
  el("span", { class: "soft" }, `  ${bytes(shown.reduce((sum, group) => sum + group.bytes, 0))}${peak.source ? `, ${peak.source}` : ""}`));
  return known;
}

// The words of a cell, the most telling first: what it is, how large, its shape, its line.
function labels(buffer, group, room) {
  const shape = short(buffer.shape), cut = text => fit(text, room);
  if (buffer.rest || !buffer.operation) return [cut(shape || group.name), cut(bytes(buffer.bytes))].filter(Boolean);
  return [named(buffer.operation, room), cut(bytes(buffer.bytes)), cut(shape), cut((buffer.source || "").split("/").pop())].filter(Boolean);
}

// What JAX itself puts into the path of an operation.
const OF_JAX = /^(jit|pjit|jvp|vmap|transpose|checkpoint|remat\d?|while|body|cond|closed_call|eval_jaxpr|rematted_computation)\b/;

// As many of a path's last parts as there is room for: of an operation its modules, of an argument its keys.
function named(path, room) {
  const operation = path.split(";").pop().split("/");
  const parts = operation.length > 1 ? operation.filter((part, at) => at === operation.length - 1 || !OF_JAX.test(part)).map((part, at) => at ? `/${part}` : part)
    : path.split(/(?=[.[])/);
  let found = parts.pop();
  while (parts.length && wide(parts[parts.length - 1] + found) <= room) found = parts.pop() + found;
  return fit(found.replace(/^[/.]/, ""), room);
}

function short(shape) {
  return (shape || "").replace(/\{[^{}]*\}/g, "").replace(/\/\*.*?\*\//g, "");
}

function describe(view, about, again, go) {
  const { peak, ...program } = view.program;
  const groups = tree(peak);
  const rows = (view.group ? groups.filter(group => group.name === view.group) : groups).flatMap(group => group.children)
    .filter(buffer => !buffer.rest).sort((a, b) => b.bytes - a.bytes).slice(0, 12)
    .map(buffer => [bytes(buffer.bytes), percent(buffer.bytes / peak.bytes), buffer.group, short(buffer.shape), blockOf(view.program, buffer) ? link(buffer.operation || "in the step", () => go(buffer)) : buffer.operation || "", (buffer.source || "").split("/").pop()]);
  const keys = el("ul", { class: "keys" }, groups.map(group => el("li", {}, el("button", { type: "button", "aria-pressed": String(!view.group || view.group === group.name),
    onclick: () => { view.group = view.group === group.name ? null : group.name; again(); } },
  swatch(colour(group.name)), `${group.name} ${bytes(group.bytes)}, ${percent(group.bytes / peak.bytes)}`))));
  const facts = [
    peak.moment ? `It is reached at ${peak.moment}.` : null,
    peak.basis && peak.basis !== "alive at the peak" ? `${peak.basis[0].toUpperCase()}${peak.basis.slice(1)}.` : null,
    program.planned_bytes && program.bytes ? `Planned ${bytes(program.planned_bytes)}, compiled ${bytes(program.bytes)}.` : null,
    program.compiler_remat ? `The compiler recomputes ${whole(program.compiler_remat)} instructions by itself.` : null,
    program.compiles > 1 ? `Compiled ${program.compiles} times; this is the compile that needs most.` : null,
  ].filter(Boolean);
  put(about, keys, facts.length ? el("p", { class: "soft" }, facts.join(" ")) : "",
    rows.length ? el("details", { open: Boolean(view.group) }, el("summary", {}, "The largest buffers"),
      table({ columns: ["size", "of the peak", "group", "shape", "operation", "line"], rows, sides: ["right", "right"] })) : "");
}

// What grew from one program to another, group by group.
function grown(program, other) {
  const size = (one, group) => one.peak.groups.filter(each => each.name === group).reduce((sum, each) => sum + each.bytes, 0);
  const names = [...new Set([...program.peak.groups, ...other.peak.groups].map(group => group.name))];
  const most = Math.max(...names.flatMap(group => [size(program, group), size(other, group)]), 1);
  const rows = names.map(group => [group, size(other, group), size(program, group)])
    .sort((a, b) => Math.abs(b[2] - b[1]) - Math.abs(a[2] - a[1]));
  const strip = (value, style) => { const node = el("i", { class: style }); node.style.width = `${100 * value / most}%`; return el("span", { class: "strip" }, node); };
  return el("div", { class: "beside" }, el("h4", {}, `${program.name} compared with ${other.name}: ${signed(program.peak.bytes - other.peak.bytes)}`),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["group", other.name, program.name, "grew by", ""].map((text, at) => el("th", { class: at && at < 4 ? "right" : null }, text)))),
      el("tbody", {}, rows.map(([group, before, now]) => el("tr", {}, el("td", {}, swatch(colour(group)), group), el("td", { class: "right" }, bytes(before)),
        el("td", { class: "right" }, bytes(now)), el("td", { class: `right ${now > before ? "more" : now < before ? "less" : ""}` }, signed(now - before)),
        el("td", { class: "strips" }, strip(before, "rest"), strip(now, colour(group)))))))));
}

// Boxes whose areas are as the sizes, as square as may be: [item, box] pairs.
export function squarified(items, room) {
  const total = items.reduce((sum, item) => sum + item.bytes, 0);
  if (!(total > 0) || room.width <= 0 || room.height <= 0) return [];
  const factor = room.width * room.height / total;
  const waiting = items.filter(item => item.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const done = [];
  let { x, y, width, height } = room;
  while (waiting.length) {
    const side = Math.min(width, height);
    const row = [];
    let area = 0;
    const worst = (sum, large, small) => Math.max(side * side * large / (sum * sum), sum * sum / (side * side * small));
    while (waiting.length) {
      const next = waiting[0].bytes * factor;
      const large = row.length ? row[0].bytes * factor : next;
      const now = row.length ? worst(area, large, row[row.length - 1].bytes * factor) : Infinity;
      if (row.length && worst(area + next, large, next) > now) break;
      row.push(waiting.shift());
      area += next;
    }
    const depth = side > 0 ? area / side : 0;
    let along = 0;
    for (const item of row) {
      const length = depth > 0 ? item.bytes * factor / depth : 0;
      done.push([item, width >= height ? { x, y: y + along, width: depth, height: length } : { x: x + along, y, width: length, height: depth }]);
      along += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    width = Math.max(width, 0);
    height = Math.max(height, 0);
  }
  return done;
}
