// A step as a Gantt chart: what the orchestrator, each server and the trainer did, and the idle share of each in one number.
import { fill } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { clock, percent, seconds, visible, whole } from "../shell/format.js";
import { WORDS } from "../shell/words.js";
import { figures } from "../widgets/figures.js";
import { gantt } from "../widgets/gantt.js";

export const title = "Step";
export const path = "/jobs/{job}/runs/{run}/step";
export const key = "s";

const TIMELINE = "/jobs/{job}/runs/{run}/timeline";
const SPANS = [1, 3, 10, 30];
const ROLES = [
  ["orchestrator", "Orchestrator idle", "Share of the time in which it only waited. Near 100 % is good: it is never what others wait for."],
  ["inference", "Inference idle", "Share of the time in which a server had neither a request nor weights to load; the mean of the servers."],
  ["trainer", "Trainer idle", "Share of the time in which it worked on no run."],
];

/** The style of each kind of span of a role: a number of the CSS's series, different ones within a role. What is not here has the role's `rest`. */
const STYLES = {
  orchestrator: { merge: "1", records: "6", commit: "2", finalize: "3", malloc_trim: "8", deliver: "5", load_weights: "4", rest: "7" },
  inference: { serve: "1", load: "2", probe: "7", rest: "8" },
  trainer: { forward: "1", backward: "3", measure: "7", optimizer: "2", broadcast: "4", conclude: "8", write_checkpoint: "6", rest: "5" },
};

/** Draws the view. */
export function render(root, context) {
  const idle = figures("Idle shares");
  const chart = gantt({ label: "What each role did", styleOf, announce: context.announce, words: WORDS });
  const note = element("p", { class: "empty" }, "Reading the run's spans.");
  const left = element("p", { class: "muted", hidden: true });
  const where = element("span", { class: "muted step-where" });
  const before = moveButton("Earlier", "Show the step before", () => move(-1));
  const after = moveButton("Later", "Show the next step", () => move(1));
  const newest = element("button", { type: "button", class: "button small", on: { click: () => show(null) } }, "Follow the newest");
  const widths = SPANS.map((span) => element("button", { type: "button", class: "button small", on: { click: () => widen(span) } }, span === 1 ? "1 step" : `${span} steps`));
  let answer = null;
  root.append(
    element("div", { class: "view-title" }, element("h1", {}, "Steps of ", element("bdi", {}, visible(context.parameters.run, 64))), where),
    idle.element,
    element("div", { class: "controls" }, element("div", { class: "actions" }, before, after, newest), element("div", { class: "segmented", role: "group", "aria-label": "How many steps" }, widths)),
    note,
    chart.element,
    left,
  );
  context.shortcut("[", "Show the step before", () => move(-1));
  context.shortcut("]", "Show the next step", () => move(1));

  function show(step) {
    context.setQuery({ step });
    context.refresh();
  }

  function widen(span) {
    context.setQuery({ span });
    context.refresh();
  }

  function move(way) {
    if (!answer?.steps.length) return;
    const last = answer.steps.at(-1).step;
    const at = answer.known.indexOf(last);
    const next = answer.known[at + way];
    if (next !== undefined) show(next);
  }

  function draw() {
    const hasSteps = answer.steps.length > 0;
    setAttribute(note, "hidden", hasSteps);
    setText(note, "No step is complete yet. A step's spans are written when it has ended.");
    setAttribute(chart.element, "hidden", !hasSteps);
    setAttribute(idle.element, "hidden", !hasSteps);
    const { steps, known } = answer;
    setAttribute(before, "disabled", !hasSteps || known.indexOf(steps.at(-1).step) <= 0);
    setAttribute(after, "disabled", !hasSteps || steps.at(-1).step === known.at(-1));
    setAttribute(newest, "aria-pressed", String(context.query.step === undefined || context.query.step === null));
    for (const [index, button] of widths.entries()) setAttribute(button, "aria-pressed", String(spanOf(context) === SPANS[index]));
    setText(where, hasSteps ? `${steps.length === 1 ? `step ${whole(steps[0].step)}` : `steps ${whole(steps[0].step)} to ${whole(steps.at(-1).step)}`}, ${seconds(answer.end - answer.begin)} until ${clock(answer.end)}` : "");
    if (!hasSteps) return;
    idle.update(ROLES.map(([role, name, help]) => ({ name, value: percent(answer.idle[role]), help })));
    chart.update({ begin: answer.begin, end: answer.end, marks: steps.map((step) => ({ label: `step ${whole(step.step)}`, at: step.begin })), lanes: answer.lanes.map((lane) => ({ ...lane, title: visible(lane.title, 200) })) });
    const bars = answer.lanes.reduce((sum, lane) => sum + lane.left_out, 0);
    setText(left, [answer.servers_left_out && `${whole(answer.servers_left_out)} more servers are not drawn.`, bars && `${whole(bars)} of the shortest bars are not drawn.`].filter(Boolean).join(" "));
    setAttribute(left, "hidden", !left.textContent);
  }

  return {
    async update() {
      const next = await context.get(fill(TIMELINE, context.parameters), { step: context.query.step, span: spanOf(context) });
      const state = `${context.query.step} ${context.query.span}`;
      if (next === answer && root.drawnFor === state) return;
      answer = next;
      root.drawnFor = state;
      draw();
    },
    destroy: () => {},
  };
}

/** The style of a bar: `out`, `wait`, or a number of the CSS's series. */
function styleOf(bar, { role }) {
  const styles = STYLES[role] ?? STYLES.inference;
  return bar.name === "out" ? "out" : bar.waiting ? "wait" : Object.hasOwn(styles, bar.name) ? styles[bar.name] : styles.rest;
}

function spanOf(context) {
  const wanted = Number(context.query.span);
  return Number.isInteger(wanted) && wanted >= 1 && wanted <= 50 ? wanted : 3;
}

function moveButton(text, label, onClick) {
  return element("button", { type: "button", class: "button small", "aria-label": label, title: label, on: { click: onClick } }, text);
}
