// The attempts at the same example: a strip of all, a bar each as high as its reward, step by step, and their mean reward as a curve with
// the least and the greatest as a band. A bar opens its attempt, a point the first attempt of its step.
import { fill } from "../shell/api.js";
import { element, setText } from "../shell/dom.js";
import { number, visible, whole } from "../shell/format.js";
import { chart } from "../widgets/chart.js";
import { styleOf } from "../widgets/palette.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { ROLLOUT, progressOf } from "./rollouts.js";

const EXAMPLE = "/jobs/{job}/runs/{run}/example";
const STEPS = 60;
const MOST = 600;

/** Makes the section; `open` says of which rollout's example it is. */
export function exampleChart(context) {
  const { job, run } = context.parameters;
  const curve = chart({ title: "Reward of this example", help: "Mean, least and greatest reward of its attempts in each step", format: number, group: new ZoomGroup(), onPick: (step) => openStep(step) });
  const note = element("p", { class: "muted note", role: "status" });
  const list = element("ul", { class: "attempts", tabindex: "0", "aria-label": "Attempts at this example" });
  const before = element("button", { type: "button", class: "button small", title: "The attempt before ([)", "aria-label": "The attempt before", on: { click: () => go(-1) } }, "‹");
  const after = element("button", { type: "button", class: "button small", title: "The next attempt (])", "aria-label": "The next attempt", on: { click: () => go(1) } }, "›");
  const strip = element("div", { class: "attempt-strip", hidden: true }, before, list, after);
  const section = element("section", { class: "section", hidden: true }, element("h2", {}, "The same example in other steps"), note, element("div", { class: "charts" }, curve.element));
  let wanted = null;
  let shown = null;
  context.shortcut("[", "The attempt before at this example", () => go(-1));
  context.shortcut("]", "The next attempt at this example", () => go(1));

  function go(way) {
    const links = [...list.querySelectorAll("a")];
    const next = links[links.findIndex((one) => one.getAttribute("aria-current")) + way];
    if (next) location.hash = next.getAttribute("href");
  }

  function openStep(step) {
    const attempts = shown?.by_step.find((one) => one.step === step);
    if (attempts) location.hash = context.link(ROLLOUT, { job, run, step, number: attempts.numbers[0] });
  }

  function draw(answer) {
    const steps = answer.by_step;
    const attempts = steps.reduce((sum, one) => sum + one.count, 0);
    setText(note, `${whole(attempts)} ${attempts === 1 ? "attempt" : "attempts"} in ${whole(steps.length)} ${steps.length === 1 ? "step" : "steps"}${answer.left_out > 0 ? `, ${whole(answer.left_out)} older steps are left out` : ""}${progressOf(answer.progress)}`);
    curve.update({ x: steps.map((one) => one.step), axis: "step", curves: [{ key: "reward", label: "mean reward", style: styleOf(0), mean: steps.map((one) => one.mean), minimum: steps.map((one) => one.least), maximum: steps.map((one) => one.most) }] });
    section.hidden = steps.length === 0;
    curve.element.hidden = steps.length < 2;
    drawStrip(steps);
  }

  /** The newest steps, with the one that is open if it is older. */
  function drawStrip(steps) {
    const at = steps.findIndex((one) => String(one.step) === context.parameters.step);
    const count = Math.max(1, Math.min(STEPS, Math.floor(MOST / Math.max(...steps.map((one) => one.numbers.length)))));
    const first = Math.max(0, Math.min(steps.length - count, at < 0 ? Infinity : at - Math.floor(count / 2)));
    const part = steps.slice(first, first + count);
    const known = part.flatMap((one) => one.rewards).filter((reward) => reward !== null);
    const [least, most] = [Math.min(0, ...known), Math.max(...known)];
    strip.hidden = part.length === 0;
    list.replaceChildren(...part.map((one) => element("li", {}, element("span", { class: "attempt-bars" }, one.numbers.map((line, index) => attempt(one.step, line, one.rewards[index], [least, most]))), element("span", { class: "attempt-step", "aria-hidden": "true" }, one === part[0] ? `step ${whole(one.step)}` : whole(one.step)))));
    const current = list.querySelector("[aria-current]");
    if (current) list.scrollLeft = current.parentElement.offsetLeft - list.clientWidth / 2;
  }

  function attempt(step, line, reward, [least, most]) {
    const isCurrent = String(step) === context.parameters.step && String(line) === context.parameters.number;
    const bar = element("span", { class: "attempt-bar" });
    bar.style.height = `${reward === null ? 100 : most > least ? 8 + (92 * (reward - least)) / (most - least) : reward > 0 ? 100 : 8}%`;
    const label = `step ${whole(step)}: ${reward === null ? "failed" : number(reward)}`;
    return element("a", { class: "attempt", href: context.link(ROLLOUT, { job, run, step, number: line }), title: label, "aria-label": label, "aria-current": isCurrent ? "true" : null, dataset: { failed: reward === null } }, bar);
  }

  return {
    element: section,
    /** The strip of attempts. */
    strip,
    open(entry) {
      if (entry.example_index === null || entry.outcome === "damaged") return;
      wanted = { environment: entry.environment, example_index: entry.example_index };
      setText(section.firstChild, `Example ${whole(entry.example_index)} of ${visible(entry.environment, 40)} in all steps`);
    },
    async update() {
      if (!wanted) return;
      const answer = await context.get(fill(EXAMPLE, context.parameters), wanted);
      if (answer === shown) return;
      shown = answer;
      draw(answer);
    },
    destroy() {
      curve.destroy();
    },
  };
}
