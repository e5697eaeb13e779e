// Which charts a run's metrics make: those that everybody looks at first, and then every other metric in a section by the first
// part of its name. The names are those of docs/contracts.md and docs/training.md. Nothing here draws.
import { WORDS } from "../shell/words.js";
import { bytes, count, number, percent, seconds } from "../shell/format.js";

/** The charts at the top. `names` are metrics by name, `pattern` finds them and its group is the curve's label. */
export const FIRST = [
  { title: "Reward", names: ["reward/mean"], help: "Mean over the completed rollouts of a step" },
  { title: "Reward by environment", pattern: /^reward\/([^/]+)\/mean$/, help: "Mean over the environment's rollouts" },
  { title: "Mismatch KL", names: ["mismatch_kl"], help: "KL of inference against trainer: staleness, precision, truncated sampling" },
  { title: "Entropy", unit: "nats", names: ["entropy"], help: "Of the trainer's distributions of the trained tokens" },
  { title: "Loss", names: ["loss"], help: "What the optimizer makes smaller" },
  { title: "Gradient norm", names: ["grad_norm"], help: "Before clipping" },
  { title: "Staleness", unit: "steps", names: ["staleness/mean", "staleness/max", "staleness/allowed", "staleness/lossless"], help: `${WORDS.staleness}. Allowed: max_off_policy_steps, which "auto" raises. Lossless: the max_off_policy_steps that none would exceed` },
  { title: "Tokens generated per second", names: ["completion_tokens_per_second"], help: "Completion tokens over time, of the ten steps up to each" },
  { title: "Tokens trained per second", names: ["tokens_per_second"], help: "Tokens of the batch, prompts too, over the time in which it was trained" },
  { title: "Time of a step", names: ["seconds_a_step"], help: "Between two steps of the orchestrator" },
  { title: "Loop lag", names: ["event_loop_lag/p99", "event_loop_lag/max"], help: "How late the orchestrator's event loop was in a step" },
  { title: "Rollouts that are not trained", names: ["rollouts/failed", "rollouts/filtered", "rollouts/cancelled"], help: "Of a step: failed ones, those that a filter left out since they would teach nothing, and those that were no longer wanted" },
  { title: "Learning rate", names: ["learning_rate"] },
];

/** A metric of an evaluation over all its environments; `/low` and `/high` after it are the ends of its 95 % interval. */
const EVALUATED = /^evaluation\/([^/]+)\/(reward\/mean|pass@\d+)$/;
const MOST_EVALUATED = 6;

/** The mean reward of the turns of a number, or of a range of numbers, in an environment. */
const OF_TURNS = /^reward\/([^/]+)\/turn\/([^/]+)\/mean$/;

/** The words of a section, by the first part of its metrics' names: a map, since a name may be `constructor`. */
const SECTIONS = new Map(Object.entries({
  batch: "Batch", environment: "Environments", evaluation: "Evaluations", event_loop_lag: "Event loop: lag", event_loop_late: "Event loop: late moments",
  examples: "Examples", failures: "Failures", filters: "Filters", importance_ratio: "Importance ratio", inference: "Inference", inflight: "In flight",
  memory: "Memory", mismatch_kl: "Mismatch KL", phase: "Phases", policy: "Policy", reward: "Reward", rollouts: "Rollouts", staleness: "Staleness", tokens: "Tokens",
}));
const NO_CURVES = new Set(["step", "time", "run_id"]);

/** How the values of a metric read, and in which unit its axis is. */
export function formatOf(name) {
  if (name === "seconds_a_step" || /^event_loop_lag\/(?!n$)|^event_loop_late\/(?!n$)|^phase\/|seconds$|\/lag\/max$/.test(name)) return seconds;
  if (/bytes$/.test(name)) return bytes;
  if (/share$|pass_rate$/.test(name)) return percent;
  if (/^tokens|^batch\/|tokens/.test(name)) return count;
  return number;
}

/**
 * The charts of the metrics that a run has.
 *
 * @param {string[]} available
 * @returns {{first: Array<Object>, sections: Array<{key: string, title: string, charts: Array<Object>}>}} Each chart has `key`,
 *   `title`, `unit`, `help`, `format` and `metrics`, a list of `{name, label}`, and of `{low, high}` where an interval has metrics.
 */
export function chartsOf(available) {
  const names = available.filter((name) => !NO_CURVES.has(name));
  const used = new Set();
  const evaluated = evaluations(names);
  for (const { name, low, high } of evaluated.flatMap((chart) => chart.metrics)) for (const one of [name, low, high].filter(Boolean)) used.add(one);
  const first = FIRST.map((spec) => {
    const metrics = spec.pattern ? names.filter((name) => spec.pattern.test(name)).map((name) => ({ name, label: spec.pattern.exec(name)[1] })) : spec.names.map((name, index) => ({ name, label: spec.labels?.[index] ?? labelOf(name) })).filter(({ name }) => names.includes(name));
    for (const { name } of metrics) used.add(name);
    return { key: spec.title, unit: "", help: "", ...spec, format: formatOf(metrics[0]?.name ?? ""), metrics: metrics.slice(0, 16) };
  }).filter((chart) => chart.metrics.length > (chart.pattern ? 1 : 0));
  const ofTurns = rewardsOfTurns(names);
  for (const { name } of ofTurns.flatMap((chart) => chart.metrics)) used.add(name);
  first.splice(first.filter(({ title }) => title.startsWith("Reward")).length, 0, ...ofTurns);
  const sections = new Map();
  for (const name of names.filter((one) => !used.has(one)).sort((a, b) => a.localeCompare(b, "en", { numeric: true }))) {
    const [prefix, ...rest] = name.split("/");
    const key = rest.length > 0 ? prefix : "other";
    if (!sections.has(key)) sections.set(key, { key, title: SECTIONS.get(key) ?? (key === "other" ? "Other metrics" : inWords(key)), charts: [] });
    sections.get(key).charts.push({ key: name, title: rest.length > 0 ? rest.join("/") : name, unit: "", help: name, format: formatOf(name), metrics: [{ name, label: name }] });
  }
  return { first: [...evaluated, ...first], sections: [...sections.values()].sort((a, b) => (a.key === "other") - (b.key === "other") || a.title.localeCompare(b.title, "en")) };
}

/** The charts of evaluations, which come first: what is measured on examples that are not trained. */
function evaluations(names) {
  const found = names.map((name) => EVALUATED.exec(name)).filter((match) => match !== null);
  found.sort(([, name, metric], [, otherName, otherMetric]) => name.localeCompare(otherName, "en") || (metric === "reward/mean") - (otherMetric === "reward/mean") || metric.localeCompare(otherMetric, "en", { numeric: true }));
  return found.slice(0, MOST_EVALUATED).map(([name, evaluation, metric]) => {
    const label = metric === "reward/mean" ? "reward" : metric;
    const interval = { low: `${name}/low`, high: `${name}/high` };
    const metrics = [{ name, label, ...(Object.values(interval).every((end) => names.includes(end)) ? interval : {}) }];
    return { key: name, title: `${evaluation}: ${label}`, unit: "", help: "Of the evaluation, with its 95 % interval over the choice of examples", format: formatOf(name), metrics };
  });
}

/** A chart for each environment whose turns have rewards, with a curve for each number of a turn. */
function rewardsOfTurns(names) {
  const environments = new Map();
  for (const [name, environment, turn] of names.map((one) => OF_TURNS.exec(one)).filter((match) => match !== null)) environments.set(environment, [...(environments.get(environment) ?? []), { name, label: `turn ${turn}` }]);
  return [...environments].slice(0, MOST_EVALUATED).map(([environment, metrics]) => ({
    key: `turns of ${environment}`, title: `${environment}: reward by turn`, unit: "", help: "Mean over the turns of that number, in rollouts whose turns have rewards", format: number,
    metrics: metrics.sort((a, b) => a.label.localeCompare(b.label, "en", { numeric: true })),
  }));
}

/** A part of a metric's name as a heading: `masked_share` as `Masked share`. */
function inWords(part) {
  return (part.slice(0, 1).toUpperCase() + part.slice(1)).replaceAll("_", " ");
}

/** The last part of a metric's name, as a curve's label. */
function labelOf(name) {
  return name.split("/").pop();
}
