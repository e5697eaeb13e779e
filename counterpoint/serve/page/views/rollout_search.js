// The search in the texts of a run's rollouts: a form, what was found so far, and a button that goes on where the server's time ended.
import { fill } from "../shell/api.js";
import { element, setChildren, setText } from "../shell/dom.js";
import { bytes, number, visible, whole } from "../shell/format.js";
import { ROLLOUT } from "./rollouts.js";

const SEARCH = "/jobs/{job}/runs/{run}/rollouts/search";
const MOST_HITS = 200;

/** Makes the search; `filters` returns the list's filters, which hold for the search, too. */
export function rolloutSearch(context, filters) {
  const text = element("input", { type: "search", class: "filter", placeholder: "Search their texts", "aria-label": "Search the texts of rollouts", maxlength: 200, value: context.query.text ?? null });
  const first = stepInput("From step");
  const last = stepInput("To step");
  const form = element("form", { class: "controls search", role: "search", on: { submit: (event) => { event.preventDefault(); begin(); } } }, text, first, last, element("button", { type: "submit", class: "button small" }, "Search"));
  const summary = element("p", { class: "muted", role: "status" });
  const hits = element("ol", { class: "hits" });
  const more = element("button", { type: "button", class: "button small", hidden: true, on: { click: () => ask() } }, "Search further");
  const close = element("button", { type: "button", class: "button small", on: { click: () => end() } }, "Close the search");
  const box = element("section", { class: "section", hidden: true, "aria-label": "What the search found" }, element("div", { class: "section-head" }, summary, element("span", { class: "spacer" }), more, close), hits);
  let asked = 0;
  let state = null;

  function begin() {
    const wanted = text.value;
    if (wanted === "") return end();
    state = { query: { ...filters(), text: wanted, first_step: first.value, last_step: last.value }, found: 0, searched: 0, bytes: 0, problems: 0, goOn: null };
    setChildren(hits);
    box.hidden = false;
    ask();
  }

  async function ask() {
    const number_ = ++asked;
    more.hidden = true;
    setText(summary, state.searched > 0 ? `${whole(state.searched)} rollouts searched, searching further` : "Searching");
    let answer;
    try {
      answer = await context.get(fill(SEARCH, context.parameters), { ...state.query, go_on: state.goOn });
    } catch (error) {
      if (number_ === asked && error.name !== "AbortError") setText(summary, visible(error.problem?.what ?? error.message, 300));
      return;
    }
    if (number_ === asked) show(answer);
  }

  function show(answer) {
    state.found += answer.hits.length;
    state.searched += answer.searched;
    state.bytes += answer.read_bytes;
    state.problems += answer.problems;
    state.goOn = answer.go_on;
    for (const hit of answer.hits) if (hits.childElementCount < MOST_HITS) hits.append(hitLine(context, hit));
    const unread = state.problems > 0 ? `, ${whole(state.problems)} lines or files could not be searched` : "";
    const ended = state.goOn === null ? "Searched everything" : "Not everything is searched yet";
    setText(summary, `${whole(state.found)} found. ${ended}: ${whole(state.searched)} rollouts, ${bytes(state.bytes)}${unread}.`);
    more.hidden = state.goOn === null || hits.childElementCount >= MOST_HITS;
  }

  function end() {
    asked += 1;
    box.hidden = true;
    setChildren(hits);
  }

  return { form, element: box, destroy: end };
}

function hitLine(context, hit) {
  const { job, run } = context.parameters;
  const { step, number: line, rollout_id: id, reward, environment } = hit.rollout;
  const where = hit.turn === null ? hit.part : `${hit.part} of turn ${whole(hit.turn + 1)}`;
  return element("li", { class: "hit" },
    element("a", { href: context.link(ROLLOUT, { job, run, step, number: line }) }, element("bdi", {}, `step ${whole(step)}, ${visible(id, 24)}`)),
    element("span", { class: "muted" }, ` ${visible(environment, 40)}, reward ${number(reward)}, ${where}`),
    element("bdi", { class: "mono hit-text" }, visible(hit.before, 100), element("mark", {}, visible(hit.found, 220)), visible(hit.after, 100)));
}

function stepInput(label) {
  return element("input", { type: "number", min: 0, class: "filter short", placeholder: label, "aria-label": label });
}
