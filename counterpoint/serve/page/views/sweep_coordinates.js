// Parallel coordinates of a sweep: an axis a key of the grid and one for the reward; each target is a line, coloured by its reward.
import { element } from "../shell/dom.js";
import { number, visible } from "../shell/format.js";
import { drawing, scaleOf, titled } from "../widgets/drawing.js";

const [WIDTH, HEIGHT, TOP, BOTTOM, SIDE] = [1000, 300, 34, 30, 70];
const MOST_LINES = 500;
const MOST_AXES = 9;
const LEVELS = 7;

/** Draws the targets of `answer` (of `/sweep`) that have a reward; null if there are too few values to draw. */
export function coordinates(answer) {
  const done = answer.targets.filter((target) => target.reward !== null).slice(0, MOST_LINES);
  if (answer.keys.length === 0 || done.length === 0) return null;
  const keys = answer.keys.slice(0, MOST_AXES - 1);
  const axes = [...keys.map((key, index) => axisOf(visible(key.split(".").pop(), 24), answer.targets, (target) => target.numbers[index], (target) => target.texts[index])), axisOf("reward", done, (target) => target.reward, (target) => number(target.reward))];
  const x = (index) => SIDE + ((WIDTH - 2 * SIDE) * index) / (axes.length - 1);
  const y = (share) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
  const lines = [...done].sort((a, b) => a.reward - b.reward).map((target) => line(target, axes, x, y));
  const svg = drawing("svg", { class: "coordinates", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${done.length} targets across ${keys.map((key) => visible(key, 60)).join(", ")} to their reward; the table below has the same values` }, lines, axes.map((axis, index) => drawAxis(axis, x(index), y)));
  return element("section", { class: "section" }, element("h2", {}, "Grid and result"), element("div", { class: "lineage-box" }, svg));
}

/** A numeric axis if all values are numbers, else one of words. */
function axisOf(name, targets, numberOf, textOf) {
  const numbers = targets.map(numberOf);
  if (numbers.every((value) => value !== null)) {
    const scale = scaleOf(numbers);
    const ends = scale.least === scale.greatest ? [[scale.least, 0.5]] : [[scale.least, 0], [scale.greatest, 1]];
    return { name, at: (target) => scale.at(numberOf(target)) ?? 0, ticks: ends.map(([value, share]) => [number(value), share]) };
  }
  const words = [...new Set(targets.map(textOf))].sort();
  const share = (word) => (words.length > 1 ? words.indexOf(word) / (words.length - 1) : 0.5);
  return { name, at: (target) => share(textOf(target)), ticks: words.slice(0, 12).map((word) => [visible(word, 16), share(word)]) };
}

function line(target, axes, x, y) {
  const places = axes.map((axis, index) => `${x(index)} ${y(axis.at(target))}`);
  const level = Math.min(LEVELS - 1, Math.floor(axes[axes.length - 1].at(target) * LEVELS));
  return drawing("path", { class: "coordinate-line", "data-level": level, d: `M${places.join("L")}` }, titled(`${visible(target.target, 64)}: reward ${number(target.reward)}`));
}

function drawAxis(axis, x, y) {
  return drawing("g", {}, drawing("path", { class: "coordinate-axis", d: `M${x} ${y(0)}L${x} ${y(1)}` }), drawing("text", { class: "lane-name", x, y: 14, "text-anchor": "middle" }, axis.name), axis.ticks.map(([text, share]) => drawing("text", { class: "lane-axis", x, y: y(share) + (share === 0 ? 16 : share === 1 ? -6 : 4), "text-anchor": "middle" }, text)));
}
