// The heap: live arrays and holes by address, at the moments whose maps were kept.

import { bytes, el, scale, sized, swatch, tip, untip, whole } from "./draw.js";

const ROW = 30, GAP = 14, LABEL = 140;

export function theHeap(run, page) {
  const heaps = run.heaps || [];
  if (!heaps.length) return el("p", { class: "soft" }, "No map of live arrays was taken: addresses are known on GPUs and CPUs, after some seconds.");
  const totals = new Map();
  for (const heap of heaps) for (const group of heap.groups) totals.set(group.label, Math.max(totals.get(group.label) || 0, group.bytes));
  const labels = [...totals].sort((a, b) => b[1] - a[1]).map(([label]) => label);
  const style = label => labels.indexOf(label) < 9 && !/other kinds$/.test(label) ? `s${labels.indexOf(label)}` : "rest";
  const fullest = heaps.reduce((best, heap) => heap.held_bytes > best.held_bytes ? heap : best);
  const host = el("div", { class: "chart" });
  const go = (run.curves || []).length ? heap => page.go(run, "time", heap) : null;
  sized(host, width => draw(heaps, fullest, style, host, width, go));
  const keys = el("ul", { class: "keys" }, labels.slice(0, 10).map(label => el("li", {}, swatch(style(label)), `${label} ${bytes(totals.get(label))}`)),
    el("li", {}, swatch("hole"), "hole"));
  const last = heaps[heaps.length - 1];
  return el("div", {}, el("p", { class: "soft" }, `Live arrays of ${fullest.device} by address, a row for each map that was kept. Most was held after step `,
    `${whole(fullest.step)}: ${bytes(fullest.held_bytes)}. At the end ${bytes(last.held_bytes)} were held, ${last.largest_hole_bytes ? `and the largest hole was ${bytes(last.largest_hole_bytes)}` : "without a hole between them"}.`,
    fullest.left_out_bytes ? ` Arrays of ${bytes(fullest.left_out_bytes)} were still being computed, and have no address yet.` : ""), host, keys);
}

function draw(heaps, fullest, style, host, width, go) {
  const narrow = width < 560, left = narrow ? 0 : LABEL;
  const room = width - left - 2;
  const most = Math.max(...heaps.map(heap => heap.regions.reduce((sum, region) => sum + region.bytes, 0)), 1);
  const row = narrow ? ROW + 18 : ROW + GAP;
  const height = heaps.length * row + 4;
  const ratio = window.devicePixelRatio || 1;
  const canvas = el("canvas", { width: width * ratio, height: height * ratio, role: "img", tabindex: 0,
    "aria-label": `Maps of live arrays at ${heaps.length} moments. Up and down go through them${go ? ", Enter shows the moment over time" : ""}.` });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const spots = [];
  const paint = () => {
    const styles = getComputedStyle(host), ink = name => styles.getPropertyValue(name).trim();
    pen.clearRect(0, 0, width, height);
    spots.length = 0;
    heaps.forEach((heap, number) => {
      const top = number * row + (narrow ? 16 : 2);
      pen.fillStyle = ink(go ? "--link" : heap === fullest ? "--ink" : "--soft");
      pen.font = `${heap === fullest ? "600 " : ""}12px system-ui, sans-serif`;
      const words = `step ${whole(heap.step)}${heap === fullest ? ", the most" : heap === heaps[heaps.length - 1] ? ", the last" : ""}`;
      pen.fillText(words, narrow ? 0 : 2, narrow ? top - 4 : top + ROW / 2 + 4);
      const gaps = 6 * (heap.regions.length - 1);
      const x = scale(0, most, 0, Math.max(room - gaps, 1));
      let at = left;
      for (const region of heap.regions) {
        let begin = 0;
        for (const [size, group] of region.stretches) {
          const from = at + x(begin), to = at + x(begin + size);
          const label = group < 0 ? null : heap.groups[group].label;
          pen.fillStyle = label === null ? ink("--hole") : ink(`--fill-${style(label)}`);
          pen.fillRect(from, top, Math.max(to - from, 0.6), ROW);
          if (to - from > 1.5) spots.push({ from, to, top, size, label, heap, address: region.begin + begin });
          begin += size;
        }
        pen.strokeStyle = ink("--rule");
        pen.strokeRect(at + 0.5, top + 0.5, Math.max(x(region.bytes) - 1, 1), ROW - 1);
        at += x(region.bytes) + 6;
      }
    });
  };
  paint();
  const repaint = () => { if (canvas.isConnected) paint(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  document.addEventListener("memory:scheme", repaint);
  // The words of a row lead to its moment.
  const named = event => {
    const box = canvas.getBoundingClientRect(), number = Math.floor((event.clientY - box.top) / row), below = event.clientY - box.top - number * row;
    return go && (narrow ? below < 16 : event.clientX - box.left < left) ? heaps[number] : undefined;
  };
  canvas.addEventListener("click", event => { if (named(event)) go(named(event)); });
  canvas.addEventListener("pointermove", event => {
    canvas.style.cursor = named(event) ? "pointer" : "";
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const spot = spots.find(one => x >= one.from && x <= one.to && y >= one.top && y <= one.top + ROW);
    if (!spot) { untip(); return; }
    tip(event, el("strong", {}, spot.label ?? "hole"), bytes(spot.size), `at address 0x${spot.address.toString(16)}`,
      `step ${whole(spot.heap.step)}: ${bytes(spot.heap.held_bytes)} in ${whole(spot.heap.buffers)} buffers, holes ${bytes(spot.heap.hole_bytes)}`);
  });
  canvas.addEventListener("pointerleave", untip);
  let chosen = -1;
  canvas.addEventListener("blur", untip);
  canvas.addEventListener("keydown", event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" && chosen >= 0 && go) go(heaps[chosen]);
    if (!step) return;
    event.preventDefault();
    chosen = (chosen + step + heaps.length) % heaps.length;
    const heap = heaps[chosen], box = canvas.getBoundingClientRect();
    tip({ clientX: box.left + left + 20, clientY: box.top + chosen * row }, el("strong", {}, `step ${whole(heap.step)}`),
      `${bytes(heap.held_bytes)} held, ${bytes(heap.hole_bytes)} in holes, the largest ${bytes(heap.largest_hole_bytes)}`,
      ...heap.groups.slice(0, 5).map(group => el("div", {}, swatch(style(group.label)), group.label, el("b", {}, bytes(group.bytes)))), go ? el("div", { class: "apart" }, "Enter shows this moment over time.") : null);
  });
  host.replaceChildren(canvas);
}
