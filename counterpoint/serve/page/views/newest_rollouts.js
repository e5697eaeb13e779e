// The newest rollouts of some runs, a line each: step, environment, reward and how the last completion begins. They are of several
// environments and groups: those of one group are answers to the same prompt. A line leads to its rollout (views/rollout.js).
import { fill } from "../shell/api.js";
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { number, visible, whole } from "../shell/format.js";
import { changeBeginning, path as ROLLOUTS, ROLLOUT } from "./rollouts.js";

const LINES = 6;
/** Rollouts of a run of which the lines are chosen. */
const ASKED = 100;
const MOST_RUNS = 3;

/** Makes the list; `update` takes runs with their labels, of which the first ones are asked. */
export function newestRollouts(context) {
  const list = element("ol", { class: "newest" });
  const all = element("a", { href: "#/" }, "All rollouts");
  const root = element("section", { class: "section", hidden: true }, element("div", { class: "section-head" }, element("h2", { id: "newest-rollouts" }, "Newest rollouts"), element("span", { class: "spacer" }), all), list);
  let shown = "";
  setAttribute(list, "aria-labelledby", "newest-rollouts");

  function make() {
    return element("li", {}, element("a", {}), element("bdi", { class: "newest-run" }), element("bdi", { class: "muted" }), element("span", { class: "number" }), element("span", { class: "newest-text" }));
  }

  function change(line, entry) {
    const [step, run, environment, reward, text] = line.children;
    setAttribute(step, "href", context.link(ROLLOUT, entry));
    setText(step, entry.step > 0 ? `Step ${whole(entry.step)}` : "No step yet");
    setText(run, entry.label);
    setAttribute(run, "hidden", entry.label === "");
    setText(environment, visible(entry.environment, 24));
    setText(reward, entry.reward === null ? entry.outcome.replace("_", " ") : number(entry.reward, 3));
    changeBeginning(text, entry);
  }

  return {
    element: root,
    async update(runs) {
      const asked = runs.filter((run) => !run.fine_tuning).slice(0, MOST_RUNS);
      const key = JSON.stringify(asked.map(({ job, run, step, label }) => [job, run, step, label]));
      if (key === shown) return; // a page that is open for days reads the records once a step
      const answers = await Promise.allSettled(asked.map((run) => context.get(fill(ROLLOUTS, run), { sort: "newest", limit: ASKED })));
      const entries = answers.flatMap(({ value }, index) => ofGroups(value?.rollouts ?? [], Math.ceil(LINES / asked.length)).map((entry) => ({ ...entry, job: asked[index].job, run: asked[index].run, label: asked.length > 1 ? asked[index].label : "" })));
      shown = answers.every(({ value }) => value?.progress.is_complete) ? key : "";
      setAttribute(root, "hidden", entries.length === 0);
      setAttribute(all, "hidden", asked.length !== 1);
      if (asked.length === 1) setAttribute(all, "href", context.link(ROLLOUTS, asked[0]));
      keep(list, entries, (entry) => JSON.stringify([entry.job, entry.run, entry.step, entry.number]), make, change);
    },
  };
}

/** So many: the first rollout of each group, of each environment in turn, before a second one of a group. */
function ofGroups(entries, most) {
  const counts = new Map();
  const count = (...parts) => {
    const key = JSON.stringify(parts);
    counts.set(key, (counts.get(key) ?? 0) + 1);
    return counts.get(key);
  };
  const placed = entries.map((entry) => {
    const ofGroup = count("group", entry.group_id ?? [entry.step, entry.number]);
    return { entry, ofGroup, ofEnvironment: count("environment", ofGroup, entry.environment) };
  });
  return placed.sort((a, b) => a.ofGroup - b.ofGroup || a.ofEnvironment - b.ofEnvironment).slice(0, most).map(({ entry }) => entry);
}
