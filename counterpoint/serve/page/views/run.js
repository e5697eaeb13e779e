// A run: its newest numbers, what is wrong with it, and its curves, alone or over those of other runs.
import { fill } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { ago, count, number, roughly, seconds, visible, whole } from "../shell/format.js";
import { WORDS } from "../shell/words.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { figures } from "../widgets/figures.js";
import { fold } from "../widgets/fold.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { chartControls } from "./chart_controls.js";
import { chartGrid } from "./chart_grid.js";
import { showConfiguration } from "./configuration_dialog.js";
import { Curves } from "./curves.js";
import { problemList } from "./problems.js";
import { processList } from "./processes.js";
import { runActions } from "./run_actions.js";
import { verification } from "./verification.js";

export const title = "Run";
export const path = "/jobs/{job}/runs/{run}";
export const key = "r";

/** Draws the view. */
export function render(root, context) {
  const { job, run } = context.parameters;
  const state = badge("");
  const updated = element("span", { class: "muted" });
  const configuration = element("button", { type: "button", class: "button small", disabled: true, title: "The configuration that the run has", on: { click: () => compareConfigurations() } }, "Configuration");
  const actions = runActions(context);
  const verified = verification(context);
  const buttons = fold("Actions", () => false, element("div", { class: "actions" }, configuration, verified.button, actions.element));
  const problems = problemList(context, { isOfOneRun: true });
  const processes = processList(context);
  const numbers = figures("Newest numbers");
  const controls = chartControls(context, { onChange: () => draw(), onRuns: () => context.refresh() });
  for (const part of [numbers.element, controls.element]) setAttribute(part, "hidden", true); // until there is something to show
  const unreadable = element("p", { class: "empty", hidden: true });
  const group = new ZoomGroup(() => context.refresh());
  const grid = chartGrid({ group, controls, onNames: () => context.refresh() });
  const curves = new Curves();
  const began = new Map();
  let axis = controls.axis();
  let runs = [];
  let detail = null;
  root.append(element("div", { class: "view-title" }, element("h1", {}, element("bdi", {}, visible(run, 64))), state, verified.mark, updated, element("span", { class: "spacer" }), buttons.element), problems.element, processes.element, numbers.element, controls.element, unreadable, grid.element);

  /** Shows the run's configuration, and where those of the runs beside it differ. A run that is gone is left out. */
  async function compareConfigurations() {
    const others = runs.slice(1);
    const answers = await Promise.allSettled(others.map((other) => context.get(fill(path, other))));
    showConfiguration(run, detail, answers.flatMap(({ value }, index) => (value ? [{ label: others[index].label, configuration: value.configuration }] : [])));
  }

  function draw() {
    if (controls.axis() !== axis) {
      axis = controls.axis();
      group.reset(); // which also asks for the curves over the new axis
      return;
    }
    grid.draw({ available: detail?.metrics ?? [], runs, curves, began, axis });
    setText(unreadable, curves.unreadable.map((text) => visible(text, 300)).join("; "));
    setAttribute(unreadable, "hidden", curves.unreadable.length === 0);
  }

  function showRun() {
    const now = Date.now() / 1000;
    const found = detail.run;
    problems.update(detail.problems, now);
    changeBadge(state, found.state);
    setText(updated, found.updated ? `newest step ${ago(found.updated, now)}` : "no step yet");
    setAttribute(configuration, "disabled", false);
    const shown = context.overview()?.jobs.find((one) => one.job === job);
    const hasCurves = detail.metrics.length > 0;
    const hasSteps = found.step > 0 || found.trained > 0;
    processes.update(hasSteps ? null : shown, now, true);
    setAttribute(numbers.element, "hidden", !hasSteps);
    for (const part of [controls.element, grid.element]) setAttribute(part, "hidden", !hasCurves);
    numbers.update(figuresOf(found));
    verified.update(found.alive);
    actions.update(found, !found.fine_tuning && (found.alive || (Boolean(shown?.running) && !["done", "fine-tuning"].includes(found.state))));
  }

  /** Notes when each run began and how far all reach, which zoomed curves do not say. */
  function noteExtent() {
    for (const one of runs) {
      const times = [...curves.series.entries()].filter(([key]) => key.startsWith(JSON.stringify([one.job, one.run]).slice(0, -1))).map(([, { x }]) => x[0]).filter((x) => x !== undefined);
      if (axis !== "step" && times.length > 0) began.set(`${one.job}/${one.run}`, Math.min(...times));
    }
    const extent = curves.extent();
    const first = began.get(`${job}/${run}`) ?? 0;
    group.setExtent(extent && axis === "elapsed" ? [0, extent[1] - first] : extent);
  }

  return {
    async update() {
      await actions.load();
      const next = await context.get(fill(path, { job, run }));
      const isNew = next !== detail;
      detail = next;
      showRun();
      const others = controls.others();
      const areSame = runs.length === others.length + 1 && others.every((other, index) => other.job === runs[index + 1].job && other.run === runs[index + 1].run);
      runs = [{ job, run, label: visible(run, 200) }, ...others];
      const first = began.get(`${job}/${run}`) ?? 0;
      const range = group.range && (axis === "elapsed" ? group.range.map((x) => x + first) : group.range);
      const names = grid.names(detail.metrics);
      const changed = names.length > 0 && (await curves.fetch(context, runs, names, { axis, range }));
      if (changed && !range) noteExtent();
      if (changed) group.setMarks(marksOf(curves.annotations.filter((one) => one.job === job && one.run === run), axis, first));
      if (changed || isNew || !areSame) draw();
    },
    destroy() {
      grid.destroy();
      buttons.destroy();
    },
  };
}

/** The newest numbers of a run. Of a fine-tuning there are only those that training has. */
function figuresOf(run) {
  const step = { name: "Step", value: whole(run.step), unit: run.steps > 0 ? `of ${whole(run.steps)}` : "", help: "An update of the weights; one counts from the moment when its rollouts are complete" };
  const times = [{ name: "Median step", value: seconds(run.seconds_a_step), unit: visible(run.balance, 120), help: "The median of the newest steps" }, ...(run.alive ? [{ name: "Time left", value: roughly(run.seconds_left) }] : [])];
  if (run.fine_tuning) return [{ ...step, help: "An update of the weights" }, { name: "Loss", value: number(run.loss, 3), help: "Of the newest step" }, ...times];
  return [
    step,
    { name: "Reward", value: number(run.reward, 3), help: "Mean of the newest step" },
    ...(run.evaluation ? [{ name: visible(run.evaluation.split(" ")[0], 20), value: number(run.evaluated, 3), help: "The newest result of the first evaluation" }] : []),
    { name: "Tokens generated", value: count(run.tokens_per_second), unit: "/s", help: "Completion tokens a second, over the newest ten steps" },
    { name: "Staleness", value: number(run.staleness, 3), unit: run.staleness_lossless ? `steps; none lost at ${whole(run.staleness_lossless)}` : "steps", help: `${WORDS.staleness}. None lost: with this max_off_policy_steps no rollout would be too old to be trained` },
    { name: "Mismatch KL", value: number(run.mismatch_kl, 3), help: "Of the log-probabilities of inference against those of the trainer: near 0 is good" },
    { name: "Loop lag p99", value: seconds(run.lag_p99), help: "How late the orchestrator's event loop was in the newest step" },
    ...times,
  ];
}

function marksOf(annotations, axis, first) {
  return annotations.filter(({ x }) => x !== null).map(({ x, kind, text }) => ({ x: axis === "elapsed" ? x - first : x, text: kind === "change" ? `changed ${text}` : text }));
}
