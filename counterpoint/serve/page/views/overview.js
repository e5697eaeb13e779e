// All jobs and runs at once: what is wrong on top, with the reason and what to do, what to do next, and then every run with its newest
// numbers, job by job or in one table; below, curves and the newest rollouts. The list, below a job's path, shows that job alone (views/job.js).
import { element, keep, setAttribute, setChildren, setText } from "../shell/dom.js";
import { ago, bytes, count, number, roughly, seconds, visible, whole } from "../shell/format.js";
import { WORDS } from "../shell/words.js";
import { stateOfJob } from "../shell/overview.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { changeName, nameOf } from "../widgets/name.js";
import { changeProgress, changeSparkline, progress, sparkline } from "../widgets/sparkline.js";
import { table } from "../widgets/table.js";
import { newestRollouts } from "./newest_rollouts.js";
import { overviewCurves } from "./overview_curves.js";
import { problemList } from "./problems.js";

export const title = "Overview";
export const path = "/";
export const key = "o";

/** What a directory is that has no runs. */
const KINDS = { cluster: "a job of roles", experiment: "an experiment", sweep: "a sweep", other: "holds no job yet", missing: "is not there" };
const RUN = "/jobs/{job}/runs/{run}";
/** Jobs of which what to do next is said. */
const MOST_NEXT = 3;

/** Draws the view. */
export function render(root, context) {
  const list = renderJobs(root, context, title, () => true);
  const next = element("ul", { class: "next", "aria-label": "What to do next" });
  const curves = overviewCurves(context);
  const rollouts = newestRollouts(context);
  root.children[1].after(next); // behind the problems, to which it refers
  root.append(curves.element, rollouts.element);
  return {
    async update() {
      await list.update();
      const jobs = context.overview()?.jobs ?? [];
      keep(next, jobs.filter((job) => job.next !== "").slice(0, MOST_NEXT), (job) => job.job, makeNext, (line, job) => changeNext(line, job, jobs.length > 1));
      await rollouts.update(await curves.update(jobs.flatMap((job) => job.runs)));
    },
    destroy: () => curves.destroy(),
  };
}

/** Makes the line that says what to do next with a job. */
function makeNext() {
  return element("li", {}, element("bdi", { class: "next-job" }), element("span", {}), element("span", { class: "next-commands" }));
}

function changeNext(line, job, isNamed) {
  const [name, text, commands] = line.children;
  setText(name, visible(job.job, 48));
  setAttribute(name, "hidden", !isNamed);
  setText(text, visible(job.next, 300));
  keep(commands, job.next_commands, (command) => command, (command) => element("code", {}, visible(command, 1000)));
}

/** Draws the jobs for which `isWanted` holds. */
export function renderJobs(root, context, name, isWanted) {
  const problems = problemList(context);
  const heading = element("h1", {}, element("bdi", {}, name));
  const summary = element("span", { class: "muted" });
  const jobs = element("div", {});
  const nothing = element("p", { class: "empty" }, "Reading the jobs' directories.");
  const tables = new Map();
  const layouts = [["", "One table"], ["job", "Job by job"]].map(([by, text]) => element("button", { type: "button", class: "button small", on: { click: () => layOut(by) } }, text));
  const layout = element("div", { class: "segmented", role: "group", "aria-label": "Runs", hidden: true }, layouts);
  const filter = element("input", { type: "search", class: "filter", placeholder: "Filter runs", "aria-label": "Filter runs", hidden: true, value: context.query.run ?? null, on: { input: () => { context.setQuery({ run: filter.value }); draw(context.overview()); } } });
  const all = table({ caption: "All runs", isStacked: true, columns: columns(context, true), keyOf: (run) => keyOf(run), tone: (run) => troubles.get(keyOf(run)) ?? "", empty: "No run has this name." });
  const allBox = element("div", {});
  let troubles = new Map();
  root.append(element("div", { class: "view-title" }, heading, summary, element("span", { class: "spacer" }), filter, layout), problems.element, allBox, jobs, nothing);

  function draw(overview) {
    const wanted = overview.jobs.filter(isWanted);
    const ids = new Set(wanted.map((job) => job.job));
    const runs = wanted.flatMap((job) => job.runs);
    const active = runs.filter((run) => run.alive).length;
    setText(summary, `${context.parameters.job ? "" : `${plural(wanted.length, "job")}, `}${plural(runs.length, "run")}${runs.length > 0 ? `, ${whole(active)} active` : ""}`);
    troubles = tonesOf(overview.problems);
    problems.update(overview.problems.filter((problem) => ids.has(problem.job)), overview.time, overview.problemCount - overview.problems.length);
    const isOne = drawOne(wanted, overview.time);
    keep(jobs, isOne ? wanted.filter((job) => job.runs.length === 0) : wanted, (job) => job.job, (job) => makeJob(job), (node, job) => changeJob(node, job, overview.time));
    for (const id of tables.keys()) if (!ids.has(id)) tables.delete(id);
    setText(nothing, overview.jobs.length === 0 ? "No job directory was given. Start: counterpoint serve JOB_DIRECTORY." : "There is no such job. It may have been left out when the server was started again.");
    setAttribute(nothing, "hidden", wanted.length > 0);
  }

  /** Shows the runs of several jobs in one table, unless they are wanted job by job; returns whether it does. */
  function drawOne(wanted, now) {
    const isChoice = wanted.filter((job) => job.runs.length > 0).length > 1;
    const isOne = isChoice && context.query.by !== "job";
    setAttribute(filter, "hidden", !isOne);
    setChildren(allBox, isOne && all.element);
    setAttribute(layout, "hidden", !isChoice);
    for (const [index, button] of layouts.entries()) setAttribute(button, "aria-pressed", String(isOne === (index === 0)));
    const { run: name = "" } = context.query;
    const fits = (run) => `${run.job}/${run.run}`.toLowerCase().includes(name.trim().toLowerCase());
    if (isOne) all.update(wanted.flatMap((job) => job.runs).filter(fits).map((run) => ({ ...run, now })));
    return isOne;
  }

  function layOut(by) {
    context.setQuery({ by });
    draw(context.overview());
  }

  function makeJob(job) {
    const list = table({ caption: `Runs of ${visible(job.job)}`, columns: columns(context), isStacked: true, keyOf: (run) => run.run, tone: (run) => troubles.get(keyOf(run)) ?? "", empty: "No run has begun yet. Runs appear here when their orchestrators start." });
    tables.set(job.job, list);
    return element("section", { class: "section" }, element("div", { class: "section-head" }, element("h2", {}, element("a", {}, element("bdi", {}))), badge(""), element("span", { class: "muted" }), element("span", { class: "spacer" })), list.element);
  }

  function changeJob(section, job, now) {
    const [name, state, note] = section.firstChild.children;
    setText(name.firstChild.firstChild, visible(job.job));
    setAttribute(name.firstChild, "href", context.homeOf(job.job));
    setAttribute(section.lastChild, "hidden", !["job", "other", "missing"].includes(job.kind));
    changeBadge(state, stateOfJob(job));
    setText(note, [visible(job.directory, 160), diskOf(job), KINDS[job.kind]].filter(Boolean).join(" · "));
    tables.get(job.job).update(job.runs.map((run) => ({ ...run, now })));
  }

  return {
    async update() {
      const overview = context.overview();
      if (overview !== null) draw(overview);
    },
    destroy() {},
  };
}

/** The columns of a table of runs; of several jobs, with the job, and without what tells nothing of the learning. */
function columns(context, ofSeveral = false) {
  return [
    ...(ofSeveral ? [{ key: "job", least: 118, title: "Job", value: (run) => run.job, change: (cell, run) => changeJobName(cell, context.homeOf(run.job), run.job) }] : []),
    { key: "run", least: 98, title: "Run", value: (run) => run.run, cell: (run) => visible(run.run, 64), change: (cell, run) => changeRun(cell, context.link(RUN, run), run) },
    { key: "state", width: 118, title: "State", value: (run) => run.state, change: changeState },
    { key: "step", width: 100, title: "Step", number: true, value: (run) => run.step, change: changeStep },
    { key: "reward", width: 66, title: "Reward", number: true, value: (run) => run.reward, cell: (run) => number(run.reward, 3), help: "Mean reward of the newest step" },
    { key: "evaluated", width: 68, title: "Eval.", number: true, value: (run) => run.evaluated, cell: (run) => (run.evaluation ? element("span", { title: visible(run.evaluation, 60) }, number(run.evaluated, 3)) : "–"), help: "The newest result of the first evaluation: pass@k, or its reward" },
    { key: "trend", width: 68, title: "Trend", value: (run) => trend(run.rewards), change: changeTrend, help: "The mean reward from the first step to the newest; sorts by how much it rises" },
    { key: "throughput", width: 76, title: "Tokens", unit: "/s", number: true, value: (run) => run.tokens_per_second, cell: (run) => count(run.tokens_per_second), help: "Completion tokens, over the newest ten steps" },
    { key: "staleness", width: 78, title: "Staleness", number: true, value: (run) => run.staleness, cell: (run) => number(run.staleness, 3), help: WORDS.staleness },
    { key: "mismatch", width: 80, title: "Mismatch", number: true, value: (run) => run.mismatch_kl, cell: (run) => number(run.mismatch_kl, 2), help: "KL of inference against trainer log-probabilities" },
    { key: "lag", width: 78, title: "Lag p99", number: true, value: (run) => run.lag_p99, cell: (run) => seconds(run.lag_p99), help: "Of the orchestrator's event loop in the newest step" },
    { key: "left", width: 78, title: "Time left", number: true, value: (run) => run.seconds_left, cell: (run) => roughly(run.seconds_left) },
    { key: "updated", width: 98, title: "Updated", number: true, value: (run) => run.updated, cell: (run) => ago(run.updated, run.now) },
  ].filter(({ key: name }) => !ofSeveral || !["staleness", "lag"].includes(name));
}

function changeRun(cell, href, run) {
  if (!cell.firstChild) cell.append(element("a", { class: "cell-name" }, nameOf()));
  setAttribute(cell.firstChild, "href", href);
  setAttribute(cell.firstChild, "title", visible(run.run, 200));
  changeName(cell.firstChild.firstChild, run.run);
}

function changeJobName(cell, href, job) {
  if (!cell.firstChild) cell.append(element("a", { class: "cell-name" }, nameOf()));
  setAttribute(cell.firstChild, "href", href);
  changeName(cell.firstChild.firstChild, job);
}

function changeState(cell, run) {
  if (!cell.firstChild) setChildren(cell, badge(""));
  changeBadge(cell.firstChild, run.state ?? "");
}

function changeStep(cell, run) {
  if (!cell.firstChild) cell.append(element("div", { class: "cell-step" }, element("span", {}), progress()));
  const [text, bar] = cell.firstChild.children;
  setText(text, run.steps > 0 ? `${whole(run.step)} / ${whole(run.steps)}` : whole(run.step));
  changeProgress(bar, run.steps > 0 ? run.step / run.steps : null);
}

function changeTrend(cell, run) {
  if (!cell.firstChild) cell.append(sparkline());
  changeSparkline(cell.firstChild, run.rewards);
}

/** The worst problem of each run. */
function tonesOf(problems) {
  const tones = new Map();
  for (const problem of problems) if (problem.run && tones.get(keyOf(problem)) !== "bad") tones.set(keyOf(problem), problem.severity === "error" ? "bad" : "warn");
  return tones;
}

function keyOf({ job, run }) {
  return JSON.stringify([job, run]);
}

function diskOf(job) {
  return job.disk_free_bytes === null ? "" : `${bytes(job.disk_free_bytes)} free of ${bytes(job.disk_bytes)}`;
}

/** How much a series has risen, from its first quarter to its last. */
function trend(values) {
  const known = (values ?? []).filter((value) => typeof value === "number");
  if (known.length < 2) return null;
  const quarter = Math.ceil(known.length / 4);
  const mean = (part) => part.reduce((sum, value) => sum + value, 0) / part.length;
  return mean(known.slice(-quarter)) - mean(known.slice(0, quarter));
}

function plural(amount, noun) {
  return `${whole(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}
