// The text of a completion, plain or with each token coloured: by its log-probability at inference, or by the mismatch, trainer minus
// inference. Colour never says it alone: a token's numbers are in its title, and the least likely tokens are listed.
import { fill } from "../shell/api.js";
import { element, setChildren } from "../shell/dom.js";
import { number, visible, whole } from "../shell/format.js";
import { ROLLOUT } from "./rollouts.js";

const MOST = 4096;
const NAMED = 5;
const LOG_PROBABILITIES = [-0.1, -0.5, -1, -2, -4, -8];
const MISMATCHES = [0.01, 0.05, 0.1, 0.3, 1, 3];

/**
 * Makes the text of one turn's completion, plain as `cleaned` returns it; `paint` colours its tokens by `log-probability` or `mismatch`, or
 * not at all ("").
 */
export function tokenText(context, entry, turn, text, cleaned) {
  const plain = text ? element("pre", { class: "said-text", dir: "auto", tabindex: "0", "aria-label": `Completion of turn ${turn + 1}` }, cleaned(text.text)) : element("p", { class: "empty" }, "No text was recorded (recorded_tokens = 0).");
  const root = element("div", {}, plain);
  let loading = null;
  let wanted = "";

  async function paint(colour) {
    wanted = colour;
    if (colour === "") return setChildren(root, plain);
    loading ??= context.get(`${fill(ROLLOUT, context.parameters)}/turns/${turn}/tokens`, { most: MOST });
    try {
      const tokens = await loading;
      if (wanted === colour) setChildren(root, coloured(tokens, colour, plain, turn));
    } catch (error) {
      loading = null;
      if (wanted === colour && error.name !== "AbortError") setChildren(root, note(error.problem?.what ?? error.message), plain);
    }
  }

  return { element: root, paint };
}

function coloured(tokens, colour, plain, turn) {
  const why = tokens.missing || (colour === "mismatch" ? tokens.no_trainer : "");
  if (why) return [note(`No colours: ${why}.`), plain];
  const values = tokens.texts.map((_, index) => valueOf(tokens, index, colour));
  const spans = tokens.texts.map((text, index) => span(tokens, index, text, values[index], colour));
  const gap = spans.findIndex((_, index) => index > 0 && tokens.positions[index] !== tokens.positions[index - 1] + 1);
  if (gap > 0) spans.splice(gap, 0, element("span", { class: "muted" }, ` [... ${whole(tokens.positions[gap] - tokens.positions[gap - 1] - 1)} tokens left out ...] `));
  const box = element("pre", { class: "said-text tokens", dir: "auto", tabindex: "0", "aria-label": `Tokens of turn ${turn + 1}, coloured by ${colour}` }, spans);
  const notes = [tokens.no_text && `The text of tokens is not known: ${tokens.no_text}. Their numbers are shown.`, tokens.texts.length < tokens.recorded && `Only the first ${whole(tokens.texts.length)} of ${whole(tokens.recorded)} recorded tokens are shown.`];
  return [legend(colour), ...notes.filter(Boolean).map(note), box, extremes(tokens, values, colour)];
}

function span(tokens, index, text, value, colour) {
  const details = [`token ${tokens.token_ids[index]} at ${tokens.positions[index]}`, `log-probability ${number(tokens.log_probabilities[index])}`];
  if (tokens.trainer[index] !== null) details.push(`trainer ${number(tokens.trainer[index])}`);
  if (!tokens.trained[index]) details.push("not trained");
  return element("span", { class: "token", title: details.join(", "), dataset: { level: levelOf(value, colour), sign: colour === "mismatch" && value > 0 ? "more" : "less", trained: String(tokens.trained[index]) } }, text);
}

function valueOf(tokens, index, colour) {
  const inference = tokens.log_probabilities[index];
  if (colour !== "mismatch") return inference;
  const trainer = tokens.trainer[index];
  return trainer === null || inference === null ? null : trainer - inference;
}

function levelOf(value, colour) {
  if (value === null) return "none";
  const beyond = colour === "mismatch" ? MISMATCHES.filter((limit) => Math.abs(value) >= limit) : LOG_PROBABILITIES.filter((limit) => value <= limit);
  return String(beyond.length);
}

function legend(colour) {
  const limits = colour === "mismatch" ? MISMATCHES.map((limit) => `±${limit}`) : LOG_PROBABILITIES.map((limit) => String(limit).replace("-", "−"));
  const name = colour === "mismatch" ? "Trainer minus inference, beyond (blue: the trainer finds it likelier)" : "Log-probability at sampling, below";
  return element("p", { class: "token-legend muted" }, `${name} `, limits.map((limit, index) => element("span", { class: "token", dataset: { level: String(index + 1), sign: "less" } }, ` ${limit} `)));
}

/** The tokens with the most extreme values, in words. */
function extremes(tokens, values, colour) {
  const size = (index) => (colour === "mismatch" ? Math.abs(values[index]) : -values[index]);
  const order = values.map((_, index) => index).filter((index) => values[index] !== null).sort((a, b) => size(b) - size(a)).slice(0, NAMED);
  const what = colour === "mismatch" ? "Largest mismatch" : "Least likely";
  return element("p", { class: "muted" }, `${what}: `, order.map((index, place) => [place > 0 ? ", " : "", element("bdi", { class: "mono" }, JSON.stringify(visible(tokens.texts[index], 30))), ` ${number(values[index])} at ${whole(tokens.positions[index])}`]));
}

function note(text) {
  return element("p", { class: "muted", role: "status" }, visible(text, 300));
}
