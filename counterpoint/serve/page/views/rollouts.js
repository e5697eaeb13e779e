// What the model wrote: the rollouts of a step, or of several, sorted and filtered by the server, and a search in their texts. A row
// opens the rollout turn by turn (views/rollout.js).
import { fill } from "../shell/api.js";
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { bytes, number, visible, whole } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { fold } from "../widgets/fold.js";
import { histogram } from "../widgets/histogram.js";
import { table } from "../widgets/table.js";
import { withoutEnd } from "./conversation.js";
import { rolloutSearch } from "./rollout_search.js";

export const title = "Rollouts";
export const path = "/jobs/{job}/runs/{run}/rollouts";
export const key = "w";

export const ROLLOUT = "/jobs/{job}/runs/{run}/steps/{step}/rollouts/{number}";
const LIMIT = 50;
const FILTERS = ["step", "environment", "outcome", "player", "least_reward", "most_reward", "text"];
const SORTS = [["newest", "Newest"], ["worst", "Worst"], ["best", "Best"], ["longest", "Longest"]];
/** The tones of outcomes; of any other it is `bad`. */
export const OUTCOME_TONES = { completed: "good", filtered: "warn", stale: "warn", dropped: "warn" };
const OUTCOMES = ["completed", "filtered", "stale", "dropped", "failed", "inference_failed", "damaged"];

/** Draws the view. */
export function render(root, context) {
  const wanted = { sort: "newest", span: "1", offset: 0, ...context.query };
  wanted.offset = Math.max(0, Number(wanted.offset) || 0);
  let shown = null;
  const steps = element("select", { "aria-label": "Step", on: { change: () => choose({ step: steps.value }) } });
  const span = choice("Steps", [["1", "1 step"], ["5", "5 steps"], ["20", "20 steps"]], wanted.span, (value) => choose({ span: value }));
  const sort = choice("Sort by", SORTS, wanted.sort, (value) => choose({ sort: value }));
  const outcome = choice("Outcome", [["", "Any outcome"], ...OUTCOMES.map((one) => [one, one.replace("_", " ")])], wanted.outcome ?? "", (value) => choose({ outcome: value }));
  const environment = choice("Environment", [["", "Any environment"]], "", (value) => choose({ environment: value }));
  const player = choice("Player", [["", "Any player"]], "", (value) => choose({ player: value }));
  const least = reward("Least reward", wanted.least_reward, (value) => choose({ least_reward: value }));
  const most = reward("Most reward", wanted.most_reward, (value) => choose({ most_reward: value }));
  const summary = element("p", { class: "muted", role: "status" });
  const problems = element("ul", { class: "notes" });
  const list = table({ caption: "Rollouts", columns: columns(context), keyOf: (entry) => `${entry.step}/${entry.number}`, tone: (entry) => (entry.outcome === "failed" || entry.outcome === "damaged" ? "bad" : ""), empty: "No rollout is kept that fits. Rollouts appear when a step is committed." });
  const rewards = histogram("Rewards", number);
  const lengths = histogram("Completion tokens", number);
  const before = pageButton("Previous", () => turn(-1));
  const after = pageButton("Next", () => turn(1));
  const search = rolloutSearch(context, () => ({ environment: wanted.environment, outcome: wanted.outcome, least_reward: wanted.least_reward, most_reward: wanted.most_reward, player: wanted.player }));
  const filters = fold("Filters and search", () => FILTERS.some((name) => wanted[name]), steps, span, sort, environment, outcome, player, least, most, search.form);
  root.append(
    element("div", { class: "view-title" }, element("h1", {}, "Rollouts")),
    filters.element,
    search.element,
    element("div", { class: "histograms" }, rewards.element, lengths.element),
    summary, problems, list.element, element("div", { class: "pager" }, before, after));

  function choose(changes) {
    Object.assign(wanted, { offset: 0 }, changes);
    context.setQuery(wanted);
    context.refresh();
  }

  function turn(way) {
    choose({ offset: Math.max(0, wanted.offset + way * LIMIT) });
  }

  function draw(answer) {
    fillOptions(steps, [["", "Newest step"], ...[...answer.steps].reverse().slice(0, 500).map((step) => [String(step), `Step ${whole(step)}`])], wanted.step ?? "");
    fillOptions(environment, [["", "Any environment"], ...answer.environments.map((one) => [one, visible(one, 40)])], wanted.environment ?? "");
    fillOptions(player, [["", "Any player"], ...answer.players.map((one) => [one, visible(one, 40)])], wanted.player ?? "");
    setAttribute(player, "hidden", answer.players.length === 0 && !wanted.player);
    rewards.update(answer.rewards);
    lengths.update(answer.lengths);
    list.update(answer.rollouts);
    const last = wanted.offset + answer.rollouts.length;
    setText(summary, `${answer.total > 0 ? `${whole(wanted.offset + 1)} to ${whole(last)} of ` : ""}${whole(answer.total)} rollouts${answer.total < answer.of ? `, of ${whole(answer.of)} in all` : ""}${progressOf(answer.progress)}`);
    keep(problems, answer.progress.problems, (text) => text, (text) => element("li", {}, visible(text, 300)));
    before.disabled = wanted.offset === 0;
    after.disabled = last >= answer.total;
  }

  return {
    async update() {
      const query = { ...wanted, limit: LIMIT };
      const answer = await context.get(fill(path, context.parameters), query);
      if (answer === shown) return;
      shown = answer;
      draw(answer);
    },
    destroy() {
      filters.destroy();
      search.destroy();
    },
  };
}

/** What is said while not everything is indexed. */
export function progressOf(progress) {
  if (progress.is_complete) return "";
  return ` · indexing: ${whole(progress.indexed)} of ${whole(progress.steps)} steps, ${bytes(progress.read_bytes)} so far`;
}

/** A link to a rollout, with what it is called. */
export function rolloutLink(context, entry) {
  const { job, run } = context.parameters;
  return context.link(ROLLOUT, { job, run, step: entry.step, number: entry.number });
}

function columns(context) {
  return [
    { key: "rollout", title: "Rollout", width: 100, value: (entry) => entry.rollout_id, change: (cell, entry) => changeLink(cell, context, entry) },
    { key: "step", title: "Step", number: true, width: 60, value: (entry) => entry.step, cell: (entry) => whole(entry.step) },
    { key: "outcome", title: "Outcome", width: 122, help: "Completed ones are trained; stale and dropped ones were of groups that were not", value: (entry) => entry.outcome, change: changeOutcome },
    { key: "reward", title: "Reward", number: true, width: 76, value: (entry) => entry.reward, cell: (entry) => number(entry.reward) },
    { key: "advantage", title: "Advantage", number: true, width: 92, help: "How much better it is than its group: the weight of its tokens in the loss", value: (entry) => entry.advantage, cell: (entry) => number(entry.advantage) },
    { key: "environment", title: "Environment", width: 124, value: (entry) => entry.environment, cell: (entry) => visible(entry.environment, 40) },
    { key: "example", title: "Example", number: true, width: 78, value: (entry) => entry.example_index, cell: (entry) => (entry.example_index === null ? "–" : whole(entry.example_index)) },
    { key: "turns", title: "Turns", number: true, width: 60, value: (entry) => entry.turns, cell: (entry) => whole(entry.turns) },
    { key: "tokens", title: "Tokens", number: true, width: 70, help: "Completion tokens of all turns", value: (entry) => entry.completion_tokens, cell: (entry) => whole(entry.completion_tokens) },
    { key: "version", title: "Version", number: true, width: 76, help: "Policy version: the oldest and the newest of its turns", value: (entry) => entry.versions[0], cell: (entry) => versions(entry) },
    { key: "beginning", title: "Beginning", value: (entry) => entry.beginning, change: changeBeginning },
  ];
}

/** The policy versions of a rollout. */
export function versions(entry) {
  const [oldest, newest] = entry.versions;
  if (oldest === undefined) return "–";
  return oldest === newest ? whole(oldest) : `${whole(oldest)}–${whole(newest)}`;
}

function changeLink(cell, context, entry) {
  if (!cell.firstChild) cell.append(element("a", {}, element("bdi", {})));
  setAttribute(cell.firstChild, "href", rolloutLink(context, entry));
  setText(cell.firstChild.firstChild, entry.rollout_id === "" ? `line ${whole(entry.number)}` : visible(entry.rollout_id, 24));
}

function changeOutcome(cell, entry) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, entry.outcome.replace("_", " "), OUTCOME_TONES[entry.outcome] ?? "bad");
  setAttribute(cell, "title", entry.reason ? visible(entry.reason, 300) : null);
}

/** Shows in an element the right answer, and how the last completion begins. */
export function changeBeginning(cell, entry) {
  if (!cell.firstChild) cell.append(element("bdi", { class: "muted mono" }), element("bdi", { class: "mono" }));
  setText(cell.firstChild, entry.answer ? `right: ${visible(entry.answer, 40)} · ` : ""); // first: the end of the cell is cut
  setText(cell.lastChild, visible(entry.reason && !entry.beginning ? entry.reason : withoutEnd(entry.beginning), 160));
}

function choice(label, options, value, onChange) {
  const select = element("select", { "aria-label": label, on: { change: () => onChange(select.value) } });
  fillOptions(select, options, value);
  return select;
}

/** Sets the options of a select, and leaves equal ones alone: an open list stays open. */
function fillOptions(select, options, value) {
  const all = options.some(([one]) => one === value) ? options : [...options, [value, visible(value, 40)]];
  keep(select, all, ([one]) => one, ([one]) => element("option", { value: one }), (option, [, text]) => setText(option, text));
  if (select.value !== value && document.activeElement !== select) select.value = value;
}

function reward(label, value, onChange) {
  const input = element("input", { type: "number", step: "any", class: "filter short", placeholder: label, "aria-label": label, value: value ?? null, on: { change: () => onChange(input.value) } });
  return input;
}

function pageButton(text, onClick) {
  return element("button", { type: "button", class: "button small", disabled: true, on: { click: onClick } }, text);
}
