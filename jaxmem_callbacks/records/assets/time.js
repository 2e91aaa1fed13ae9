// Over time: memory of the device, the live arrays by kind, line or type, the host; events, saves and compiles marked.

import { colour } from "./peak.js";
import { bytes, choose, clock, el, gone, lens, scale, sized, svg, swatch, switches, ticks, tip, untip, whole, wide } from "./draw.js";

const LINES = {
  in_use_bytes: ["in use", "in-use"],
  reserved_bytes: ["reserved for temporaries", "reserved"],
  peak_bytes_since_start: ["peak since start", "peak"],
  pool_bytes: ["pool", "pool"],
  largest_free_bytes: ["largest free block", "free"],
  live_array_bytes: ["live arrays", "live"],
  device_used_bytes: ["whole device, all processes", "driver"],
};
const LEFT = 74, RIGHT = 14, TOP = 30, GAP = 38, BOTTOM = 34;
const EVERY = "each device", OTHER = "other arrays";
// What the live arrays are stacked by -> in the legend.
const STACKS = { kind: "by kind", line: "by the line that made them", type: "by type" };

export function overTime(run, page) {
  const curves = run.curves || [];
  if (!curves.length) return el("p", { class: "soft" }, "There is no figure, since no memory was read.");
  const onDevice = curves.filter(curve => LINES[curve.figure]);
  const devices = [...new Set(onDevice.map(curve => curve.device))];
  const forward = curves.every(curve => curve.steps.every((step, at) => at === 0 || step >= curve.steps[at - 1]));
  // A run whose steps are not registered has no kinds.
  const stacks = Object.keys(STACKS).filter(by => by !== "kind" || run.arrays && run.arrays.groups.some(group => group.kind !== OTHER));
  const view = page.keep(run, "time", { by: forward ? "steps" : "times", device: fullest(run, devices), stack: stacks[0],
    hidden: new Set(["pool_bytes"]), from: null, to: null, here: null });
  const keys = el("ul", { class: "keys" });
  const chart = el("div", { class: "chart" });
  let width = 0;
  const again = () => { if (width) draw(run, view, chart, keys, width, again, page, sight); };
  const sight = lens(chart, view, again, "Whole run");
  sized(chart, now => { width = now; again(); });
  page.shows(run, "time", ({ step, time_s }) => {
    view.here = { step, time_s };
    sight.place = placed(view, view.here);
    sight.around(sight.place, sight.place);
    return chart.querySelector("svg");
  });
  const controls = el("div", { class: "controls" },
    devices.length > 1 ? choose("device", [[EVERY, EVERY], ...devices.map(name => [name, name])], view.device,
      value => { view.device = value; again(); }) : null,
    forward ? switches("horizontal axis", [["steps", "step"], ["times", "time"]], view.by,
      value => { view.by = value; view.from = view.to = null; again(); }) : null,
    run.arrays ? switches("live arrays", stacks.map(by => [by, `by ${by}`]), view.stack,
      value => { view.stack = value; again(); }) : null,
    sight.controls, el("span", { class: "hint" }, "Drag to zoom, with Shift to move. Arrow keys, + and \u2212 work too."));
  return el("div", {}, controls, chart, keys);
}

// The device that held most, which is where a run fails first.
function fullest(run, devices) {
  const high = run.glance && run.glance.high;
  return high && devices.includes(high.device) ? high.device : devices[0];
}

// Where on the axis a moment is.
function placed(view, { step, time_s }) {
  return view.by === "steps" ? Math.max(step ?? 0, 0) : time_s;
}

function draw(run, view, chart, keys, width, again, page, sight) {
  const shown = run.curves.filter(curve => LINES[curve.figure] && (view.device === EVERY
    ? ["in_use_bytes", "live_array_bytes"].includes(curve.figure) && curve.device !== "all processes"
    : curve.device === view.device));
  const inUse = shown.some(curve => curve.figure === "in_use_bytes");
  const lines = shown.filter(curve => !(inUse && view.device === EVERY && curve.figure === "live_array_bytes"));
  // The host's memory is that of the process whose device is shown.
  const others = view.device.startsWith("process ") ? view.device : "host";
  const host = run.curves.filter(curve => curve.figure === "resident_bytes" && (view.device === EVERY
    ? curve.device !== "all processes" : curve.device === others));
  const all = [...lines, ...host];
  const at = (record, place) => view.by === "steps" ? Math.max(record.steps[place], 0) : record.times[place];
  const spot = moment => placed(view, moment);
  const ends = [...all, ...(run.arrays ? [run.arrays] : [])].flatMap(one => [at(one, 0), at(one, one.steps.length - 1)]);
  (run.events || []).forEach(event => ends.push(spot(event)));
  const [first, last] = [Math.min(...ends), Math.max(...ends)];
  const [from, to] = sight.over(first, last, view.by === "steps" ? 1 : 0.05);
  const x = scale(from, to, LEFT, width - RIGHT);
  sight.on(x);
  const inside = place => place >= from && place <= to;

  const panels = [{ name: "device", height: width < 560 ? 220 : 290 }];
  if (run.arrays) panels.push({ name: "live arrays", height: width < 560 ? 150 : 170 });
  if (host.length) panels.push({ name: "host", height: 84 });
  let top = TOP;
  for (const panel of panels) { panel.top = top; panel.bottom = top + panel.height; top = panel.bottom + GAP; }
  const height = top - GAP + BOTTOM, floor = height - BOTTOM;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "application",
    "aria-label": "Memory over time. Left and right move the cursor, plus and minus zoom, Enter opens the nearest event." });

  // What stands behind the lines: saves.
  for (const save of run.saves || []) {
    const [begin, end] = view.by === "steps" ? save.steps : [save.from, save.to];
    if (end < from || begin > to) continue;
    const left = x(Math.max(begin, from));
    picture.append(svg("rect", { class: "save", x: left - 1, y: TOP, width: Math.max(x(Math.min(end, to)) - left, 3),
      height: floor - TOP }));
  }

  const levels = [];
  if (run.limit_bytes) levels.push(["limit", run.limit_bytes, "limit"]);
  const needs = (run.programs || []).filter(one => one.bytes).sort((a, b) => b.bytes - a.bytes);
  needs.slice(0, 2).forEach(one => levels.push([`${one.name} needs`, one.bytes, "need", one.peak && one.peak.bytes > 0 ? { program: one.name } : null]));
  const planned = run.plan && run.plan.candidates[run.plan.chosen].bytes;
  if (planned) levels.push(["planned", planned, "planned"]);

  const visible = lines.filter(curve => !view.hidden.has(curve.figure));
  // What is drawn begins before the first edge and goes on after the last: a value holds until the next.
  const highest = (record, values) => { const [low, high] = places(record, at, from, to); return Math.max(0, ...values.slice(low, high + 1)); };
  const high = curve => highest(curve, curve.high);
  const most = Math.max(1, ...visible.map(high));
  // A limit far above all that was used would press the lines to the ground: it is named, and not drawn.
  const drawn = levels.filter(([, size]) => size <= 4 * most || levels.every(level => level[1] > 4 * most && level[1] >= size));
  const ceiling = 1.06 * Math.max(most, ...drawn.filter(([, size]) => size <= 4 * most).map(([, size]) => size));
  const above = levels.filter(([, size]) => size > ceiling);
  const y = scale(0, ceiling, panels[0].bottom, panels[0].top);
  grid(picture, y, ceiling, panels[0], width, "device", 5);
  for (const curve of visible) {
    const style = LINES[curve.figure][1];
    const is = curve.figure === "in_use_bytes" || (!inUse && curve.figure === "live_array_bytes");
    if (is && view.device !== EVERY) picture.append(svg("path", { class: `area ${style}`, d: area(curve, x, y, at, from, to) }));
    else if (curve.low) picture.append(svg("path", { class: `band ${style}`, d: band(curve, x, y, at, from, to) }));
    picture.append(svg("path", { class: `line ${style}`, d: line(curve, x, y, at, from, to) }));
  }
  const named = [], names = [];  // names are drawn over every line
  for (const [name, size, style, peak] of levels.filter(level => level[1] <= ceiling)) {
    const place = y(size);
    picture.append(svg("line", { class: `level ${style}`, x1: LEFT, x2: width - RIGHT, y1: place, y2: place }));
    const words = [-5, 14, -20, 29, -35].map(by => place + by).find(spot => spot > panels[0].top + 4 && !named.some(other => Math.abs(other - spot) < 14)) ?? place - 5;
    named.push(words);
    const text = `${name} ${bytes(size)}`, long = wide(text, 400, 11.5) + 8;
    names.push(svg("rect", { class: "level-ground", x: width - RIGHT - long, y: words - 11, width: long, height: 14, rx: 3 }),
      svg("text", { class: `level-name ${style}${peak ? " leads" : ""}`, x: width - RIGHT - 4, y: words, "text-anchor": "end",
        ...(peak ? { role: "button", tabindex: -1, "aria-label": `${text}: what makes its peak`, onclick: () => page.go(run, "peak", peak) } : {}) }, text));
  }

  // Live arrays, stacked.
  const stack = run.arrays ? stacked(run.arrays, view.stack) : null;
  if (stack) {
    const panel = panels[1];
    const sums = run.arrays.steps.map((_, place) => stack.reduce((sum, layer) => sum + layer.bytes[place], 0));
    const peak = 1.06 * Math.max(1, highest(run.arrays, sums));
    const up = scale(0, peak, panel.bottom, panel.top);
    grid(picture, up, peak, panel, width, "live arrays", 3);
    const base = run.arrays.steps.map(() => 0);
    stack.forEach(layer => {
      const under = [...base];
      layer.bytes.forEach((size, place) => { base[place] += size; });
      const [held, brief] = ribbon(run.arrays, under, base, x, up, at, from, to);
      picture.append(svg("path", { class: `layer ${layer.style}`, d: held }), brief ? svg("path", { class: layer.style, d: brief }) : "");
    });
  }
  if (host.length) {
    const panel = panels[panels.length - 1];
    const peak = 1.06 * Math.max(1, ...host.map(high));
    const up = scale(0, peak, panel.bottom, panel.top);
    grid(picture, up, peak, panel, width, "host", 2);
    host.forEach(curve => picture.append(svg("path", { class: "line host", d: line(curve, x, up, at, from, to) })));
  }

  // The horizontal axis.
  const begin = run.began_s ?? first;
  const marks = view.by === "steps" ? ticks(from, to, width / 110).filter(value => Number.isInteger(value))
    : ticks(from - begin, to - begin, width / 110).map(value => value + begin);
  marks.forEach(value => picture.append(svg("text", { class: "tick", x: x(value), y: floor + 17, "text-anchor": "middle" },
    view.by === "steps" ? whole(value) : clock(value - begin))));
  picture.append(svg("text", { class: "tick name", x: width - RIGHT, y: floor + 31, "text-anchor": "end" },
    view.by === "steps" ? "step" : "time since the first reading"));
  for (const compile of run.compiles || []) {
    const place = spot({ step: compile.step, time_s: compile.time_s });
    if (compile.step === null && view.by === "steps" || !inside(place)) continue;
    picture.append(svg("path", { class: "compile", d: `M${x(place)} ${floor}l4 6h-8z`,
      onpointermove: event => { event.stopPropagation(); tip(event, `${compile.program} was compiled`,
        compile.bytes ? `needs ${bytes(compile.bytes)}` : null, ...compile.changed.slice(0, 3)); }, onpointerleave: untip }));
  }

  // Cursor and zoom.
  const moment = place => view.by === "steps" ? `step ${whole(Math.round(place))}` : `after ${clock(place - begin)}`;
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: floor, visibility: "hidden" });
  const cover = svg("rect", { class: "cover", x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: floor - TOP });
  if (view.here && inside(spot(view.here))) {
    const across = x(spot(view.here)), left = across > width / 2;
    picture.append(svg("line", { class: "here", x1: across, x2: across, y1: TOP, y2: floor }),
      svg("text", { class: "level-name here-name", x: across + (left ? -5 : 5), y: TOP + 12, "text-anchor": left ? "end" : "start" }, moment(spot(view.here))));
  }
  picture.append(cursor, cover, ...names);
  const values = place => {
    const near = record => nearest(record, at, place);
    const rows = [];
    for (const curve of [...visible, ...host]) {
      const found = near(curve);
      if (found === null) continue;
      const [words, style] = LINES[curve.figure] || ["host, resident", "host"];
      rows.push(el("div", {}, swatch(style), `${words}${view.device === EVERY && curve.device !== "host" ? ` ${curve.device}` : ""}`,
        el("b", {}, bytes(curve.high[found]))));
    }
    const few = rows.length > 10 ? [...rows.slice(0, 9), `and ${rows.length - 9} more`] : rows;
    if (stack) {
      const found = held(run.arrays, at, place);
      if (found !== null) {
        const layers = stack.filter(layer => layer.bytes[found] > 0).sort((a, b) => b.bytes[found] - a.bytes[found]).slice(0, 5);
        few.push(el("div", { class: "apart" }, "live arrays"), ...layers.map(layer =>
          el("div", {}, swatch(layer.style), layer.name, el("b", {}, bytes(layer.bytes[found])))));
      }
    }
    return few;
  };
  const point = (event, place) => {
    place = Math.min(Math.max(place, from), to);
    cursor.setAttribute("x1", x(place));
    cursor.setAttribute("x2", x(place));
    cursor.setAttribute("visibility", "visible");
    tip(event, el("strong", {}, moment(place)), values(place));
    sight.place = place;
  };
  picture.addEventListener("arrived", () => point({ target: cursor }, sight.place));
  const seen = event => point(event, x.back(event.clientX - picture.getBoundingClientRect().left));
  cover.addEventListener("pointermove", seen);
  cover.addEventListener("pointerdown", seen);
  cover.addEventListener("pointerleave", event => gone(event, () => { untip(); cursor.setAttribute("visibility", "hidden"); }));
  picture.addEventListener("blur", () => { untip(); cursor.setAttribute("visibility", "hidden"); });
  picture.addEventListener("keydown", event => {
    const span = to - from, place = sight.place >= from && sight.place <= to ? sight.place : (from + to) / 2;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      // Past the edge the figure moves along.
      sight.place = Math.min(Math.max(place + step * span / (event.shiftKey ? 20 : 200), first), last);
      sight.reveal(sight.place, sight.place);
      chart.querySelector("svg").dispatchEvent(new Event("arrived"));
    } else if (event.key === "Enter" && (run.events || []).length) {
      const number = run.events.reduce((best, one, at) =>
        Math.abs(spot(one) - place) < Math.abs(spot(run.events[best]) - place) ? at : best, 0);
      page.go(run, "events", number);
    } else return;
    event.preventDefault();
  });

  // Events above all else: neighbours that would cover each other are one mark with their number.
  for (const group of clustered(run.events || [], spot, inside, x)) {
    const place = group.x, several = group.events.length > 1;
    // A number alone is that of an event; how many are in one mark has a sign behind it.
    const words = several ? `${short(group.events.length)}\u00d7` : short(group.events[0] + 1);
    const room = Math.max(wide(words, 600, 11.5) + 10, 20);
    const marked = run.events[group.events[0]];
    const open = () => {
      const [low, high] = [spot(marked), spot(run.events[group.events[group.events.length - 1]])];
      if (several && high > low && x(high) - x(low) > 1) sight.set(low - (high - low) * 0.1, high + (high - low) * 0.1);
      else page.go(run, "events", group.events[0]);
    };
    picture.append(svg("line", { class: "event-line", x1: place, x2: place, y1: TOP, y2: floor }),
      svg("g", { class: "event-mark", role: "button", tabindex: -1, "aria-label": `${marked.title} at step ${marked.step}`,
        onclick: open, onpointermove: event => tip(event, el("strong", {}, several ? `${group.events.length} events` : marked.title),
          ...group.events.slice(0, 4).map(number => `step ${whole(run.events[number].step)}: ${run.events[number].title}`),
          several ? "Click to look closer." : marked.message), onpointerleave: untip },
      svg("rect", { x: place - room / 2, y: 4, width: room, height: 18, rx: 9, class: several ? "many" : null }),
      svg("text", { x: place, y: 17, "text-anchor": "middle" }, words)));
  }
  for (const save of run.saves || []) {
    const [begun, ended] = view.by === "steps" ? save.steps : [save.from, save.to];
    if (ended < from || begun > to) continue;
    picture.append(svg("rect", { class: "save-mark", x: x(Math.max(begun, from)) - 4, y: floor - 9, width: 12, height: 9, rx: 2,
      role: "button", "aria-label": `checkpoint save after step ${save.steps[0]}`,
      onclick: () => sight.around(begun, ended),
      onpointermove: event => tip(event, el("strong", {}, "checkpoint save"), `${clock(save.to - save.from)} after step ${save.steps[0]}`,
        ...Object.entries(save.highs).map(([name, size]) => `${name.replaceAll("_", " ")}: at most ${bytes(size)}`)),
      onpointerleave: untip }));
  }
  chart.replaceChildren(picture);
  legend(keys, run, view, lines, host, stack, levels, above, again);
}

function legend(keys, run, view, lines, host, stack, levels, above, again) {
  const figures = [...new Set(lines.map(curve => curve.figure))];
  const rows = figures.map(figure => el("li", {}, el("button", { type: "button", "aria-pressed": String(!view.hidden.has(figure)),
    title: run.curves.find(curve => curve.figure === figure).meaning,
    onclick: () => { view.hidden.has(figure) ? view.hidden.delete(figure) : view.hidden.add(figure); again(); } },
  swatch(LINES[figure][1]), LINES[figure][0])));
  if (host.length) rows.push(el("li", {}, swatch("host"), "host, resident"));
  above.forEach(([name, size, style]) => rows.push(el("li", { class: "beyond" }, swatch(style), `${name} ${bytes(size)}, far above`)));
  if ((run.saves || []).length) rows.push(el("li", {}, swatch("save"), "checkpoint saves"));
  if ((run.compiles || []).some(one => one.step !== null || view.by === "times")) rows.push(el("li", {}, swatch("compile"), "compiles"));
  const layers = stack ? el("li", { class: "wide" }, el("details", { open: stack.length < 7 },
    el("summary", {}, `Live arrays ${STACKS[view.stack]}`),
    el("ol", { class: "layers" }, stack.map(layer => el("li", {}, swatch(layer.style),
      el("span", {}, layer.name), el("b", {}, bytes(Math.max(...layer.bytes)))))))) : null;
  keys.replaceChildren(...rows, ...(layers ? [layers] : []));
}

function stacked(arrays, by) {
  const layers = new Map();
  for (const group of arrays.groups) {
    const known = layers.get(group[by]);
    layers.set(group[by], known ? known.map((size, at) => size + group.bytes[at]) : group.bytes);
  }
  const found = [...layers].map(([name, sizes]) => ({ name, bytes: sizes }))
    .sort((a, b) => Math.max(...b.bytes) - Math.max(...a.bytes));
  found.forEach((layer, number) => { layer.style = by === "kind" ? colour(layer.name) : `s${number % 10}`; });
  if (arrays.rest.some(size => size > 0)) found.push({ name: arrays.rest_count ? `${arrays.rest_count} smaller groups and the rest` : "smaller groups", bytes: arrays.rest, style: "rest" });
  return found;
}

function short(number) {
  return number < 1000 ? String(number) : `${Math.floor(number / 1000)}k`;
}

function clustered(events, spot, inside, x) {
  const order = events.map((event, number) => [x(spot(event)), number]).filter(([, number]) => inside(spot(events[number])))
    .sort((a, b) => a[0] - b[0]);
  const groups = [];
  for (const [place, number] of order) {
    const last = groups[groups.length - 1];
    if (last && place - last.first < 26) { last.events.push(number); last.x = (last.first + place) / 2; }
    else groups.push({ first: place, x: place, events: [number] });
  }
  return groups;
}

function grid(picture, y, high, panel, width, name, count) {
  for (const value of ticks(0, high, count, true)) {
    const place = y(value);
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: place, y2: place }),
      svg("text", { class: "tick", x: LEFT - 8, y: place + 4, "text-anchor": "end" }, value ? bytes(value) : "0"));
  }
  picture.append(svg("text", { class: "tick name", x: 0, y: panel.top - 10 }, name));
}

function places(record, at, from, to) {
  const count = record.steps.length;
  let low = 0, high = count - 1;
  while (low < count - 1 && at(record, low + 1) < from) low += 1;
  while (high > 0 && at(record, high - 1) > to) high -= 1;
  return [low, high];
}

function line(curve, x, y, at, from, to) {
  const [low, high] = places(curve, at, from, to);
  if (low === high || curve.steps.length === 1) {
    const place = Math.min(Math.max(x(at(curve, low)), LEFT), Infinity);
    return `M${place - 3} ${y(curve.high[low])}h6`;
  }
  return path(low, high, place => [clipped(x, at(curve, place), from, to), y(curve.high[place])]);
}

function area(curve, x, y, at, from, to) {
  const [low, high] = places(curve, at, from, to);
  const right = clipped(x, at(curve, high), from, to), left = clipped(x, at(curve, low), from, to);
  return `${path(low, high, place => [clipped(x, at(curve, place), from, to), y(curve.high[place])])}L${right} ${y(0)}L${left} ${y(0)}Z`;
}

function band(curve, x, y, at, from, to) {
  const [low, high] = places(curve, at, from, to);
  const up = path(low, high, place => [clipped(x, at(curve, place), from, to), y(curve.high[place])]);
  let back = "";
  for (let place = high; place >= low; place -= 1) back += `L${clipped(x, at(curve, place), from, to)} ${y(curve.low[place])}`;
  return `${up}${back}Z`;
}

// A layer of the live arrays. A census is written when it differs from the one before, so its sizes hold until the next.
// Those that lasted no step are a path of their own, a few pixels wide.
function ribbon(record, under, over, x, y, at, from, to) {
  const [low, high] = places(record, at, from, to);
  const next = place => clipped(x, place === record.steps.length - 1 ? to : at(record, place + 1), from, to);
  let up = "", back = "", brief = "";
  for (let place = low; place <= high; place += 1) {
    const begin = clipped(x, at(record, place), from, to), end = next(place), top = y(over[place]).toFixed(1), bottom = y(under[place]).toFixed(1);
    up += `${up ? "L" : "M"}${begin} ${top}H${end}`;
    back = `L${end} ${bottom}H${begin}${back}`;
    const start = Math.max(end - 3, LEFT);
    if (end - begin < 2 && top !== bottom) brief += `M${start} ${top}h3V${bottom}h-3Z`;
  }
  return [`${up}${back}Z`, brief];
}

function clipped(x, place, from, to) {
  return x(Math.min(Math.max(place, from), to)).toFixed(1);
}

function path(low, high, point) {
  let text = "";
  for (let place = low; place <= high; place += 1) {
    const [across, up] = point(place);
    text += `${place === low ? "M" : "L"}${across} ${up.toFixed(1)}`;
  }
  return text;
}

function held(record, at, place) {
  let found = null;
  for (let number = 0; number < record.steps.length && at(record, number) <= place; number += 1) found = number;
  return found;
}

function nearest(record, at, place) {
  const count = record.steps.length;
  if (!count) return null;
  let low = 0, high = count - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (at(record, middle) < place) low = middle; else high = middle;
  }
  return Math.abs(at(record, low) - place) <= Math.abs(at(record, high) - place) ? low : high;
}
