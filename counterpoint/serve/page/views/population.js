// An experiment of `counterpoint tune`: its trials as lanes over the iterations, coloured by a hyperparameter, with an arrow for each
// copy of one trial by another; their scores as curves; and a table.
import { fill } from "../shell/api.js";
import { element, keep, setChildren, setText } from "../shell/dom.js";
import { ago, number, seconds, visible, whole } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { chart } from "../widgets/chart.js";
import { joined } from "../widgets/chart_series.js";
import { styleOf } from "../widgets/palette.js";
import { table } from "../widgets/table.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { lineage } from "./population_lineage.js";

export const title = "Population";
export const path = "/jobs/{job}/population";
export const key = "n";
export const kinds = ["experiment"];

const MOST_CURVES = 32;

/** Draws the view. */
export function render(root, context) {
  const summary = element("span", { class: "muted" });
  const name = element("bdi", {}, visible(context.parameters.job, 64));
  const problems = element("ul", { class: "notes" });
  const colour = element("select", { "aria-label": "Colour the lanes by", on: { change: () => shown && draw(shown) } });
  const lanes = element("div", { class: "lineage-box" });
  const scores = chart({ title: "Score", help: "The metric of each trial's results", group: new ZoomGroup(), isWide: true, height: 220 });
  const note = element("p", { class: "muted" });
  let shown = null;
  let list = null;
  const tableBox = element("div", {});
  root.append(element("div", { class: "view-title" }, element("h1", {}, name), summary), problems,
    element("section", { class: "section" }, element("div", { class: "section-head" }, element("h2", {}, "Lineage"), colour), lanes),
    element("section", { class: "section charts" }, scores.element), note, element("section", { class: "section" }, element("h2", {}, "Trials"), tableBox));

  function draw(answer) {
    setText(name, visible(answer.name, 64));
    const counts = answer.counts.map((one) => `${whole(one.count)} ${one.status.toLowerCase()}`).join(", ");
    const written = answer.written === null ? "it has not begun" : `written ${ago(answer.written, Date.now() / 1000)}`;
    setText(summary, `${visible(counts, 200) || "no trial yet"} · ${visible(answer.metric, 60)}, ${answer.mode === "min" ? "less is better" : "more is better"} · ${written}${answer.is_complete ? "" : " · reading the results"}`);
    keep(problems, answer.problems, (text) => text, (text) => element("li", {}, visible(text, 300)));
    const options = [["", "Score"], ...answer.parameters.map((one) => [one, one])];
    keep(colour, options, ([value]) => value, ([value]) => element("option", { value }), (option, [, text]) => setText(option, visible(text, 60)));
    setChildren(lanes, lineage(answer, colour.value));
    drawScores(answer);
    list ??= makeTable(answer.parameters);
    setChildren(tableBox, list.element);
    list.update(answer.trials.map((trial) => ({ ...trial, isBest: trial.trial_id === answer.best })));
  }

  function drawScores(answer) {
    const trials = answer.trials.filter((trial) => trial.iterations.length > 0).slice(-MOST_CURVES);
    const { x, columns } = joined(trials.map((trial) => ({ x: trial.iterations, columns: [trial.scores] })));
    scores.update({ x, axis: "step", curves: trials.map((trial, index) => ({ key: trial.trial_id, label: trial.trial_id, style: styleOf(index), mean: columns[index][0] })) });
    setText(note, answer.trials.length > trials.length && trials.length === MOST_CURVES ? `The curves are of the newest ${MOST_CURVES} trials.` : "");
  }

  return {
    async update() {
      const answer = await context.get(fill(path, context.parameters));
      if (answer === shown) return;
      if (list && shown?.parameters.join() !== answer.parameters.join()) list = null;
      shown = answer;
      draw(answer);
    },
    destroy() {
      scores.destroy();
    },
  };
}

function makeTable(parameters) {
  const now = (trial) => trial.values[trial.values.length - 1];
  return table({
    caption: "Trials",
    keyOf: (trial) => trial.trial_id,
    tone: (trial) => (trial.status === "ERROR" ? "bad" : ""),
    empty: "No trial yet. Trials appear when the tuner has proposed them.",
    columns: [
      { key: "trial", title: "Trial", value: (trial) => trial.trial_id, cell: (trial) => `${visible(trial.trial_id, 64)}${trial.isBest ? " ★ best" : ""}` },
      { key: "status", title: "State", value: (trial) => trial.status, change: (cell, trial) => changeStatus(cell, trial) },
      { key: "error", title: "Last error", wide: true, value: (trial) => trial.error, cell: (trial) => visible(trial.error, 160) },
      { key: "score", title: "Score", number: true, value: (trial) => trial.score, cell: (trial) => number(trial.score) },
      { key: "iteration", title: "Iteration", number: true, value: (trial) => trial.iteration, cell: (trial) => whole(trial.iteration) },
      ...parameters.map((one, index) => ({ key: `parameter ${one}`, title: visible(one.split(/[./]/).pop(), 24), help: visible(one, 200), number: true, value: (trial) => now(trial).numbers[index] ?? now(trial).texts[index], cell: (trial) => (now(trial).numbers[index] === null ? visible(now(trial).texts[index], 40) : number(now(trial).numbers[index])) })),
      { key: "copied", title: "Copied", help: "The trial whose state it took over last", value: (trial) => trial.copied_from, cell: (trial) => visible(trial.copied_from, 64) },
      { key: "seconds", title: "Trained", number: true, value: (trial) => trial.seconds, cell: (trial) => seconds(trial.seconds) },
      { key: "failures", title: "Failures", number: true, value: (trial) => trial.failures, cell: (trial) => whole(trial.failures) },
    ],
  });
}

function changeStatus(cell, trial) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, trial.status.toLowerCase(), { RUNNING: "good", TERMINATED: "idle", ERROR: "bad", PAUSED: "busy", PENDING: "busy" }[trial.status]);
}
