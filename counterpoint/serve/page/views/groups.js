// What became of a run's groups: kept, filtered, failed or dropped, step by step, and why; then the groups of one step.
import { fill } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { number, seconds, visible, whole } from "../shell/format.js";
import { WORDS } from "../shell/words.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { table } from "../widgets/table.js";

export const title = "Groups";
export const path = "/jobs/{job}/runs/{run}/groups";
export const key = "g";

const STEPS = "/jobs/{job}/runs/{run}/groups";
const ONE = "/jobs/{job}/runs/{run}/steps/{step}/groups";
const ROLLOUTS = "/jobs/{job}/runs/{run}/rollouts";
const SPAN = 60;
const FATES = { shipped: "good", dropped: "warn", unknown: "idle" };

/** Draws the view. */
export function render(root, context) {
  const steps = table({ caption: "Groups by step", columns: stepColumns(pick), keyOf: (step) => String(step.step), sort: { key: "step", descending: true }, tone: (step) => (String(step.step) === String(context.query.step) ? "warn" : ""), empty: "No group has shipped or was dropped yet." });
  const groups = table({ caption: "Groups of the step", columns: groupColumns(), keyOf: (group) => String(group.group), empty: "Nothing is known of the groups of this step." });
  const flight = element("span", { class: "muted" });
  const heading = element("h2", {}, "Groups of a step");
  const causes = element("p", { class: "muted" });
  const rollouts = element("a", { href: "#/" }, "Read its rollouts");
  const one = element("section", { class: "section", hidden: true }, element("div", { class: "section-head" }, heading, causes, element("span", { class: "spacer" }), rollouts), groups.element);
  let answer = null;
  let drawn = "";
  root.append(element("div", { class: "view-title" }, element("h1", {}, "Groups of ", element("bdi", {}, visible(context.parameters.run, 64))), flight), element("p", { class: "muted note" }, `Shipped: ${WORDS.shipped.toLowerCase()}. Filtered: ${WORDS.filtered.toLowerCase()}. Dropped: ${WORDS.dropped.toLowerCase()}.`), steps.element, one);
  steps.element.classList.add("bounded");

  async function pick(step) {
    context.setQuery({ step });
    await context.refresh();
    one.scrollIntoView({ block: "nearest" });
  }

  async function drawStep() {
    const { step } = context.query;
    const chosen = step ?? answer.steps.findLast((each) => each.shipped)?.step;
    setAttribute(one, "hidden", chosen === undefined || chosen === null);
    if (one.hidden) return;
    setText(heading, `Groups of step ${visible(String(chosen), 20)}`);
    setAttribute(rollouts, "href", context.link(ROLLOUTS, context.parameters, { step: chosen }));
    const found = await context.get(fill(ONE, { ...context.parameters, step: chosen }));
    setText(causes, causesOf(found));
    groups.update(found.groups);
  }

  return {
    async update() {
      const next = await context.get(fill(STEPS, context.parameters), { span: SPAN });
      if (next !== answer || drawn !== String(context.query.step)) {
        answer = next;
        drawn = String(context.query.step);
        setText(flight, `${whole(answer.in_flight)} in flight`);
        steps.update(answer.steps);
      }
      await drawStep();
    },
    destroy: () => {},
  };
}

function causesOf(found) {
  const parts = found.causes.map((cause) => `${visible(cause.name, 80)}: ${whole(cause.count)}`);
  if (found.causes_of < found.causes_among) parts.push(`${whole(found.causes_of)} of ${whole(found.causes_among)} records read`);
  if (found.left_out) parts.push(`${whole(found.left_out)} more groups are not listed`);
  if (!found.progress.is_complete) parts.push("still reading the records");
  return [...parts, ...found.progress.problems.map((problem) => visible(problem, 200))].join("; ") || "no rollout of the step was left out";
}

function stepColumns(pick) {
  return [
    { key: "step", title: "Step", number: true, value: (step) => step.step, change: (cell, step) => changeStep(cell, step, pick) },
    { key: "shipped", title: "Shipped", number: true, help: `Groups of the step: ${WORDS.shipped.toLowerCase()}`, value: (step) => step.shipped, cell: (step) => whole(step.shipped) },
    { key: "dropped", title: "Dropped", number: true, help: `Groups since the step before: ${WORDS.dropped.toLowerCase()}`, value: (step) => sum(step.dropped), cell: (step) => whole(sum(step.dropped)) },
    { key: "kept", title: "Rollouts kept", number: true, help: "Rollouts that are trained", value: (step) => step.rollouts_kept, cell: (step) => whole(step.rollouts_kept) },
    { key: "filtered", title: "Filtered", number: true, help: WORDS.filtered, value: (step) => step.rollouts_filtered, cell: (step) => whole(step.rollouts_filtered) },
    { key: "failed", title: "Failed", number: true, help: "Rollouts that their environment failed, or that got no answer from inference", value: (step) => step.rollouts_failed, cell: (step) => whole(step.rollouts_failed) },
    { key: "why", title: "Why dropped", wide: true, value: (step) => named(step.dropped) || "–" },
  ];
}

function changeStep(cell, step, pick) {
  if (!cell.firstChild) cell.append(element("button", { type: "button", class: "button small", on: { click: () => pick(cell.step) } }));
  cell.step = step.step;
  setText(cell.firstChild, whole(step.step));
  setAttribute(cell.firstChild, "aria-label", `Groups of step ${whole(step.step)}`);
}

function groupColumns() {
  return [
    { key: "group", title: "Group", number: true, value: (group) => group.group, cell: (group) => whole(group.group) },
    { key: "fate", title: "Fate", help: `Shipped: ${WORDS.shipped.toLowerCase()}. Dropped: ${WORDS.dropped.toLowerCase()}`, value: (group) => group.fate, change: changeFate },
    { key: "environment", title: "Environment", value: (group) => visible(group.environment || "–", 60) },
    { key: "example", title: "Example", number: true, value: (group) => group.example_index, cell: (group) => (group.example_index === null ? "–" : String(group.example_index)) },
    { key: "reward", title: "Reward", number: true, help: "Mean, and lowest to highest. Where these are equal, the group teaches nothing", value: (group) => group.reward_mean, cell: rewardOf },
    { key: "kept", title: "Kept", number: true, value: (group) => group.kept, cell: (group) => whole(group.kept) },
    { key: "filtered", title: "Filtered", number: true, help: WORDS.filtered, value: (group) => group.filtered, cell: (group) => whole(group.filtered) },
    { key: "failed", title: "Failed", number: true, value: (group) => group.failed, cell: (group) => whole(group.failed) },
    { key: "seconds", title: "Took", number: true, help: "From its start until it shipped or was dropped", value: (group) => group.seconds, cell: (group) => seconds(group.seconds) },
    { key: "why", title: "Why", wide: true, value: (group) => (group.detail ? visible(group.detail, 200) : [visible(group.reason, 200), named(group.causes)].filter(Boolean).join("; ")) || "–" },
  ];
}

function changeFate(cell, group) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, group.fate, FATES[group.fate] ?? "idle");
}

function rewardOf(group) {
  if (group.reward_mean === null) return "–";
  const range = group.reward_min === group.reward_max ? "all equal" : `${number(group.reward_min, 3)} to ${number(group.reward_max, 3)}`;
  return `${number(group.reward_mean, 3)} (${range})`;
}

function sum(counts) {
  return counts.reduce((total, one) => total + one.count, 0);
}

function named(counts) {
  return counts.map((one) => `${visible(one.name, 80)} ${whole(one.count)}`).join(", ");
}
