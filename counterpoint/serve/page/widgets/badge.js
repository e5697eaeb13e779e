// A state in a word with a mark of its own shape and colour, so that colour alone never says it.
import { element, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";

const TONES = {
  good: ["running", "training", "ready", "finished", "complete", "done", "success", "healthy", "alive", "converged", "durable", "kept", "shipped", "connected", "driven"],
  busy: ["starting", "waiting", "paused", "pausing", "draining", "drained", "queued", "pending", "init", "updating", "loading", "resuming", "saving", "tuning"],
  warn: ["warning", "stalled", "silent", "suspected", "restarting", "exited", "stopping", "stale", "filtered", "late", "waits"],
  bad: ["error", "failed", "evicted", "refused", "dead", "killed", "lost", "diverged", "critical", "unreachable", "crashed"],
};
const MARKS = { good: "●", busy: "◐", warn: "▲", bad: "■", idle: "○" };

/** The tone of a state: `good`, `busy`, `warn`, `bad` or `idle`. The first word that is known decides. */
export function toneOf(state) {
  const words = String(state ?? "").toLowerCase().slice(0, 200).split(/[^a-z]+/);
  if (words[0] === "not") return "idle";
  for (const word of words) for (const [tone, known] of Object.entries(TONES)) if (known.includes(word)) return tone;
  return "idle";
}

/** A badge; `changeBadge` brings it up to date. */
export function badge(state, tone = toneOf(state)) {
  const node = element("span", { class: "badge" }, element("span", { class: "badge-mark", "aria-hidden": "true" }), element("span", { class: "badge-text" }));
  changeBadge(node, state, tone);
  return node;
}

/** Sets a badge's state. */
export function changeBadge(node, state, tone = toneOf(state)) {
  node.dataset.tone = tone;
  setText(node.firstChild, MARKS[tone] ?? MARKS.idle);
  setText(node.lastChild, visible(state, 40));
}
