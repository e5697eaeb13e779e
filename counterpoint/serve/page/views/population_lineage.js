// The lanes of a population: one a trial over its iterations, in cells coloured by a value, and arrows from the trials that were copied
// to those that copied them.
import { element } from "../shell/dom.js";
import { number, visible, whole } from "../shell/format.js";
import { drawing, scaleOf, titled } from "../widgets/drawing.js";

const [WIDTH, LANE, LEFT, TOP] = [1000, 18, 150, 22];
const LEVELS = 7;
const MOST_LANES = 100;
const CELLS = 120;

/** Draws the lanes of `answer` (of `/population`), coloured by the parameter of that name, or by the score (""). */
export function lineage(answer, parameter) {
  const trials = answer.trials.slice(-MOST_LANES);
  const longest = trials.reduce((most, trial) => Math.max(most, trial.iteration), 1);
  const place = (iteration) => LEFT + ((WIDTH - LEFT - 8) * Math.min(Math.max(iteration, 0), longest)) / longest;
  const index = answer.parameters.indexOf(parameter);
  const cells = trials.map((trial) => (index < 0 ? scoreCells(trial, longest) : valueCells(trial, index)));
  const scale = scaleOf(cells.flat().map((cell) => cell.value));
  const words = scale.least === null ? [...new Set(cells.flat().map((cell) => cell.text))].sort() : [];
  const levelOf = (cell) => (scale.least !== null ? levelAt(scale.at(cell.value)) : words.indexOf(cell.text) % LEVELS);
  const lanes = new Map(trials.map((trial, lane) => [trial.trial_id, TOP + lane * LANE]));
  const height = TOP + trials.length * LANE + 8;
  const svg = drawing("svg", { class: "lineage", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": describe(answer, trials, parameter) },
    axis(longest, place),
    trials.map((trial, lane) => laneOf(trial, TOP + lane * LANE, cells[lane], place, levelOf, trial.trial_id === answer.best)),
    answer.copies.map((copy) => arrow(copy, lanes, place)));
  if (trials.length === 0) return element("p", { class: "empty" }, "No trial has begun.");
  return element("div", {}, svg, legend(scale, words, parameter || answer.metric), answer.trials.length > trials.length && element("p", { class: "muted" }, `The newest ${MOST_LANES} of ${whole(answer.trials.length)} trials are drawn.`));
}

/** One cell for each stretch with the same values. */
function valueCells(trial, index) {
  return trial.values.map((values, at) => ({ from: values.iteration, to: trial.values[at + 1]?.iteration ?? trial.iteration, value: values.numbers[index], text: values.texts[index] })).filter((cell) => cell.to > cell.from);
}

/** At most `CELLS` cells of the score, each its last one. */
function scoreCells(trial, longest) {
  const size = Math.max(1, Math.ceil(longest / CELLS));
  const cells = new Map();
  trial.iterations.forEach((iteration, at) => cells.set(Math.floor((iteration - 1) / size), trial.scores[at]));
  return [...cells].map(([cell, score]) => ({ from: cell * size, to: (cell + 1) * size, value: score, text: number(score) }));
}

function laneOf(trial, y, cells, place, levelOf, isBest) {
  const name = drawing("text", { x: LEFT - 8, y: y + LANE / 2, class: "lane-name", "text-anchor": "end", "dominant-baseline": "central" }, `${isBest ? "★ " : ""}${visible(trial.trial_id, 20)}`);
  const boxes = cells.map((cell) => drawing("rect", { x: place(cell.from), y: y + 2, width: Math.max(1, place(cell.to) - place(cell.from)), height: LANE - 4, rx: 1, class: "lane-cell", "data-level": levelOf(cell) }, titled(`${visible(trial.trial_id, 64)}, iteration ${whole(cell.from)} to ${whole(cell.to)}: ${visible(cell.text, 60)}`)));
  return drawing("g", {}, name, boxes);
}

function arrow(copy, lanes, place) {
  const [from, to] = [lanes.get(copy.source), lanes.get(copy.trial)];
  if (from === undefined || to === undefined) return null;
  const [x1, y1, x2, y2] = [place(copy.source_iteration), from + LANE / 2, place(copy.iteration), to + LANE / 2];
  const bend = x2 + 10;
  const side = y2 > y1 ? -1 : 1;
  return drawing("g", { class: "lane-copy" }, titled(`${visible(copy.trial, 64)} copied ${visible(copy.source, 64)} at iteration ${whole(copy.iteration)}`),
    drawing("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}` }), drawing("path", { class: "lane-head", d: `M${x2 - 3.5} ${y2 + 5 * side}L${x2} ${y2}L${x2 + 3.5} ${y2 + 5 * side}Z` }));
}

function axis(longest, place) {
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * longest));
  return [...new Set(ticks)].map((tick) => drawing("text", { x: place(tick), y: 12, class: "lane-axis", "text-anchor": tick === longest ? "end" : "middle" }, whole(tick)));
}

function levelAt(share) {
  return share === null ? "none" : Math.min(LEVELS - 1, Math.floor(share * LEVELS));
}

function legend(scale, words, name) {
  if (scale.least === null) return element("p", { class: "lane-legend muted" }, `${visible(name, 60)}: `, words.slice(0, LEVELS).map((word, level) => [swatch(level), element("bdi", {}, visible(word, 30))]));
  return element("p", { class: "lane-legend muted" }, `${visible(name, 60)}: ${number(scale.least)} `, Array.from({ length: LEVELS }, (_, level) => swatch(level)), ` ${number(scale.greatest)}${scale.isLog ? " (logarithmic)" : ""}`);
}

function swatch(level) {
  return element("span", { class: "lane-swatch", dataset: { level: String(level) } });
}

function describe(answer, trials, parameter) {
  const copies = answer.copies.slice(-10).map((copy) => `${copy.trial} copied ${copy.source} at ${copy.iteration}`).join("; ");
  return visible(`${trials.length} trials coloured by ${parameter || answer.metric}. ${answer.copies.length} copies${copies ? `, the newest: ${copies}` : ""}.`, 900);
}
