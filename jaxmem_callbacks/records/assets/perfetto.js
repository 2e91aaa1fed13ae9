// A step's bytes over its schedule as a trace of Perfetto, which the browser saves: what `writers/perfetto.py` writes.

import { el } from "./draw.js";

const COUNTER = "bytes on one device", HELD = "held throughout", PARTS = 2;
const REMARK = "Bytes of a program over its schedule, by the compiler's buffer assignment. Time is the position in the schedule, one "
  + "microsecond each, and no measured time: loop bodies stand there once. The largest blocks by bytes and positions are here.";

// A frame without an origin of its own, as in a notebook, may save nothing.
export function savesFiles() {
  return window.self === window.top || window.origin !== "null";
}

export function saveTrace(program) {
  const at = URL.createObjectURL(new Blob([JSON.stringify(traceOf(program))], { type: "application/json" }));
  el("a", { href: at, download: `${program.name.replace(/[^\w.-]+/g, "_")}_step.json` }).click();
  setTimeout(() => URL.revokeObjectURL(at), 10000);
}

// Each group of blocks is as many threads as it has blocks at once.
export function traceOf({ name, step }) {
  const pid = 1, events = [named("process_name", pid, 0, name)];
  const last = step.curve.length ? step.curve[step.curve.length - 1][1] : step.held_bytes;
  for (const [ts, size] of [...step.curve, [step.length, last]]) events.push({ ph: "C", name: COUNTER, pid, tid: 0, ts, args: { bytes: size } });
  events.push({ ph: "i", name: "peak of the temporaries", s: "p", pid, tid: 0, ts: step.peak_at },
    named("thread_name", pid, 1, "arguments, results and constants"),
    { ph: "X", name: HELD, cat: HELD, pid, tid: 1, ts: 0, dur: step.length, args: { bytes: step.held_bytes } });
  let tid = 1;
  for (const group of new Set(step.blocks.map(block => block.group))) {
    for (const lane of lanes(step.blocks.filter(block => block.group === group))) {
      tid += 1;
      events.push(named("thread_name", pid, tid, group), ...lane.map(block => slice(pid, tid, block)));
    }
  }
  return { traceEvents: events, displayTimeUnit: "ns", otherData: { remark: REMARK } };
}

// Blocks in lanes of which no two overlap, as slices of one thread must not.
function lanes(blocks) {
  const found = [];
  for (const block of [...blocks].sort((a, b) => a.first - b.first || b.bytes - a.bytes)) {
    const free = found.find(lane => lane[lane.length - 1].last < block.first);
    if (free) free.push(block);
    else found.push([block]);
  }
  return found;
}

function slice(pid, tid, { group, bytes, shape, operation, source, why, base, first, last }) {
  const known = Object.entries({ bytes, shape, source, operation, why, base }).filter(([, value]) => value !== null && value !== undefined);
  const words = `${shape.replace(/\{[^}]*\}/g, "")} ${(operation || "").split("/").slice(-PARTS).join("/")}`.trim();
  return { ph: "X", name: words, cat: group, pid, tid, ts: first, dur: last - first + 1, args: Object.fromEntries(known) };
}

function named(what, pid, tid, name) {
  return { ph: "M", name: what, pid, tid, args: { name } };
}
