// What uPlot draws for the page's curves: for each, the line, its band between least and greatest, and faintly the values as they
// were before smoothing. The functions here are pure.
import { clock, number, seconds, whole } from "../shell/format.js";

/** What x may be: whether uPlot labels it as time, and how a tick and a point read. */
export const AXES = {
  step: { isTime: false, tick: (x) => (Number.isInteger(x) ? whole(x) : ""), label: (x) => `step ${whole(x)}`, title: "step" },
  time: { isTime: true, tick: timeTick, label: (x) => clock(x), title: "time" },
  elapsed: { isTime: false, steps: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000], tick: elapsedTick, label: (x) => `after ${seconds(x)}`, title: "after" },
};

/** Distances of two ticks of bytes, whose labels are in powers of two. */
export const BYTE_STEPS = Array.from({ length: 51 }, (_, power) => 2 ** power);

/** A value beside the axis: with as many decimals as the distance of two ticks needs, so that all have the same. */
export function tickOf(value, step, format) {
  let decimals = 0;
  while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  if (format === seconds && step < 60) return secondsTick(value, step);
  if (format !== number || Math.abs(value) >= 1e6) return format(value);
  if (decimals > 5) return value === 0 ? "0" : value.toExponential(2).replace(/\.?0+e/, "e").replaceAll("-", "−").replace("e+", "e");
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).replace("-", "−");
}

/** Seconds beside the axis: all in one unit, which the distance of two ticks decides. */
function secondsTick(value, step) {
  if (value === 0) return "0 s";
  const [factor, unit] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : [1e6, "µs"];
  return `${tickOf(value * factor, step * factor, number)} ${unit}`;
}

/** A moment beside the axis, as short as the distance of two ticks allows; a day's first one is its date. */
function timeTick(x, distance) {
  const moment = new Date(x * 1000);
  const time = moment.toLocaleTimeString("en-GB");
  const isDay = distance >= 86400 || (distance >= 60 && time === "00:00:00");
  return isDay ? moment.toLocaleDateString("en-CA").slice(5) : distance >= 60 ? time.slice(0, 5) : time;
}

/** Elapsed time beside the axis, in one unit as far as possible. */
function elapsedTick(x) {
  if (x < 60) return `${number(x)} s`;
  if (x < 3600) return `${number(x / 60)} min`;
  return x < 172800 ? `${number(x / 3600, 3)} h` : `${number(x / 86400, 3)} d`;
}

/** The columns for `uPlot.setData`, in the order of `seriesOf`; for a logarithmic axis with a gap for what has no logarithm. */
export function columnsOf(x, curves, isLog = false) {
  const columns = [];
  for (const curve of curves) {
    if (curve.minimum) columns.push(curve.maximum, curve.minimum);
    if (curve.raw) columns.push(curve.raw);
    columns.push(curve.mean);
  }
  return [x, ...(isLog ? columns.map((values) => values.map((value) => (value > 0 || value === undefined ? value : null))) : columns)];
}

/** The series and bands for uPlot's options. */
export function seriesOf(curves) {
  const series = [{}];
  const bands = [];
  for (const curve of curves) {
    const { stroke, band, faint, dash } = curve.style;
    if (curve.minimum) {
      bands.push({ series: [series.length, series.length + 1], fill: () => band() });
      for (let edge = 0; edge < 2; edge += 1) series.push({ stroke: "transparent", width: 0, points: { show: false } });
    }
    if (curve.raw) series.push({ stroke: () => faint(), width: 1, points: { show: false } });
    series.push({ label: curve.label, stroke: () => stroke(), width: 1.6, dash, points: { size: 4, fill: () => stroke(), stroke: () => stroke() } });
  }
  return { series, bands };
}

/** A curve's moving average, in which a value counts `weight` times as much a point later; without bias at the beginning. */
export function smoothed(values, weight) {
  if (!(weight > 0)) return values;
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (!isKnown(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/**
 * Brings curves with x of their own onto one x, as uPlot needs: the union of all.
 *
 * @param {Array<{x: number[], columns: Array<Array<number|null>|undefined>}>} parts
 * @returns {{x: number[], columns: Array<Array<Array<number|undefined|null>|undefined>>}} The columns of each part. `undefined` marks
 *   a point that only another curve has, across which uPlot draws; null is a gap.
 */
export function joined(parts) {
  if (parts.length === 0) return { x: [], columns: [] };
  if (parts.every((part) => part.x === parts[0].x)) return { x: parts[0].x, columns: parts.map((part) => part.columns) };
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((a, b) => a - b);
  const places = new Map(x.map((value, index) => [value, index]));
  const columns = parts.map((part) => {
    const at = part.x.map((value) => places.get(value));
    return part.columns.map((column) => {
      if (!column) return undefined;
      const spread = new Array(x.length).fill(undefined);
      for (let index = 0; index < at.length; index += 1) spread[at[index]] = column[index];
      return spread;
    });
  });
  return { x, columns };
}

/** The value at a point; at null, the newest that is known. Null if there is none. */
export function valueAt(values, index) {
  if (index !== null) return isKnown(values[index]) ? values[index] : null;
  for (let at = values.length - 1; at >= 0; at -= 1) if (isKnown(values[at])) return values[at];
  return null;
}

/** The index of the x that is nearest to a value, by bisection. */
export function nearest(x, value) {
  let [low, high] = [0, x.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - x[low - 1] < x[low] - value ? low - 1 : low;
}

/** What a screen reader says instead of the picture. */
export function describe(title, unit, data, format) {
  const name = unit ? `${title} in ${unit}` : title;
  if (data.x.length === 0) return `${name}: no values yet`;
  const parts = data.curves.slice(0, 8).map((curve) => {
    const known = curve.mean.filter(isKnown);
    if (known.length === 0) return `${curve.label} unknown`;
    const [least, greatest] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    return `${curve.label} now ${format(known[known.length - 1])}, from ${format(least)} to ${format(greatest)}`;
  });
  return `${name}: ${parts.join("; ")}. Arrow keys move, plus and minus zoom, 0 shows everything.`;
}

/** Whether a value is a number that can be drawn. */
export function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}
