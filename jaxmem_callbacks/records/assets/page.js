// The page: which runs are shown, and the sections of each, side by side.

import { blocks, bytes, clock, el, link, percent, sized, swatch, switches, table, untip, whole, wide } from "./draw.js";
import { overTime } from "./time.js";
import { colour, whatMakesThePeak } from "./peak.js";
import { withinAStep } from "./step.js";
import { thePlan } from "./plan.js";
import { theHeap } from "./heap.js";

const MOST_SIDE_BY_SIDE = 3, EVENTS_AT_ONCE = 25;
const SECTIONS = [
  ["glance", "At a glance", atAGlance, run => run.glance],
  ["open", "What happened, and what to do", run => blocks(run.open), run => run.open],
  ["time", "Over time", overTime, run => run.curves],
  ["peak", "What makes the peak", whatMakesThePeak, run => run.programs],
  ["step", "Within a step", withinAStep, run => (run.programs || []).some(one => one.step)],
  ["plan", "The plan", (run, page) => thePlan(run.plan, initial => page.keep(run, "plan", initial)), run => run.plan],
  ["heap", "The heap", theHeap, run => (run.heaps || []).length],
  ["events", "Events, and what to do", theEvents, run => run.events && (run.events.length || !run.open)],
  ["details", "Details", theDetails, run => run.details],
];

// Show entries: runs with their models, of which those that are not there yet are loaded when they are picked.
export function show(root, { title, entries, footer, notes = [] }) {
  const kept = new Map();
  // What a view was set to, which outlives a drawing: a run that goes on is drawn again and again.
  const keep = (run, view, initial) => {
    const key = `${run.name}\n${view}`;
    if (!kept.has(key)) kept.set(key, initial);
    return kept.get(key);
  };
  // Each view registers how it shows one thing of its run; `go` is the way there from every other view.
  const ways = new WeakMap();
  const shows = (run, view, way) => ways.set(run, { ...ways.get(run), [view]: way });
  const page = { entries, picked: [], runs: [], again, keep, shows, go };
  const first = entries.find(entry => entry.first) || entries[entries.length - 1];
  if (first) page.picked = [first];

  function again() {
    page.runs = page.picked.map(entry => entry.run).filter(Boolean);
    const top = window.scrollY;
    const sections = page.runs.length ? SECTIONS.filter(([, , , has]) => page.runs.some(has)) : [];
    root.replaceChildren(
      el("header", {}, el("h1", {}, title), entries.length > 1 ? picker() : null),
      sections.length ? el("nav", { "aria-label": "sections" }, sections.map(([id, words]) => el("a", { href: `#${id}`,
          onclick: event => { event.preventDefault(); document.getElementById(id).scrollIntoView(); } }, words))) : "",
      ...notes.map(note => el("p", { class: "note" }, note)),
      ...page.picked.filter(entry => !entry.run || entry.share < 1).map(entry => el("p", { class: "note", role: "status", "data-reading": entry.label },
        reading(entry))),
      ...sections.map(([id, words, view, has]) => el("section", { id, class: "view" }, el("h2", {}, words),
        el("div", { class: `panels of-${page.runs.length}` }, page.runs.map(run => panel(run, view, has, id))))),
      el("footer", {}, footer));
    window.scrollTo(0, top);
    // For the browser's own tools: from here on the page can be used.
    if (page.runs.length && !performance.getEntriesByName("drawn").length) performance.mark("drawn");
  }

  function reading(entry) {
    return entry.failed ? entry.failed : `${entry.label} is being read: ${percent(entry.share || 0)}`;
  }

  page.progress = entry => {
    for (const note of root.querySelectorAll("[data-reading]")) if (note.dataset.reading === entry.label) note.textContent = reading(entry);
  };

  function panel(run, view, has, id) {
    const body = has(run) ? view(run, page) : el("p", { class: "soft" }, "This run has nothing of it.");
    return el("article", { class: "panel", id: page.runs.length === 1 ? null : `${id}-${page.runs.indexOf(run)}` },
      page.runs.length > 1 ? el("h3", { class: "whose" }, run.name) : null, body);
  }

  function picker() {
    const many = entries.length > 8;
    const pick = (entry, add) => {
      const has = page.picked.includes(entry);
      if (!add) page.picked = [entry];
      else if (has) page.picked = page.picked.length > 1 ? page.picked.filter(one => one !== entry) : page.picked;
      else page.picked = [...page.picked, entry].slice(-MOST_SIDE_BY_SIDE);
      page.picked.forEach(one => { if (!one.run && one.load) one.load(); });
      again();
    };
    const rows = entries.map(entry => el("label", { class: "run" }, el("input", { type: "checkbox", checked: page.picked.includes(entry),
      onchange: () => pick(entry, true) }), el("button", { type: "button", class: "quiet", onclick: () => pick(entry, false), title: entry.label }, entry.label)));
    return el("details", { class: "picker", open: page.pickerOpen ?? !many, ontoggle: event => { page.pickerOpen = event.target.open; } },
      el("summary", {}, `${page.picked.length} of ${entries.length} runs`), el("div", { class: "runs", role: "group", "aria-label": "runs" }, rows),
      el("p", { class: "soft" }, "A name shows one run; boxes put up to three side by side."));
  }

  // To one thing of a view: it is shown there, is in the middle of the window and has the focus. The address stays, which is TensorBoard's.
  function go(run, view, what) {
    const node = ways.get(run)?.[view]?.(what);
    if (!node) return;
    untip();
    node.scrollIntoView({ block: "center", behavior: "instant" });
    node.focus({ preventScroll: true });
    node.dispatchEvent(new Event("arrived"));
  }

  again();
  page.picked.forEach(entry => { if (!entry.run && entry.load) entry.load(); });
  return page;
}

// At a glance

function atAGlance(run, page) {
  const { glance } = run;
  const programs = (run.programs || []).filter(one => one.bytes).sort((a, b) => b.bytes - a.bytes);
  const tiles = [
    glance.high ? ["highest use", bytes(glance.high.bytes), `${glance.high.what}, ${glance.high.device}, ${glance.high.step < 0 ? "before the first step" : `step ${whole(glance.high.step)}`}`] : null,
    glance.limit_bytes && glance.high ? headroom(glance) : null,
    glance.program ? ["needs most", bytes(glance.program.bytes), [programs.some(one => one.name === glance.program.name && one.peak && one.peak.bytes > 0)
      ? link(glance.program.name, () => page.go(run, "peak", { program: glance.program.name })) : glance.program.name,
    `, by its compiler${glance.limit_bytes ? `: ${share(glance.program.bytes, glance.limit_bytes)}` : ""}`]] : null,
    run.events && (run.events.length || !run.open) ? ["events", whole(run.events.length + (run.elsewhere || []).length), kinds(run.events)] : null,
  ].filter(Boolean);
  return el("div", { class: "glance" },
    el("p", { class: `verdict ${glance.level}` }, glance.verdict),
    room(glance, programs[0]),
    el("div", { class: "tiles" }, tiles.map(([name, value, words]) => el("div", { class: "tile" }, el("span", { class: "soft" }, name), el("b", {}, value), el("span", { class: "soft" }, words)))),
    glance.first ? el("p", { class: "act" }, el("strong", {}, "What to do first: "), glance.first.action,
      glance.first.event === null || glance.first.event === undefined ? null : [" ", link(`${glance.first.title}, event ${glance.first.event + 1}`, () => page.go(run, "events", glance.first.event))]) : null,
    el("p", { class: "soft sentence" }, run.sentence));
}

// Of the highest use and the largest program the one that leaves less: a platform may report no temporaries as in use.
function headroom({ limit_bytes: limit, high, program }) {
  const needed = program && program.bytes > high.bytes ? program : null;
  const left = limit - (needed || high).bytes, whose = needed ? `, while ${needed.name} runs` : "";
  return left >= 0 ? ["headroom", bytes(left), `of the limit of ${bytes(limit)}${whose}`]
    : ["headroom", "none", `${bytes(-left)} above the limit of ${bytes(limit)}${whose}`];
}

function share(part, limit) {
  return part < 3 * limit ? `${percent(part / limit)} of the limit` : `${whole(Math.round(part / limit))} times the limit`;
}

function kinds(events) {
  const counts = new Map();
  for (const event of events) counts.set(event.title, (counts.get(event.title) || 0) + 1);
  const words = [...counts].sort((a, b) => b[1] - a[1]).map(([title, count]) => count > 1 ? `${title.toLowerCase()} ${whole(count)}\u00d7` : title.toLowerCase());
  return words.length ? words.slice(0, 3).join(", ") + (words.length > 3 ? ` and ${words.length - 3} more kinds` : "") : "none was reported";
}

// The limit as a bar, filled by what makes the peak of the program that needs most, with the highest use marked on it.
function room(glance, program) {
  const { limit_bytes: limit, high } = glance;
  if (!limit) return null;
  const need = program ? program.bytes : 0;
  const most = Math.max(limit, need, high ? high.bytes : 0);
  const marks = [...(high && program ? [[high.bytes, `highest use ${bytes(high.bytes)}`, "use"]] : []), [limit, `limit ${bytes(limit)}`, "limit"]];
  const groups = program && program.peak ? program.peak.groups.map(group => [group.bytes * need / program.peak.bytes, colour(group.name), group.name, bytes(group.bytes)])
    : high ? [[high.bytes, "s0", "highest use", bytes(high.bytes)]] : [];
  const bar = el("div", { class: "room", role: "img", "aria-label": `Of ${bytes(limit)}${program ? ` ${program.name} needs ${bytes(need)}` : ""}${high ? `, the highest use was ${bytes(high.bytes)}` : ""}` });
  const keys = el("ul", { class: "keys" });
  const strip = sized(bar, width => {
    const x = size => Math.min(size / most, 1) * width;
    const unnamed = [];
    let begin = 0;
    const parts = groups.map(([size, style, name, words]) => {
      const [from, to] = [x(begin), x(begin += size)];
      // The name is where no mark crosses it, or else below the bar.
      const edges = [from, ...marks.map(([at]) => x(at)).filter(at => at > from && at < to).sort((a, b) => a - b), to];
      const spaces = edges.slice(1).map((edge, at) => [edges[at], edge - edges[at]]);
      const text = `${name} ${words}`, fits = spaces.find(([, space]) => wide(text) + 15 <= space);
      if (!fits && to - from > 2) unnamed.push(el("li", {}, swatch(style), text));
      const node = el("i", { class: style, title: text }, fits ? text : null);
      node.style.width = `${to - from}px`;
      if (fits) node.style.paddingLeft = `${fits[0] - from + 7}px`;
      return node;
    });
    bar.replaceChildren(el("div", { class: "strip-of-parts" }, parts), ...marks.map(([size, words, style]) => {
      const node = el("span", { class: `mark ${style}${x(size) > width / 2 ? " left" : ""}` }, el("em", {}, words));
      node.style.left = `${x(size)}px`;
      return node;
    }));
    keys.replaceChildren(...unnamed);
  });
  return el("div", {}, strip, keys);
}

// Events

function theEvents(run, page) {
  const index = page.runs.indexOf(run);
  const all = run.events.map((event, number) => ({ event, number }));
  const titles = [...new Set(run.events.map(event => event.title))];
  const host = el("div", {});
  const list = el("div", {}), state = page.keep(run, "events", { kind: null, shown: EVENTS_AT_ONCE });
  const refill = () => {
    const chosen = all.filter(({ event }) => !state.kind || event.title === state.kind);
    const most = state.shown;
    list.replaceChildren(...chosen.slice(0, most).map(({ event, number }) => card(event, number, `event-${index}-${number}`, chosen.length === 1,
      (run.curves || []).length ? link("Show it over time", () => page.go(run, "time", event)) : null)),
      ...(chosen.length > most ? [el("button", { type: "button", onclick: () => { state.shown = most + 100; refill(); } },
        `${whole(chosen.length - most)} more`)] : []), ...(chosen.length ? [] : [el("p", {}, "None.")]));
  };
  page.shows(run, "events", number => {
    Object.assign(state, { kind: null, shown: Math.max(state.shown, number + 5) });
    host.replaceWith(theEvents(run, page));
    const shown = document.getElementById(`event-${index}-${number}`);
    shown.open = true;
    return shown.querySelector("summary");
  });
  refill();
  host.append(titles.length > 1 ? el("div", { class: "controls" }, switches("kind of event", [[null, "all"], ...titles.map(title => [title, title])], state.kind,
    value => { state.kind = value; refill(); })) : "", list);
  if ((run.elsewhere || []).length) {
    host.append(el("h3", {}, "Events of other processes"), table({ columns: ["reported by", "step", "event", "what happened"],
      rows: run.elsewhere.map(each => [each.where, whole(each.step), each.title, each.message]) }));
  }
  return host;
}

function card(event, number, id, open, place) {
  return el("details", { class: "event-card", id, open }, el("summary", {}, el("b", {}, `${number + 1}. ${event.title} at step ${whole(event.step)}`),
    el("span", { class: "soft" }, ` ${event.device}`)), place, event.details ? blocks(event.details) : el("p", {}, event.message));
}

// Details, and last what is unknown

function theDetails(run) {
  const known = (run.known || []).filter(row => row[1] !== "unknown"), unknown = (run.known || []).filter(row => row[1] === "unknown");
  const columns = ["figure", "latest", "from", "meaning"];
  return el("div", {},
    (run.details || []).map(block => block.blocks && block.title
      ? el("details", {}, el("summary", {}, block.title), blocks(block.blocks, 4)) : blocks([block])),
    known.length ? el("details", {}, el("summary", {}, `Figures that were known, and their latest values: ${known.length}`), table({ columns, rows: known })) : null,
    unknown.length ? el("details", {}, el("summary", {}, `What is unknown here, and why: ${unknown.length}`),
      table({ columns: ["figure", "from", "why it is unknown"], rows: unknown.map(([figure, , source, text]) => [figure, source, text]) })) : null);
}

// The doors

function follow(scheme) {
  const known = scheme();
  if (document.documentElement.dataset.scheme !== known) {
    document.documentElement.dataset.scheme = known;
    document.dispatchEvent(new Event("memory:scheme"));
  }
}

function followSystem() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => follow(() => dark.matches ? "dark" : "light");
  dark.addEventListener("change", apply);
  apply();
}

// A file with its own model.
export function open(root, model) {
  followSystem();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
  const entries = model.runs.map(run => ({ label: run.name, run, share: 1 }));
  return show(root, { title: model.title, entries, footer: model.footer });
}

const ASK_AGAIN_S = 15;

// The tab of TensorBoard: the folders of its log folder that hold runs, read as they are picked and again while they grow.
export async function tab(root, at) {
  const outside = window.parent === window ? null : window.parent.document.body;
  if (outside) {
    const apply = () => follow(() => outside.classList.contains("dark-mode") ? "dark" : "light");
    new MutationObserver(apply).observe(outside, { attributes: true, attributeFilter: ["class"] });
    apply();
  } else followSystem();
  const get = async path => {
    const answer = await fetch(new URL(path, at));
    if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
    return answer.json();
  };
  let listed;
  try {
    listed = await get("runs");
  } catch (error) {
    root.replaceChildren(el("p", { class: "note" }, `The runs could not be listed: ${error.message}. Is TensorBoard still running?`));
    return null;
  }
  const entries = listed.folders.map(folder => ({ label: folder.name, key: folder.name, run: null, share: 0 }));
  let page = null;
  const load = async entry => {
    if (entry.loading) return;
    entry.loading = true;
    let version = "", drawn = false;
    for (;;) {
      let found;
      try {
        found = await get(`run?${new URLSearchParams({ folder: entry.key, version })}`);
      } catch (error) {
        entry.failed = `${entry.label} could not be read: ${error.message}`;
        page.again();
        await new Promise(after => setTimeout(after, ASK_AGAIN_S * 1000));
        continue;
      }
      if (entry.failed) { entry.failed = null; drawn = false; }
      entry.share = found.share;
      if (found.version !== version || !drawn) {
        version = found.version;
        if (found.runs.length) {
          const [newest, ...others] = found.runs.reverse();
          entry.run = newest;
          others.forEach(run => {
            const label = `${entry.label}, ${run.run}`;
            const known = entries.find(one => one.label === label);
            if (known) known.run = run;
            else entries.push({ label, run, share: 1 });
          });
        } else entry.failed = found.remark;
        drawn = true;
        if (page.picked.includes(entry)) page.again();
      } else page.progress(entry);
      if (found.share >= 1) {
        if (found.closed) { entry.loading = false; return; }
        await new Promise(after => setTimeout(after, ASK_AGAIN_S * 1000));
        while (document.hidden || !page.picked.includes(entry)) await new Promise(after => setTimeout(after, 1000));
      }
    }
  };
  entries.forEach(entry => { entry.load = () => load(entry); });
  if (entries.length) entries[0].first = true;
  page = show(root, { title: "Memory", entries, footer: listed.footer, notes: entries.length ? listed.notes : [...listed.notes, listed.empty] });
  return page;
}
