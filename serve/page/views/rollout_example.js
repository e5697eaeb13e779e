// The attempts at the same example in all steps: their mean reward as a curve, with the least and the greatest as a band. A point opens
// the first attempt of its step.
import { fill } from "../shell/api.js";
import { element, setText } from "../shell/dom.js";
import { number, visible, whole } from "../shell/format.js";
import { chart } from "../widgets/chart.js";
import { styleOf } from "../widgets/palette.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { ROLLOUT, progressOf } from "./rollouts.js";

const EXAMPLE = "/jobs/{job}/runs/{run}/example";
const LISTED = 40;

/** Makes the section; `open` says of which rollout's example it is. */
export function exampleChart(context) {
  const { job, run } = context.parameters;
  const curve = chart({ title: "Reward of this example", help: "Mean, least and greatest reward of its attempts in each step", format: number, group: new ZoomGroup(), onPick: (step) => openStep(step) });
  const note = element("p", { class: "muted note", role: "status" });
  const list = element("ul", { class: "attempts" });
  const section = element("section", { class: "section", hidden: true }, element("h2", {}, "The same example in other steps"), note, element("div", { class: "charts" }, curve.element), list);
  let wanted = null;
  let shown = null;

  function openStep(step) {
    const attempts = shown?.by_step.find((one) => one.step === step);
    if (attempts) location.hash = context.link(ROLLOUT, { job, run, step, number: attempts.numbers[0] });
  }

  function draw(answer) {
    const steps = answer.by_step;
    const attempts = steps.reduce((sum, one) => sum + one.count, 0);
    setText(note, `${whole(attempts)} ${attempts === 1 ? "attempt" : "attempts"} in ${whole(steps.length)} ${steps.length === 1 ? "step" : "steps"}${answer.left_out > 0 ? `, ${whole(answer.left_out)} older steps are left out` : ""}${progressOf(answer.progress)}`);
    curve.update({ x: steps.map((one) => one.step), axis: "step", curves: [{ key: "reward", label: "mean reward", style: styleOf(0), mean: steps.map((one) => one.mean), minimum: steps.map((one) => one.least), maximum: steps.map((one) => one.most) }] });
    list.replaceChildren(...steps.slice(-LISTED).reverse().flatMap((one) => attemptLinks(one)).slice(0, 2 * LISTED));
  }

  function attemptLinks(one) {
    return one.numbers.map((line, index) => element("li", {}, element("a", { href: context.link(ROLLOUT, { job, run, step: one.step, number: line }) }, `step ${whole(one.step)}: ${number(one.rewards[index])}`)));
  }

  return {
    element: section,
    open(entry) {
      if (entry.example_index === null || entry.outcome === "damaged") return;
      wanted = { environment: entry.environment, example_index: entry.example_index };
      section.hidden = false;
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
