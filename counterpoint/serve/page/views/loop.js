// The event loop of a run's orchestrator: how late it was over time, and which code was to blame at each peak.
import { fill } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { number, passage, seconds, visible, whole } from "../shell/format.js";
import { figures } from "../widgets/figures.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { chart } from "../widgets/chart.js";
import { joined } from "../widgets/chart_series.js";
import { styleOf } from "../widgets/palette.js";
import { table } from "../widgets/table.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { path as profiles } from "./profile.js";

export const title = "Loop";
export const path = "/jobs/{job}/runs/{run}/loop";
export const key = "l";

const LOOP = "/jobs/{job}/runs/{run}/loop";
const CURVES = { "event_loop_lag/max": ["max", 4], "event_loop_lag/p99": ["p99", 0], "event_loop_lag/median": ["median", 2] };
const POINTS = 800;
const PEAKS = 100;
/** The default of `lag.blame_seconds`. */
const LATE_SECONDS = 0.05;

/** What each kind of late moment means (docs/debugging.md). */
const KINDS = {
  callback: { text: "own work", tone: "warn", help: "The loop ran code" },
  gil: { text: "GIL held", tone: "warn", help: "Another thread held the GIL" },
  wait: { text: "waited", tone: "warn", help: "The loop was in a call that waits" },
  machine: { text: "machine busy", tone: "busy", help: "The CPU went to others" },
  unknown: { text: "unknown", tone: "idle", help: "The cause is not known" },
};

/** Draws the view. */
export function render(root, context) {
  const group = new ZoomGroup(() => context.refresh());
  const lag = chart({ title: "Loop lag", help: "How late a timer on the orchestrator's event loop ran, per step", format: seconds, group, height: 240, isWide: true, onPick: (step) => pick(step) });
  const note = element("p", { class: "empty" }, "Reading the run's metrics.");
  const health = element("p", { class: "loop-health" });
  const peaks = table({ caption: "Peaks", columns: peakColumns(), keyOf: (peak) => peak.key, sort: { key: "lag", descending: true }, tone: (peak) => (peak.steps.includes(picked) ? "warn" : ""), empty: "No moment was late enough to be blamed on anything." });
  const places = table({ caption: "Places by time", columns: placeColumns(), keyOf: keyOfPlace, sort: { key: "seconds", descending: true }, empty: "Nothing was to blame so far." });
  const kinds = figures("Late moments by cause");
  let answer = null;
  let picked = null;
  root.append(
    element("div", { class: "view-title" }, element("h1", {}, "Event loop of ", element("bdi", {}, visible(context.parameters.run, 64))), health, element("span", { class: "spacer" }), element("a", { href: context.link(profiles, context.parameters) }, "Profiles of the loop")),
    note,
    element("div", { class: "charts" }, lag.element),
    kinds.element,
    element("section", { class: "section" }, element("div", { class: "section-head" }, element("h2", {}, "Peaks"), element("span", { class: "muted" }, "click a peak in the chart, or press Enter on it, to find its row")), peaks.element),
    element("section", { class: "section" }, element("div", { class: "section-head" }, element("h2", {}, "What took the time"), element("span", { class: "muted" }, "in these steps")), places.element),
  );

  function pick(step) {
    const nearest = latePeaks(answer.peaks).reduce((best, peak) => (best === null || Math.abs(peak.step - step) < Math.abs(best.step - step) ? peak : best), null);
    if (!nearest) return;
    picked = nearest.step;
    peaks.update(peakRows(answer.peaks));
    root.querySelector("tr[data-tone=warn]")?.scrollIntoView({ block: "center" });
    context.announce(`Peak at step ${whole(picked)}: ${seconds(nearest.seconds)}, ${nearest.blame[0] ? describePlace(nearest.blame[0]) : "without blame"}`);
  }

  function draw() {
    const shown = Object.keys(CURVES).map((name) => answer.series.find((one) => one.metric === name)).filter(Boolean);
    const { x, columns } = joined(shown.map((one) => ({ x: one.x, columns: [one.metric === "event_loop_lag/max" ? one.high : one.mean] })));
    lag.update({ x, axis: "step", curves: shown.map((one, index) => ({ key: one.metric, label: CURVES[one.metric][0], style: styleOf(CURVES[one.metric][1]), mean: columns[index][0] })) });
    kinds.update([{ name: "Late moments", value: whole(answer.late) }, ...Object.entries(KINDS).map(([kind, { text, help }]) => ({ name: text, value: seconds(answer.seconds_by_kind[kind]), help }))]);
    peaks.update(peakRows(answer.peaks));
    places.update(totalsOf(answer.peaks));
    setText(health, answer.late === 0 && x.length > 0 ? "Never late in the steps shown." : "");
    setText(note, answer.unreadable ? visible(answer.unreadable, 300) : "No step is complete yet. Lag is measured from the first one.");
    setAttribute(note, "hidden", x.length > 0 && !answer.unreadable);
  }

  return {
    async update() {
      const range = group.range ? { x_from: Math.floor(group.range[0]), x_to: Math.ceil(group.range[1]) } : {};
      const next = await context.get(fill(LOOP, context.parameters), { points: POINTS, peaks: PEAKS, ...range });
      if (next === answer) return;
      answer = next;
      const x = answer.series[0]?.x ?? [];
      if (!group.range && x.length > 0) group.setExtent([x[0], x[x.length - 1]]);
      draw();
    },
    destroy: () => lag.destroy(),
  };
}

function peakColumns() {
  return [
    { key: "step", title: "Step", width: 130, number: true, value: (peak) => peak.step, cell: stepsOf },
    { key: "lag", title: "Late by", width: 100, number: true, value: (peak) => peak.seconds, cell: (peak) => seconds(peak.seconds) },
    { key: "kind", title: "Cause", width: 130, value: (peak) => peak.blame[0]?.kind, change: (cell, peak) => changeKind(cell, peak.blame[0]) },
    { key: "place", title: "Function", wide: true, value: (peak) => peak.blame[0]?.function ?? "", change: (cell, peak) => changePlace(cell, peak.blame[0], peak.blame.length - 1) },
  ];
}

function placeColumns() {
  return [
    { key: "seconds", title: "In all", width: 100, number: true, value: (place) => place.seconds, cell: (place) => seconds(place.seconds) },
    { key: "worst", title: "Worst", width: 100, number: true, value: (place) => place.worst, cell: (place) => seconds(place.worst) },
    { key: "count", title: "Moments", width: 90, number: true, value: (place) => place.count, cell: (place) => whole(place.count) },
    { key: "kind", title: "Cause", width: 130, value: (place) => place.kind, change: changeKind },
    { key: "place", title: "Function", value: (place) => place.function, wide: true, change: (cell, place) => changePlace(cell, place, 0) },
    { key: "advice", title: "What to do", wide: true, value: (place) => visible(place.advice, 200) },
  ];
}

function changeKind(cell, place) {
  if (!cell.firstChild) cell.append(badge(""));
  const kind = KINDS[place?.kind];
  changeBadge(cell.firstChild, kind?.text ?? place?.kind ?? "not known", kind?.tone ?? "idle");
}

function changePlace(cell, place, others) {
  if (!cell.firstChild) cell.append(element("bdi", { class: "mono place" }), element("bdi", { class: "muted place-file" }));
  const [name, file] = cell.children;
  setText(name, place?.function ? visible(place.function, 120) : place?.thread ? `thread ${visible(place.thread, 60)}` : "–");
  const parts = [place?.file && `${visible(place.file, 120)}:${number(place.line)}`, place?.inside && `in ${visible(place.inside, 80)}`, place?.thread && place.function && `thread ${visible(place.thread, 40)}`, place?.callback && `task ${visible(place.callback, 80)}`, others > 0 && `and ${whole(others)} more`];
  setText(file, parts.filter(Boolean).join(" · "));
  setAttribute(cell, "title", place ? passage(describePlace(place), 300) : null);
}

function describePlace(place) {
  return [KINDS[place.kind]?.text ?? place.kind, place.function, place.file && `${place.file}:${place.line}`].filter(Boolean).map((text) => visible(text, 120)).join(", ");
}

function keyOfPlace(place) {
  return JSON.stringify([place.kind, place.function, place.file, place.line, place.thread, place.callback]);
}

/** The steps that were late by enough to ask why. */
function latePeaks(peaks) {
  return peaks.filter((peak) => peak.blame.length > 0 || peak.seconds >= LATE_SECONDS);
}

/** The peaks as rows: those for which no code is to blame are one row for each cause, with all their steps. */
function peakRows(peaks) {
  const rows = new Map();
  for (const peak of latePeaks(peaks)) {
    const place = peak.blame[0];
    const isNamed = Boolean(place?.function || place?.thread);
    const key = isNamed ? `step ${peak.step}` : `cause ${place?.kind}`;
    const before = rows.get(key);
    const worst = before && before.seconds >= peak.seconds ? before : peak;
    rows.set(key, { ...worst, key, steps: [...(before?.steps ?? []), peak.step] });
  }
  return [...rows.values()];
}

/** The step of a row, or how many there are and which was the worst. */
function stepsOf({ step, steps }) {
  return steps.length === 1 ? whole(step) : `${whole(step)}, and ${whole(steps.length - 1)} more`;
}

/** What each place took over all peaks. */
function totalsOf(peaks) {
  const totals = new Map();
  for (const place of peaks.flatMap((peak) => peak.blame)) {
    const before = totals.get(keyOfPlace(place)) ?? { ...place, seconds: 0, worst: 0, count: 0 };
    totals.set(keyOfPlace(place), { ...before, seconds: before.seconds + place.seconds, worst: Math.max(before.worst, place.worst), count: before.count + place.count });
  }
  return [...totals.values()];
}
