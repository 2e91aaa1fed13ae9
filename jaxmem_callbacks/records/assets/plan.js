// The plan: what each policy needs and costs, and the preset of the one that is picked.

import { bytes, el, pasted, percent, put, scale, sized, svg, switches, ticks, tip, untip } from "./draw.js";

const LEFT = 62, RIGHT = 24, TOP = 22, BOTTOM = 44;

export function thePlan(plan, keep = initial => initial) {
  if (!plan) return el("p", { class: "soft" }, "The monitor was given no plan.");
  const known = plan.candidates.map((each, number) => ({ ...each, number })).filter(each => each.bytes);
  const timed = known.filter(each => each.modelled_s);
  const view = keep({ cost: timed.length > 1 ? "time" : "work", picked: plan.chosen });
  const chart = el("div", { class: "chart" });
  const about = el("div", { class: "candidate" });
  let width = 0;
  const again = () => {
    if (width) draw(plan, known, view, chart, width, again);
    describe(plan, plan.candidates[view.picked], view.picked === plan.chosen, about);
  };
  sized(chart, now => { width = now; again(); });
  again();
  const budget = plan.budget_bytes ? `Budget ${bytes(plan.budget_bytes)}, ${plan.budget_reason}.` : `No budget: ${plan.budget_reason}.`;
  const devices = plan.devices > 1 ? `, ${plan.devices} devices` : "";
  return el("div", {},
    el("p", { class: "soft" }, `${plan.step} for ${plan.target}${devices}. ${budget} ${plan.outcome ? plan.outcome : ""}`),
    el("div", { class: "controls" }, timed.length > 1 ? switches("cost", [["time", "modelled time"], ["work", "extra FLOPs"]], view.cost,
      value => { view.cost = value; again(); }) : null, el("span", { class: "hint" }, "Pick a point to see its preset.")),
    el("div", { class: "two" }, chart, about));
}

function draw(plan, known, view, chart, width, again) {
  const cost = each => view.cost === "time" ? each.modelled_s : each.extra_share ?? 0;
  const points = known.filter(each => cost(each) !== null && cost(each) !== undefined);
  const height = Math.round(Math.min(Math.max(width * 0.55, 260), 380));
  const most = Math.max(...points.map(each => each.bytes)), least = Math.min(...points.map(each => each.bytes));
  const levels = [["budget", plan.budget_bytes], ["limit", plan.limit_bytes]].filter(([, size], at) => size && (at === 0 || size !== plan.budget_bytes));
  const near = levels.filter(([, size]) => size <= 2 * most && size >= least / 3);
  const compiled = plan.compiled_bytes && plan.compiled_bytes <= 3 * most ? plan.compiled_bytes : null;
  const edge = Math.max(most, ...near.map(level => level[1]), compiled ?? 0), ground = Math.min(least, ...near.map(level => level[1]), compiled ?? Infinity);
  const pad = (edge - ground || edge) * 0.08;
  const costs = points.map(cost), dear = Math.max(...costs, 0.01), cheap = view.cost === "time" ? Math.min(...costs) : 0;
  const x = scale(ground - pad, edge + pad, LEFT, width - RIGHT);
  const named = [...near, ...(compiled ? [["this run", compiled]] : [])];
  const above = TOP + 15 * named.length;  // the names of levels stand over all points
  const y = scale(cheap - (dear - cheap) * 0.06, dear, height - BOTTOM, above + 10);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Candidates of the plan" });
  for (const value of ticks(cheap, dear, 5)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" },
        view.cost === "time" ? `${(value * 1e3).toPrecision(3)} ms` : `+${percent(value)}`));
  }
  for (const value of ticks(Math.max(ground - pad, 0), edge + pad, width / 110, true)) {
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
  picture.append(svg("path", { class: "frontier", d: steps || "M0 0" }), ...texts);
  const marks = points.map(each => {
    const style = ["point", each.fits === false ? "misses" : "fits", each.number === plan.chosen ? "best" : "", each.number === view.picked ? "picked" : ""].join(" ");
    const words = event => tip(event, el("strong", {}, each.words), `${bytes(each.bytes)}${each.fits === false ? ", too much" : ""}`, `${each.extra} FLOPs`,
      each.modelled_s ? `${(each.modelled_s * 1e3).toPrecision(4)} ms modelled` : null, each.number === plan.chosen ? plan.reason : null);
    return svg("circle", { class: style, cx: x(each.bytes), cy: y(cost(each)), r: each.number === plan.chosen ? 8 : 6, tabindex: 0, role: "button",
      "aria-label": `${each.words}, ${bytes(each.bytes)}, ${each.extra}`, onpointermove: words, onpointerleave: untip, onblur: untip,
      onfocus: event => words({ target: event.target }), onclick: () => { view.picked = each.number; again(); },
      onkeydown: event => {
        const at = marks.indexOf(event.target), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (event.key === "Enter" || event.key === " ") { view.picked = each.number; again(); }
        else if (step) marks[(at + step + marks.length) % marks.length].focus();
        else return;
        event.preventDefault();
      } });
  });
  picture.append(...marks);
  chart.replaceChildren(picture);
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
