// Within a step: bytes over the program's schedule, and each large block with its line.

import { bytes, choose, el, framed, lens, scale, sized, svg, swatch, switches, ticks, tip, untip, whole } from "./draw.js";
import { bufferOf, colour } from "./peak.js";
import { saveTrace, savesFiles } from "./perfetto.js";

const HELD = "arguments, results and constants";
const LEFT = 62, RIGHT = 14, TOP = 18, BOTTOM = 34;

export function withinAStep(run, page) {
  const programs = run.programs.filter(one => one.step).sort((a, b) => b.bytes - a.bytes);
  const { step } = programs[0];
  const view = page.keep(run, "step", { program: programs[0], from: null, to: null, here: null, whole: step.held_bytes < 0.5 * Math.max(...step.curve.map(([, size]) => size)) });
  view.program = programs.find(one => one.name === view.program.name) || programs[0];
  const chart = el("div", { class: "chart" });
  const about = el("p", { class: "soft", role: "status" });
  let width = 0;
  let nodes = new Map();
  const go = block => page.go(run, "peak", { program: view.program.name, buffer: bufferOf(view.program, block) });
  const again = () => { if (width) nodes = draw(view, chart, about, width, go, sight); };
  const sight = lens(chart, view, again, "Whole step");
  sized(chart, now => { width = now; again(); });
  const pick = value => { Object.assign(view, { program: value, from: null, to: null, here: null }); again(); };
  const list = programs.length > 1 ? choose("program", programs.map(one => [one, one.name]), view.program, pick) : { pick };
  page.shows(run, "step", ({ program, block }) => { 
    list.pick(program);
    view.here = block;
    sight.around(block.first, block.last + 1);
    return nodes.get(block);
  });
  // Left and right go through the blocks as they are made; the figure moves along.
  chart.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const blocks = [...view.program.step.blocks].sort((a, b) => a.first - b.first);
    const at = blocks.findIndex(block => nodes.get(block) === document.activeElement);
    const next = blocks[at < 0 && step < 0 ? blocks.length - 1 : (at + step + blocks.length) % blocks.length];
    sight.reveal(next.first, next.last + 1);
    nodes.get(next)?.focus({ preventScroll: true });
    event.preventDefault();
  }, true);
  return el("div", {}, el("div", { class: "controls" },
    list instanceof Node ? list : null,
    switches("vertical axis", [[false, "temporaries"], [true, "all memory"]], view.whole, value => { view.whole = value; again(); }),
    sight.controls,
    savesFiles() ? el("button", { type: "button", class: "quiet", title: "This step as a file that ui.perfetto.dev and chrome://tracing open", onclick: () => saveTrace(view.program) }, "Save for Perfetto") : null,
    el("span", { class: "hint" }, "Drag to zoom, with Shift to move. A block is a value, from where it is made to its last use.")), chart, about);
}

function draw(view, chart, about, width, go, sight) {
  const { length, blocks: list, curve, held_bytes: held, peak_at: peakAt } = view.program.step;
  const [from, to] = sight.over(0, length, 1);
  const height = width < 560 ? 280 : 380, floor = height - BOTTOM;
  const ground = view.whole ? 0 : held;
  const most = ground + 1.04 * Math.max(1, ...curve.map(([, size]) => size - ground), ...list.map(block => block.base + block.bytes - ground));
  const x = scale(from, to, LEFT, width - RIGHT), y = scale(ground, most, floor, TOP);
  sight.on(x);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: "application",
    "aria-label": "Bytes over the schedule of the step. Left and right go through its blocks, plus and minus zoom." });
  for (const value of ticks(ground, most, 5, true)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value ? bytes(value) : "0"));
  }
  const clip = value => x(Math.min(Math.max(value, from), to));
  if (held && view.whole) {
    picture.append(svg("rect", { class: "held", x: LEFT, y: y(held), width: width - LEFT - RIGHT, height: floor - y(held) }),
      floor - y(held) < 18 ? "" : svg("text", { class: "tick", x: LEFT + 8, y: (floor + y(held)) / 2 + 4 }, `${HELD}, ${bytes(held)}`));
  }
  const points = curve.map(([at, size], number) => `${number ? "H" : "M"}${x(at).toFixed(1)}${number ? "V" : " "}${y(size).toFixed(1)}`).join("");
  const inFrame = path => framed(LEFT, TOP, width - LEFT - RIGHT, floor - TOP, path);
  picture.append(inFrame(svg("path", { class: "area in-use", d: `${points}H${x(length)}V${floor}H${x(0)}Z` })));
  const known = new Map();
  const nodes = list.filter(block => block.last >= from && block.first <= to).map(block => {
    const left = clip(block.first), right = clip(block.last + 1);
    const tall = Math.max(y(block.base) - y(block.base + block.bytes), 0.5);
    const node = svg("g", { class: `block ${colour(block.group)}`, tabindex: -1, role: "button", "aria-label": `${bytes(block.bytes)} ${block.operation || block.shape}` },
      svg("rect", { x: left, y: y(block.base + block.bytes), width: Math.max(right - left, 0.8), height: tall }));
    const leads = bufferOf(view.program, block);
    known.set(block, node);
    const words = event => tip(event, el("strong", {}, bytes(block.bytes)), el("div", {}, swatch(colour(block.group)), block.group), block.shape, block.operation, block.source,
      `from instruction ${whole(block.first)} to ${whole(block.last)}`,
      leads ? el("div", { class: "apart" }, "Click shows it in what makes the peak.") : null);
    node.addEventListener("pointermove", words);
    node.addEventListener("pointerleave", untip);
    node.addEventListener("focus", () => words({ target: node }));
    node.addEventListener("blur", untip);
    if (leads) {
      node.addEventListener("click", () => go(block));
      node.addEventListener("keydown", event => { if (event.key === "Enter") go(block); });
    }
    return node;
  });
  const over = [];
  if (peakAt >= from && peakAt <= to) {
    over.push(svg("line", { class: "level limit untouched", x1: x(peakAt), x2: x(peakAt), y1: TOP, y2: floor }),
      svg("text", { class: "level-name limit", x: x(peakAt) + (x(peakAt) > width / 2 ? -5 : 5), y: TOP - 4, "text-anchor": x(peakAt) > width / 2 ? "end" : "start" }, "the peak"));
  }
  const cover = svg("rect", { class: "cover", x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: floor - TOP });
  if (view.here && known.has(view.here)) {
    const [left, right] = [clip(view.here.first), clip(view.here.last + 1)];
    over.push(svg("rect", { class: "around", x: left, y: TOP, width: Math.max(right - left, 1), height: floor - TOP }));
  }
  picture.append(cover, ...nodes, inFrame(svg("path", { class: "line in-use", d: points })), ...over);
  for (const value of ticks(from, to, width / 110).filter(Number.isInteger)) {
    picture.append(svg("text", { class: "tick", x: x(value), y: floor + 17, "text-anchor": "middle" }, whole(value)));
  }
  picture.append(svg("text", { class: "tick name", x: width - RIGHT, y: floor + 31, "text-anchor": "end" }, "instruction in the schedule"));
  about.textContent = `${view.program.name}: ${whole(length)} instructions, the largest ${list.length} blocks are drawn${held ? `, above ${bytes(held)} of ${HELD}` : ""}. The line is what is alive. A block is drawn at its place in the compiler\u2019s assignment, so it may be above the line.`;
  chart.replaceChildren(picture);
  return known;
}
