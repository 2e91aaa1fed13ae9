// The plan: what each policy needs and costs, and the preset of the one that is picked.

import { bytes, el, framed, lens, pasted, percent, put, scale, sized, svg, switches, ticks, tip, untip } from "./draw.js";

const LEFT = 62, RIGHT = 24, TOP = 22, BOTTOM = 44;

export function thePlan(plan, keep = initial => initial) {
  if (!plan) return el("p", { class: "soft" }, "The monitor was given no plan.");
  const known = plan.candidates.map((each, number) => ({ ...each, number })).filter(each => each.bytes);
  const timed = known.filter(each => each.modelled_s);
  const view = keep({ cost: timed.length > 1 ? "time" : "work", picked: plan.chosen, from: null, to: null, here: null });
  const chart = el("div", { class: "chart" });
  const about = el("div", { class: "candidate" });
  let width = 0, marks = new Map();
  const again = () => {
    if (width) marks = draw(plan, known, view, chart, width, again, sight);
    describe(plan, plan.candidates[view.picked], view.picked === plan.chosen, about);
  };
  const sight = lens(chart, view, again, "All points");
  // Left and right go through the points by their bytes; the figure moves along.
  chart.addEventListener("keydown", event => {
    const order = [...known].sort((a, b) => a.bytes - b.bytes), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = order.findIndex(each => marks.get(each) === document.activeElement);
    if (step) {
      const next = order[at < 0 ? 0 : (at + step + order.length) % order.length];
      sight.reveal(next.bytes, next.bytes);
      marks.get(next)?.focus({ preventScroll: true });
    }
    else if (at >= 0 && (event.key === "Enter" || event.key === " ")) { view.picked = order[at].number; again(); marks.get(order[at]).focus({ preventScroll: true }); }
    else return;
    event.preventDefault();
  }, true);
  sized(chart, now => { width = now; again(); });
  again();
  const budget = plan.budget_bytes ? `Budget ${bytes(plan.budget_bytes)}, ${plan.budget_reason}.` : `No budget: ${plan.budget_reason}.`;
  const devices = plan.devices > 1 ? `, ${plan.devices} devices` : "";
  return el("div", {},
    el("p", { class: "soft" }, `${plan.step} for ${plan.target}${devices}. ${budget} ${plan.outcome ? plan.outcome : ""}`),
    el("div", { class: "controls" }, timed.length > 1 ? switches("cost", [["time", "modelled time"], ["work", "extra FLOPs"]], view.cost,
      value => { view.cost = value; again(); }) : null, known.length > 2 ? sight.controls : null, el("span", { class: "hint" }, "Pick a point to see its preset. Drag to zoom.")),
    el("div", { class: "two" }, chart, about));
}

function draw(plan, known, view, chart, width, again, sight) {
  const cost = each => view.cost === "time" ? each.modelled_s : each.extra_share ?? 0;
  const points = known.filter(each => cost(each) !== null && cost(each) !== undefined);
  const height = Math.round(Math.min(Math.max(width * 0.55, 260), 380));
  const most = Math.max(...points.map(each => each.bytes)), least = Math.min(...points.map(each => each.bytes));
  const levels = [["budget", plan.budget_bytes], ["limit", plan.limit_bytes]].filter(([, size], at) => size && (at === 0 || size !== plan.budget_bytes));
  const near = levels.filter(([, size]) => size <= 2 * most && size >= least / 3);
  const compiled = plan.compiled_bytes && plan.compiled_bytes <= 3 * most ? plan.compiled_bytes : null;
  const edge = Math.max(most, ...near.map(level => level[1]), compiled ?? 0), ground = Math.min(least, ...near.map(level => level[1]), compiled ?? Infinity);
  const pad = (edge - ground || edge) * 0.08;
  const [from, to] = sight.over(ground - pad, edge + pad, (edge - ground || edge) / 200);
  const seen = size => size >= from && size <= to;
  // Costs are drawn to the scale of the points that are in sight.
  const costs = points.filter(each => seen(each.bytes)).map(cost), dear = Math.max(...costs, view.cost === "time" ? 0 : 0.01) || 0.01, cheap = view.cost === "time" && costs.length ? Math.min(...costs) : 0;
  const x = scale(from, to, LEFT, width - RIGHT);
  sight.on(x);
  const named = [...near, ...(compiled ? [["this run", compiled]] : [])].filter(([, size]) => seen(size));
  const above = TOP + 15 * named.length;  // the names of levels stand over all points
  const y = scale(cheap - (dear - cheap) * 0.06, dear, height - BOTTOM, above + 10);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", tabindex: 0, "aria-label": "Candidates of the plan. Left and right go through them, plus and minus zoom, Enter picks one." });
  for (const value of ticks(cheap, dear, 5)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" },
        view.cost === "time" ? `${(value * 1e3).toPrecision(3)} ms` : `+${percent(value)}`));
  }
  for (const value of ticks(Math.max(from, 0), to, width / 110, true)) {
    picture.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: TOP, y2: height - BOTTOM }),
      svg("text", { class: "tick", x: x(value), y: height - BOTTOM + 17, "text-anchor": "middle" }, bytes(value)));
  }
  picture.append(svg("text", { class: "tick name", x: width - RIGHT, y: height - 8, "text-anchor": "end" }, "bytes of one step on one device"),
    svg("text", { class: "tick name", x: LEFT + 2, y: TOP - 8 }, view.cost === "time" ? "modelled time of a step" : "extra FLOPs"));
  const texts = named.map(([words, size], number) => {
    const style = words === "this run" ? "in-use" : "limit", place = x(size), left = place > width / 2;
    picture.append(svg("line", { class: `level ${style}`, x1: place, x2: place, y1: TOP, y2: height - BOTTOM }));
    return svg("text", { class: `level-name ${style}`, x: place + (left ? -5 : 5), y: TOP + 12 + 15 * number, "text-anchor": left ? "end" : "start" }, `${words} ${bytes(size)}`);
  });
  // The frontier: what no other beats in both.
  const order = [...points].filter(each => !each.refused).sort((a, b) => a.bytes - b.bytes || cost(a) - cost(b));
  let lowest = Infinity, steps = "";
  for (const each of order) {
    if (cost(each) >= lowest) continue;
    steps += steps ? `H${x(each.bytes)}V${y(cost(each))}` : `M${x(each.bytes)} ${y(cost(each))}`;
    lowest = cost(each);
  }
  picture.append(framed(LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM, svg("path", { class: "frontier", d: steps || "M0 0" })), ...texts);
  const marks = new Map(points.filter(each => seen(each.bytes)).map(each => {
    const style = ["point", each.fits === false ? "misses" : "fits", each.number === plan.chosen ? "best" : "", each.number === view.picked ? "picked" : ""].join(" ");
    const words = event => tip(event, el("strong", {}, each.words), `${bytes(each.bytes)}${each.fits === false ? ", too much" : ""}`, `${each.extra} FLOPs`,
      each.modelled_s ? `${(each.modelled_s * 1e3).toPrecision(4)} ms modelled` : null, each.number === plan.chosen ? plan.reason : null);
    return [each, svg("circle", { class: style, cx: x(each.bytes), cy: y(cost(each)), r: each.number === plan.chosen ? 8 : 6, tabindex: 0, role: "button",
      "aria-label": `${each.words}, ${bytes(each.bytes)}, ${each.extra}`, onpointermove: words, onpointerleave: untip, onblur: untip,
      onfocus: event => words({ target: event.target }), onclick: () => { view.picked = each.number; again(); } })];
  }));
  picture.append(...marks.values());
  chart.replaceChildren(picture);
  return marks;
}

function describe(plan, each, best, about) {
  const fact = (name, value) => value === null || value === undefined ? null : [el("dt", {}, name), el("dd", {}, value)];
  put(about, el("h4", {}, each.words, best ? el("span", { class: "badge" }, "chosen") : null),
    el("dl", {}, fact("needs", bytes(each.bytes)), fact("fits", each.fits === null ? "there is no budget" : each.fits ? "yes" : "no"),
      fact("temporaries", each.refused ? "refused by the compiler" : bytes(each.temp_bytes)), fact("extra FLOPs", each.extra),
      fact("modelled", each.modelled_s ? `${(each.modelled_s * 1e3).toPrecision(4)} ms` : "unknown"),
      fact("why", best ? plan.reason : null)),
    each.preset && each.preset.trim() === "{}" ? el("p", { class: "soft" }, "It is the plain step, which needs no preset.")
      : each.preset ? [el("p", { class: "soft" }, "Its preset:"), pasted(each.preset)] : el("p", { class: "soft" }, "It does not fit, so it has no preset."));
}
