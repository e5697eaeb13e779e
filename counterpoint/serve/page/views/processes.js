// The processes of a job: what each does, says and takes of its machine, or how it ended. Until a run has its first step, they say what it
// waits for.
import { fill } from "../shell/api.js";
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { ago, bytes, number, percent, roughly, seconds, visible, whole } from "../shell/format.js";
import { stateOfJob } from "../shell/overview.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { chart } from "../widgets/chart.js";
import { changeName, nameOf } from "../widgets/name.js";
import { joined } from "../widgets/chart_series.js";
import { styleOf } from "../widgets/palette.js";
import { table } from "../widgets/table.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { path as LOGS } from "./logs.js";

const FAILED = "No step was made";
const BEGINNING = ["waiting", "starting", "restarting"];

/** Makes the list; `update` takes the job as `shell/overview.js` has it, and whether to say what is waited for. */
export function processList(context) {
  const sentence = element("p", { class: "waiting", role: "status", hidden: true });
  const first = element("a", { class: "waiting", href: "#/", hidden: true }, "See its loss and its progress");
  const list = table({ caption: "Processes", isStacked: true, keyOf: (worker) => worker.name, tone: (worker) => (worker.state === "failed" ? "bad" : worker.trouble ? "warn" : ""), columns: columns() });
  const logs = element("a", { href: context.link(LOGS, context.parameters) }, "Logs");
  const root = element("section", { class: "section", hidden: true }, element("div", { class: "section-head" }, element("h2", {}, "Processes"), element("span", { class: "spacer" }), logs), sentence, first, list.element);
  return {
    element: root,
    update(job, now, isAwaited = false) {
      setAttribute(root, "hidden", !job || (job.workers.length === 0 && !isAwaited));
      if (!job) return;
      setAttribute(sentence, "hidden", !isAwaited);
      const tuned = isAwaited ? fineTuningOf(job, context.overview()) : null;
      setAttribute(first, "hidden", tuned === null);
      if (tuned) setAttribute(first, "href", context.link("/jobs/{job}/runs/{run}", tuned));
      const text = tuned ? `Supervised fine-tuning comes first: ${progressOf(tuned)}. Rollouts begin after it.` : isAwaited ? awaited(job, now, context.parameters.run) : "";
      setAttribute(sentence, "data-tone", text.startsWith(FAILED) ? "bad" : null);
      setText(sentence, visible(text, 1000));
      setAttribute(list.element, "hidden", job.workers.length === 0);
      list.update(job.workers.map((worker) => ({ ...worker, now })));
    },
  };
}

const USAGE = "/jobs/{job}/usage";
const FIGURES = [["cpu", "CPU", "cores", number], ["memory", "Memory", "", bytes], ["gpu_memory", "GPU memory", "", bytes], ["gpu", "GPU in use", "", percent]];

/** Makes the curves of what the processes of a job take of their machine: a colour is a process. */
export function usageCharts(context) {
  const group = new ZoomGroup();
  const grid = element("div", { class: "charts" });
  const root = element("section", { class: "section", hidden: true }, element("h2", {}, "What they take"), grid);
  const charts = new Map();
  let answer = null;

  function make([figure, title, unit, format]) {
    charts.set(figure, chart({ title, unit, format, group, help: "Of each process with those that it started" }));
    return charts.get(figure).element;
  }

  return {
    element: root,
    async update() {
      const next = await context.get(fill(USAGE, context.parameters));
      if (next === answer) return;
      answer = next;
      const names = [...new Set(answer.series.map(({ name }) => name))];
      const shown = FIGURES.filter(([figure]) => answer.series.some((one) => one.figure === figure));
      setAttribute(root, "hidden", shown.length === 0);
      keep(grid, shown, ([figure]) => figure, make);
      const times = answer.series.flatMap(({ time }) => [time[0], time[time.length - 1]]);
      group.setExtent(times.length > 0 ? [Math.min(...times), Math.max(...times)] : null);
      for (const [figure] of shown) {
        const found = answer.series.filter((one) => one.figure === figure);
        const { x, columns } = joined(found.map(({ time, value }) => ({ x: time, columns: [value] })));
        charts.get(figure).update({ x, axis: "time", curves: found.map(({ name }, index) => ({ key: name, label: name, style: styleOf(names.indexOf(name)), mean: columns[index][0] })) });
      }
    },
    destroy() {
      for (const one of charts.values()) one.destroy();
    },
  };
}

/** What the first step of a run waits for, or why there will be none. Other runs, tracking and this page are nothing to it. */
function awaited(job, now, run) {
  const needed = job.workers.filter(({ name }) => name === `orchestrator_${run}` || !/^(orchestrator_.*|tracking|serve)$/s.test(name));
  const failed = needed.find((worker) => worker.state === "failed");
  if (failed) return `${FAILED}: ${failed.name} failed: ${saidBy(failed)}`;
  if (!job.running) return `No process of this job runs: it is ${stateOfJob(job)}, and no step was made.`;
  const first = needed.find((worker) => BEGINNING.includes(worker.state));
  return first ? `The first step waits for ${first.name}, ${first.state} for ${seconds(Math.round(Math.max(0, now - first.since)))}${saidBy(first) && ": "}${saidBy(first)}` : "Every process is ready. Curves begin with the first step.";
}

/** The run of the fine-tuning with which a job begins, while that goes on. */
function fineTuningOf(job, overview) {
  if (!job.runs.some((run) => run.state === "fine-tuning")) return null;
  return overview.jobs.find((one) => one.directory === `${job.directory}/sft`)?.runs[0] ?? null;
}

function progressOf({ step, steps, loss, seconds_left: left }) {
  const parts = [`step ${whole(step)}${steps ? ` of ${whole(steps)}` : ""}`, loss !== null && `loss ${number(loss, 3)}`, left !== null && `${roughly(left)} left`];
  return parts.filter(Boolean).join(", ");
}

/** The last that a process says of itself; of one that died, how, and the last line of its output. */
function saidBy(worker) {
  const death = [worker.last_death, worker.last_output].filter(Boolean).join(": ");
  const isDead = ["failed", "exited", "restarting"].includes(worker.state);
  return (isDead && death) || worker.trouble || worker.status || death;
}

function columns() {
  return [
    { key: "name", title: "Process", width: 190, value: (worker) => worker.name, change: (cell, worker) => { if (!cell.firstChild) cell.append(nameOf()); setAttribute(cell, "title", visible(worker.name, 200)); changeName(cell.firstChild, worker.name); } },
    { key: "state", title: "State", width: 110, value: (worker) => worker.state, change: (cell, worker) => { if (!cell.firstChild) cell.append(badge("")); changeBadge(cell.firstChild, worker.state); } },
    { key: "says", title: "Says", wide: true, least: 260, value: saidBy, cell: (worker) => visible(saidBy(worker), 600) },
    { key: "since", title: "Since", width: 104, number: true, value: (worker) => worker.since, cell: (worker) => ago(worker.since, worker.now) },
    { key: "restarts", title: "Restarts", width: 80, number: true, value: (worker) => worker.restarts, cell: (worker) => whole(worker.restarts) },
  ];
}
