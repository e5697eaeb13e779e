// Fetches the curves of one or several runs, of one or several jobs, and turns them into what charts draw: over steps, time or elapsed
// time, smoothed or not. Of several runs a colour is a run, and a dash a metric.
import { fill } from "../shell/api.js";
import { joined, smoothed } from "../widgets/chart_series.js";
import { styleOf } from "../widgets/palette.js";

const METRICS = "/jobs/{job}/metrics";
const POINTS = 400;
const POINTS_ZOOMED = 1200;
const MOST_METRICS = 32;
const MOST_CURVES = 128;

/** The curves of some runs: those of several answers of the server, which takes only so many of them at once. */
export class Curves {
  constructor() {
    this.answers = [];
    this.series = new Map();
    this.annotations = [];
    this.unreadable = [];
  }

  /**
   * Gets curves.
   *
   * @param {Object} context - The view's.
   * @param {Array<{job: string, run: string}>} runs
   * @param {string[]} metrics
   * @param {{axis: string, range: number[]|null}} part - Of the curves; `range` is in the axis' unit, null for all of it.
   * @returns {Promise<boolean>} Whether anything has changed.
   */
  async fetch(context, runs, metrics, { axis, range }) {
    const options = { x: axis === "step" ? "step" : "time", points: range ? POINTS_ZOOMED : POINTS, ...(range ? around(range) : {}) };
    const answers = await Promise.all(questions(runs, metrics).map((question) => ask(context, question, options)));
    if (answers.length === this.answers.length && answers.every(({ answer }, index) => answer === this.answers[index])) return false;
    this.answers = answers.map(({ answer }) => answer);
    this.series = new Map(answers.flatMap(({ job, answer }) => answer.series.map((one) => [keyOf(job, one.run, one.metric), one])));
    this.annotations = answers.flatMap(({ job, answer }) => answer.annotations.map((one) => ({ ...one, job })));
    this.unreadable = [...new Set(answers.flatMap(({ answer }) => answer.unreadable))];
    return true;
  }

  /** A curve; undefined if it was not asked for. */
  get(job, run, metric) {
    return this.series.get(keyOf(job, run, metric));
  }

  /** The least and the greatest x of all curves; null without any. */
  extent() {
    let extent = null;
    for (const { x } of this.series.values()) {
      if (x.length === 0) continue;
      extent = extent ? [Math.min(extent[0], x[0]), Math.max(extent[1], x[x.length - 1])] : [x[0], x[x.length - 1]];
    }
    return extent;
  }
}

/**
 * What a chart draws.
 *
 * @param {{metrics: Array<{name: string, label: string}>}} spec
 * @param {Array<{job: string, run: string, label: string}>} runs
 * @param {Curves} curves
 * @param {{axis: string, smoothing: number, began: Map<string, number>, isLogX: boolean}} options - `began` is each run's first time, for `elapsed`.
 */
export function chartData(spec, runs, curves, { axis, smoothing, began, isLogX = false }) {
  const parts = [];
  const found = [];
  const isOfRuns = runs.length > 1;
  for (const [place, { job, run, label }] of runs.entries()) {
    for (const [index, metric] of spec.metrics.entries()) {
      const one = curves.get(job, run, metric.name);
      if (!one || one.x.length === 0) continue;
      const [low, high] = intervalOf(metric, one, (name) => curves.get(job, run, name));
      const hasBand = low !== undefined && spec.metrics.length * runs.length <= 4;
      const isRaw = smoothing > 0 && !hasBand && runs.length <= 4;
      parts.push({ x: axis === "elapsed" ? elapsed(one.x, began.get(`${job}/${run}`) ?? one.x[0]) : one.x, columns: [smoothed(metric.name.endsWith("/max") ? one.high : one.mean, smoothing), hasBand ? low : undefined, hasBand ? high : undefined, isRaw ? one.mean : undefined] });
      const name = isOfRuns ? (spec.metrics.length > 1 ? `${label} · ${metric.label}` : label) : metric.label;
      found.push({ key: `${job}/${run}/${metric.name}`, label: name, style: isOfRuns ? styleOf(place, index) : styleOf(index) });
    }
  }
  const { x, columns } = joined(parts);
  for (const [index, curve] of found.entries()) [curve.mean, curve.minimum, curve.maximum, curve.raw] = columns[index];
  return { ...(isLogX ? positive(x, found) : { x, curves: found }), axis, isLogX };
}

/** The points that a logarithmic x has a place for. */
function positive(x, curves) {
  const first = x.findIndex((at) => at > 0);
  const cut = (values) => values?.slice(first < 0 ? values.length : first);
  return { x: cut(x), curves: curves.map((curve) => ({ ...curve, ...Object.fromEntries(["mean", "minimum", "maximum", "raw"].map((name) => [name, cut(curve[name])])) })) };
}

/** The ends of a curve's band: those of the metric's own interval, or of the points that one drawn point stands for. */
function intervalOf(metric, one, curveOf) {
  const ends = metric.low ? [curveOf(metric.low), curveOf(metric.high)] : [];
  if (ends.length > 0 && ends.every((end) => end?.x.length === one.x.length)) return ends.map((end) => end.mean);
  return one.exact ? [undefined, undefined] : [one.low, one.high];
}

async function ask(context, { job, run, metric, isOptional }, options) {
  try {
    return { job, answer: await context.get(fill(METRICS, { job }), { run, metric, ...options }) };
  } catch (error) {
    if (isOptional && error.status === 404) return { job, answer: NOTHING };
    throw error;
  }
}

const NOTHING = { series: [], annotations: [], unreadable: [] };

/** Divides what is wanted into questions that the server answers: of one job each, and of so many curves. */
function questions(runs, metrics) {
  const jobs = new Map();
  for (const { job, run } of runs) jobs.set(job, [...(jobs.get(job) ?? []), run]);
  const found = [];
  for (const [job, run] of jobs) {
    const most = Math.max(1, Math.min(MOST_METRICS, Math.floor(MOST_CURVES / run.length)));
    for (let index = 0; index < metrics.length; index += most) found.push({ job, run, metric: metrics.slice(index, index + most), isOptional: job !== runs[0].job });
  }
  return found;
}

function keyOf(job, run, metric) {
  return JSON.stringify([job, run, metric]);
}

function elapsed(x, began) {
  return x.map((time) => time - began);
}

/** A range with as much again to either side, so that moving it shows something at once. */
function around([first, last]) {
  const margin = last - first;
  return { x_from: first - margin, x_to: last + margin };
}
