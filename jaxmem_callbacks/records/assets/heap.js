// The heap: live arrays and holes by address, at the moments whose maps were kept.

import { bytes, el, gone, lens, scale, sized, swatch, tip, untip, whole } from "./draw.js";

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
  const view = page.keep(run, "heap", { from: null, to: null, here: null });
  const go = (run.curves || []).length ? heap => page.go(run, "time", heap) : null;
  let width = 0;
  const again = () => { if (width && host.isConnected) draw(heaps, fullest, style, host, width, go, view, sight); };
  const sight = lens(host, view, again, "All addresses");
  sized(host, now => { width = now; again(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.addEventListener("memory:scheme", again);
  const keys = el("ul", { class: "keys" }, labels.slice(0, 10).map(label => el("li", {}, swatch(style(label)), `${label} ${bytes(totals.get(label))}`)),
    el("li", {}, swatch("hole"), "hole"));
  const last = heaps[heaps.length - 1];
  return el("div", {}, el("p", { class: "soft" }, `Live arrays of ${fullest.device} by address, a row for each map that was kept. Most was held after step `,
    `${whole(fullest.step)}: ${bytes(fullest.held_bytes)}. At the end ${bytes(last.held_bytes)} were held, ${last.largest_hole_bytes ? `and the largest hole was ${bytes(last.largest_hole_bytes)}` : "without a hole between them"}.`,
    fullest.left_out_bytes ? ` Arrays of ${bytes(fullest.left_out_bytes)} were still being computed, and have no address yet.` : ""),
  el("div", { class: "controls" }, sight.controls, el("span", { class: "hint" }, "Drag to zoom, with Shift to move.")), host, keys);
}

function draw(heaps, fullest, style, host, width, go, view, sight) {
  const narrow = width < 560, left = narrow ? 0 : LABEL;
  // Along the axis the regions of a map follow each other, a little apart.
  const most = Math.max(...heaps.map(heap => heap.regions.reduce((sum, region) => sum + region.bytes, 0)), 1), apart = most / 160;
  const ends = heaps.map(heap => heap.regions.reduce((sum, region) => sum + region.bytes + apart, -apart));
  const x = scale(...sight.over(0, Math.max(...ends), most / 1e6), left, width - 2);
  sight.on(x);
  const row = narrow ? ROW + 18 : ROW + GAP;
  const height = heaps.length * row + 4;
  const ratio = window.devicePixelRatio || 1;
  const canvas = el("canvas", { width: width * ratio, height: height * ratio, role: "img", tabindex: 0,
    "aria-label": `Maps of live arrays at ${heaps.length} moments. Up and down go through them${go ? ", Enter shows the moment over time" : ""}, plus and minus zoom, left and right move.` });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const spots = [];
  const styles = getComputedStyle(host), ink = name => styles.getPropertyValue(name).trim();
  const clip = place => Math.min(Math.max(place, left), width - 2);
  heaps.forEach((heap, number) => {
    const top = number * row + (narrow ? 16 : 2);
    pen.fillStyle = ink(go ? "--link" : heap === fullest ? "--ink" : "--soft");
    pen.font = `${heap === fullest ? "600 " : ""}12px system-ui, sans-serif`;
    const words = `step ${whole(heap.step)}${heap === fullest ? ", the most" : heap === heaps[heaps.length - 1] ? ", the last" : ""}`;
    pen.fillText(words, narrow ? 0 : 2, narrow ? top - 4 : top + ROW / 2 + 4);
    let at = 0;
    for (const region of heap.regions) {
      let begin = 0;
      for (const [size, group] of region.stretches) {
        const from = clip(x(at + begin)), to = clip(x(at + begin + size));
        const label = group < 0 ? null : heap.groups[group].label;
        if (to > left && from < width - 2) {
          pen.fillStyle = label === null ? ink("--hole") : ink(`--fill-${style(label)}`);
          pen.fillRect(from, top, Math.max(to - from, 0.6), ROW);
        }
        if (to - from > 1.5) spots.push({ from, to, top, size, label, heap, address: region.begin + begin });
        begin += size;
      }
      const [from, to] = [clip(x(at)), clip(x(at + region.bytes))];
      pen.strokeStyle = ink("--rule");
      if (to > from) pen.strokeRect(from + 0.5, top + 0.5, Math.max(to - from - 1, 1), ROW - 1);
      at += region.bytes + apart;
    }
  });
  // The words of a row lead to its moment.
  const named = event => {
    const box = canvas.getBoundingClientRect(), number = Math.floor((event.clientY - box.top) / row), below = event.clientY - box.top - number * row;
    return go && (narrow ? below < 16 : event.clientX - box.left < left) ? heaps[number] : undefined;
  };
  canvas.addEventListener("click", event => { if (named(event)) go(named(event)); });
  const words = event => {
    canvas.style.cursor = named(event) ? "pointer" : "";
    const box = canvas.getBoundingClientRect(), across = event.clientX - box.left, down = event.clientY - box.top;
    const spot = spots.find(one => across >= one.from && across <= one.to && down >= one.top && down <= one.top + ROW);
    if (!spot) { untip(); return; }
    tip(event, el("strong", {}, spot.label ?? "hole"), bytes(spot.size), `at address 0x${spot.address.toString(16)}`,
      `step ${whole(spot.heap.step)}: ${bytes(spot.heap.held_bytes)} in ${whole(spot.heap.buffers)} buffers, holes ${bytes(spot.heap.hole_bytes)}`);
  };
  canvas.addEventListener("pointermove", words);
  canvas.addEventListener("pointerdown", words);
  canvas.addEventListener("pointerleave", event => gone(event, untip));
  canvas.addEventListener("blur", untip);
  canvas.addEventListener("keydown", event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" && view.here && go) go(view.here);
    if (!step) return;
    event.preventDefault();
    const chosen = (heaps.indexOf(view.here) + (view.here || step > 0 ? step : 0) + heaps.length) % heaps.length;
    const heap = view.here = heaps[chosen], box = canvas.getBoundingClientRect();
    tip({ clientX: box.left + left + 20, clientY: box.top + chosen * row }, el("strong", {}, `step ${whole(heap.step)}`),
      `${bytes(heap.held_bytes)} held, ${bytes(heap.hole_bytes)} in holes, the largest ${bytes(heap.largest_hole_bytes)}`,
      ...heap.groups.slice(0, 5).map(group => el("div", {}, swatch(style(group.label)), group.label, el("b", {}, bytes(group.bytes)))), go ? el("div", { class: "apart" }, "Enter shows this moment over time.") : null);
  });
  host.replaceChildren(canvas);
}
