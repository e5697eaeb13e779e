// The line above a run's charts: what is on the x axis, smoothing, other runs to compare with, and a filter of metrics. All of it is in
// the address, so that a link shows the same. The overview, which is of no run, has only the choice of runs.
import { element, setAttribute, setChildren, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { openDialog } from "../widgets/dialog.js";
import { swatch } from "../widgets/chart_legend.js";
import { changeName, nameOf } from "../widgets/name.js";
import { styleOf } from "../widgets/palette.js";

const AXES = [["step", "Step"], ["elapsed", "Elapsed"], ["time", "Time"]];
const MOST_RUNS = 12;
const CHOICES = 200;

/**
 * Makes the line.
 *
 * @param {Object} context - The view's.
 * @param {{onChange: function(): void, onRuns: function(): void}} on - Called when charts are to be drawn anew, and when other runs
 *   are wanted.
 * @param {function(): Array<[string, string]>} [preset] - The runs, as `[job, run]`, of a view of no run, until others are chosen.
 */
export function chartControls(context, { onChange, onRuns }, preset = null) {
  const { query } = context;
  const axes = AXES.map(([name, text]) => element("button", { type: "button", class: "button small", on: { click: () => set({ x: name === "step" ? "" : name }) } }, text));
  const logX = element("button", { type: "button", class: "button small", title: "Logarithmic steps or elapsed time", on: { click: () => set({ logx: isLogX() ? "" : "1" }) } }, "log");
  const value = element("output", { class: "slider-value", for: "smoothing" });
  const slider = element("input", { type: "range", id: "smoothing", min: "0", max: "0.98", step: "0.02", "aria-label": "Smoothing", on: { input: () => set({ smooth: Number(slider.value) > 0 ? slider.value : "" }) } });
  const filter = element("input", { type: "search", class: "filter", placeholder: "Filter metrics", "aria-label": "Filter metrics", value: query.metric ?? null, on: { input: () => set({ metric: filter.value }) } });
  const compare = element("button", { type: "button", class: "button small", on: { click: () => choose() } }, preset ? "Choose runs…" : "Compare with…");
  const chosen = element("ul", { class: "compared", "aria-label": "Runs that are compared" });
  slider.value = smoothing();
  show();
  context.shortcut("c", "Compare with other runs", () => choose());

  function axis() {
    return AXES.some(([name]) => name === query.x) ? query.x : "step";
  }

  function isLogX() {
    return query.logx === "1" && axis() !== "time";
  }

  function smoothing() {
    const given = Number(query.smooth);
    return given > 0 && given < 1 ? given : 0;
  }

  /** The other runs, as `[job, run]`. */
  function pairs() {
    if (preset && !query.with) return preset();
    return (query.with ?? "").split(",").filter(Boolean).map((pair) => pair.split("~").map(decode)).filter((pair) => pair.length === 2 && !pair.includes("")).slice(0, MOST_RUNS);
  }

  function set(changes) {
    context.setQuery(changes);
    show();
    onChange();
  }

  function setPairs(list) {
    context.setQuery({ with: list.map((pair) => pair.map(encode).join("~")).join(",") });
    show();
    onRuns();
  }

  function show() {
    for (const [index, [name]] of AXES.entries()) setAttribute(axes[index], "aria-pressed", String(axis() === name));
    setAttribute(logX, "aria-pressed", String(isLogX()));
    setAttribute(logX, "disabled", axis() === "time");
    setText(value, smoothing() > 0 ? smoothing().toFixed(2) : "off");
    const others = pairs();
    const own = preset ? [] : [item(styleOf(0), context.parameters.run, null)];
    const remove = (index) => (preset && others.length === 1 ? null : () => setPairs(others.filter((_, place) => place !== index)));
    setAttribute(chosen, "hidden", others.length === 0);
    setChildren(chosen, own, others.map(([job, run], index) => item(styleOf(own.length + index), labelOf(job, run), remove(index))));
  }

  function labelOf(job, run) {
    const jobs = context.overview()?.jobs ?? [];
    return job === (context.parameters.job ?? (jobs.length === 1 ? jobs[0].job : null)) ? run : `${job}/${run}`;
  }

  async function choose() {
    const picked = await openDialog({ title: preset ? "Runs whose curves are drawn" : "Compare with", confirm: "Compare", wide: true, body: runChoices(context, pairs()), act: async (values) => Object.keys(values).filter((name) => name.startsWith("run:")).map((name) => name.slice(4).split("~").map(decode)) });
    if (picked) setPairs(picked.slice(0, MOST_RUNS));
  }

  return {
    element: element("div", { class: "controls" }, element("div", { class: "segmented", role: "group", "aria-label": "x axis" }, axes, logX), element("label", { class: "slider" }, "Smoothing", slider, value), filter, compare, chosen),
    axis,
    smoothing,
    filter: () => (query.metric ?? "").trim().toLowerCase(),
    isLogX,
    /** Whether a list of the address has a name: `open` sections, charts with a `log` axis. */
    has: (list, name) => (query[list] ?? "").split(",").includes(encode(name)),
    toggle(list, name) {
      const names = (query[list] ?? "").split(",").filter(Boolean);
      const one = encode(name);
      context.setQuery({ [list]: (names.includes(one) ? names.filter((each) => each !== one) : [...names, one]).join(",") });
    },
    /** The choice of runs alone. */
    choice: [compare, chosen],
    show,
    /** The other runs, with their labels. */
    others: () => pairs().map(([job, run]) => ({ job, run, label: visible(labelOf(job, run), 200) })),
  };
}

/** The check boxes of the dialog: all runs of all jobs, with a filter. */
function runChoices(context, chosen) {
  const overview = context.overview();
  const isChosen = (job, run) => chosen.some(([a, b]) => a === job && b === run);
  const all = (overview?.jobs ?? []).flatMap((job) => job.runs.map((run) => [job.job, run.run])).filter(([job, run]) => job !== context.parameters.job || run !== context.parameters.run);
  const rows = all.slice(0, 2000).map(([job, run]) => ({ text: `${job}/${run}`.toLowerCase(), node: element("label", { class: "choice" }, element("input", { type: "checkbox", name: `run:${encode(job)}~${encode(run)}`, checked: isChosen(job, run) }), element("bdi", {}, visible(run, 60)), " ", element("bdi", { class: "muted" }, visible(job, 40))) }));
  const filter = element("input", { type: "search", placeholder: "Find a run", "aria-label": "Find a run", class: "filter", on: { input: () => narrow() } });
  const list = element("div", { class: "choices" }, rows.map((row) => row.node));
  const narrow = () => {
    const wanted = filter.value.trim().toLowerCase();
    let left = CHOICES;
    for (const { text, node } of rows) node.hidden = !(text.includes(wanted) && (left -= 1) >= 0);
  };
  narrow();
  return [filter, rows.length > 0 ? list : element("p", { class: "muted" }, "There is no other run.")];
}

function item(style, text, onRemove) {
  return element("li", {}, swatch(style), named(text), onRemove && element("button", { type: "button", class: "remove", "aria-label": `Leave out ${visible(text, 48)}`, on: { click: onRemove } }, "×"));
}

function named(text) {
  const name = nameOf("legend-name");
  changeName(name, text);
  return name;
}

function encode(text) {
  return encodeURIComponent(text).replaceAll("~", "%7E");
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
