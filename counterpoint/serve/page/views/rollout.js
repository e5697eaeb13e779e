// One rollout as a conversation, with the right answer and its rewards beside it; its tokens coloured by log-probability or by mismatch; the
// other attempts at its example.
// All of it is a model's or an environment's text: it goes into the page as text, and what could steer it is escaped by the server.
import { fill } from "../shell/api.js";
import { element, setChildren, setText } from "../shell/dom.js";
import { number, visible, whole } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { figures } from "../widgets/figures.js";
import { messagesOf, withoutEnd } from "./conversation.js";
import { exampleChart } from "./rollout_example.js";
import { tokenText } from "./rollout_tokens.js";
import { OUTCOME_TONES, ROLLOUT, path as ROLLOUTS, versions } from "./rollouts.js";

export const title = "Rollout";
export const path = ROLLOUT;
export const tab = ROLLOUTS;

const CHARACTERS = [20000, 200000, 1000000];

/** Draws the view. */
export function render(root, context) {
  const { step, number: line } = context.parameters;
  const state = badge("");
  const numbers = figures("This rollout");
  const problem = element("p", { class: "error-text", hidden: true });
  const turns = element("div", { class: "turns" });
  const answerBox = element("section", { class: "answer-box", hidden: true }, element("h2", {}, "Right answer"), element("pre", { dir: "auto", tabindex: "0", "aria-label": "Right answer" }));
  const rest = element("div", { class: "rollout-facts" });
  const more = element("button", { type: "button", class: "button small", hidden: true, on: { click: () => longer() } }, "Show more of its texts");
  const colours = element("div", { class: "segmented", role: "group", "aria-label": "Colour the tokens" });
  const template = element("button", { type: "button", class: "button small", "aria-pressed": "false", title: "The texts as they were sent, with the tokens of the chat template", on: { click: () => showTemplate() } }, "Template tokens");
  const example = exampleChart(context);
  const name = element("bdi", {}, `step ${step}, line ${line}`);
  let level = 0;
  let shown = null;
  let colour = "";
  let answer = null;
  let isRaw = false;
  let texts = [];
  for (const [value, label] of [["", "Plain"], ["log-probability", "Log-probability"], ["mismatch", "Mismatch"]]) {
    colours.append(element("button", { type: "button", class: "button small", "aria-pressed": String(value === ""), on: { click: (event) => paint(value, event.currentTarget) } }, label));
  }
  root.append(element("div", { class: "view-title" }, element("h1", {}, "Rollout ", name), state, element("span", { class: "spacer" }), template, colours, more), example.strip, numbers.element, problem, element("div", { class: "rollout" }, answerBox, turns, rest), example.element);

  function paint(value, button) {
    colour = value;
    for (const other of colours.children) other.setAttribute("aria-pressed", String(other === button));
    for (const text of texts) text.paint(colour);
  }

  function showTemplate() {
    isRaw = !isRaw;
    template.setAttribute("aria-pressed", String(isRaw));
    if (answer) draw();
  }

  function longer() {
    level = Math.min(level + 1, CHARACTERS.length - 1);
    shown = null;
    context.refresh();
  }

  function draw() {
    const { entry, parts, damaged } = answer;
    setText(name, parts ? visible(parts.rollout_id, 40) : `line ${whole(entry.number)}`);
    changeBadge(state, entry.outcome.replace("_", " "), OUTCOME_TONES[entry.outcome] ?? "bad");
    numbers.update(figuresOf(entry));
    const reason = parts?.error?.text ?? (parts?.filtered_by ? `filtered by ${parts.filtered_by}` : parts?.dropped ? `not trained: its group was dropped (${parts.dropped})` : damaged ? "This line of the file is no record:" : "");
    setText(problem, reason);
    problem.hidden = reason === "";
    if (!parts) return setChildren(turns, element("pre", { class: "said" }, damaged.text));
    texts = [];
    answerBox.hidden = !parts.answer;
    setText(answerBox.lastChild, parts.answer?.text ?? "");
    setChildren(turns, turnsOf(parts, entry));
    for (const text of texts) text.paint(colour);
    setChildren(rest, tableOf("Rewards of players", parts.player_rewards), tableOf("Advantages of players", parts.player_advantages), tableOf("Metrics", parts.metrics), tableOf("State", parts.state));
    more.hidden = level === CHARACTERS.length - 1 || !isCut(parts);
    example.open(entry);
  }

  function turnsOf(parts, entry) {
    const nodes = parts.turns.map((turn, index) => {
      const text = tokenText(context, entry, index, turn.completion, isRaw ? (said) => said : withoutEnd);
      texts.push(text);
      return turnSection(turn, index, text.element, isRaw);
    });
    for (const turn of [...parts.opponent_turns].reverse()) nodes.splice(Math.min(Math.max(turn.before, 0), nodes.length), 0, opponentSection(turn, isRaw));
    if (parts.turns_left_out > 0) nodes.push(element("p", { class: "empty" }, `${whole(parts.turns_left_out)} more turns are left out.`));
    if (nodes.length === 0) nodes.push(element("p", { class: "empty" }, "It has no turn: no model call of it was answered."));
    return nodes;
  }

  return {
    async update() {
      if (shown === level) return example.update();
      const asked = level;
      answer = await context.get(fill(ROLLOUT, context.parameters), { characters: CHARACTERS[asked] });
      draw();
      shown = asked;
      await example.update();
    },
    destroy() {
      example.destroy();
    },
  };
}

function figuresOf(entry) {
  return [
    { name: "Reward", value: number(entry.reward) },
    { name: "Advantage", value: number(entry.advantage) },
    { name: "Environment", value: visible(entry.environment, 24) },
    { name: "Example", value: entry.example_index === null ? "–" : whole(entry.example_index) },
    { name: "Group", value: entry.group_id === null ? "–" : whole(entry.group_id) },
    { name: "Step", value: whole(entry.step) },
    { name: "Version", value: versions(entry), help: "Policy version: the oldest and the newest of its turns" },
    { name: "Tokens", value: whole(entry.completion_tokens), help: "Completion tokens of all turns" },
  ];
}

function turnSection(turn, index, completion, isRaw) {
  const facts = [
    `turn ${whole(index + 1)}`,
    turn.policy_version !== null && `version ${whole(turn.policy_version)}`,
    turn.prompt_tokens !== null && `${whole(turn.prompt_tokens)} prompt tokens${turn.cached_tokens ? `, ${whole(turn.cached_tokens)} cached` : ""}`,
    turn.completion_tokens !== null && `${whole(turn.completion_tokens)} written${turn.untrained_tokens ? `, ${whole(turn.untrained_tokens)} untrained` : ""}`,
    turn.temperature !== null && `temperature ${number(turn.temperature)}`,
    turn.reward !== null && `reward ${number(turn.reward)}`,
    turn.advantage !== null && `advantage ${number(turn.advantage)}`,
    turn.finish_reason && `ended by ${turn.finish_reason}`,
    turn.server,
  ].filter(Boolean);
  const prompt = turn.prompt ? (isRaw ? [{ role: "prompt", text: turn.prompt.text }] : messagesOf(turn.prompt.text)) : [{ role: "prompt", text: null }];
  return element("section", { class: "turn", "aria-label": `Turn ${whole(index + 1)}` },
    prompt.map(({ role, text }) => message(role || "prompt", "prompt", said(text, role || "prompt"))),
    message(turn.player || "model", "completion", completion),
    element("p", { class: "turn-facts" }, element("bdi", {}, visible(facts.join(" · "), 300))));
}

function opponentSection(turn, isRaw) {
  const text = isRaw ? turn.completion.text : withoutEnd(turn.completion.text);
  return element("section", { class: "turn opponent" }, message(`opponent ${turn.opponent}`, "completion", said(text, "Opponent")));
}

/** One message: who says it, and what. */
function message(role, kind, content) {
  return element("div", { class: `message ${kind}` }, element("bdi", { class: "message-role" }, visible(role, 40)), content);
}

function said(text, label) {
  return text === null ? element("p", { class: "empty" }, "No text was recorded (recorded_tokens = 0).") : element("pre", { class: "said-text", dir: "auto", tabindex: "0", "aria-label": visible(label, 40) }, text);
}

function tableOf(name, pairs) {
  if (pairs.length === 0) return null;
  return element("section", {}, element("h2", {}, name), element("dl", { class: "pairs" }, pairs.map((pair) => [element("dt", {}, element("bdi", {}, visible(pair.name, 100))), element("dd", {}, element("pre", { dir: "auto" }, pair.value))])));
}

function isCut(parts) {
  return [parts.error, parts.answer, ...parts.turns.flatMap((turn) => [turn.prompt, turn.completion]), ...parts.opponent_turns.map((turn) => turn.completion)].some((text) => (text?.left_out ?? 0) > 0);
}
