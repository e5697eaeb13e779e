// The logs of a job: the end of one, as it is written. Which one is in the address, so that a link shows the same.
import { fill } from "../shell/api.js";
import { element, setAttribute, setChildren, setText } from "../shell/dom.js";
import { bytes, visible, whole } from "../shell/format.js";

export const title = "Logs";
export const path = "/jobs/{job}/logs";
export const key = "u";
export const kinds = ["job", "cluster"];

const LOG = "/jobs/{job}/logs/{name}";
const LINES = 500;

/** Draws the view. */
export function render(root, context) {
  const names = element("select", { "aria-label": "Log", on: { change: () => { context.setQuery({ name: names.value }); context.refresh(); } } });
  const choice = element("div", { class: "controls", hidden: true }, names);
  const note = element("p", { class: "muted", role: "status" }, "Reading the job's logs.");
  const text = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "The end of the log" });
  let list = null;
  let shown = null;
  root.append(element("div", { class: "view-title" }, element("h1", {}, "Logs of ", element("bdi", {}, visible(context.parameters.job, 64)))), choice, note, text);

  function draw(answer) {
    const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 8;
    setText(text, answer.lines.join("\n"));
    setText(note, `${answer.cut ? `The last ${whole(answer.lines.length)} lines` : `${whole(answer.lines.length)} lines`}, ${bytes(answer.size)} in all. What looks like a key is left out.`);
    if (isAtEnd) text.scrollTop = text.scrollHeight;
  }

  return {
    async update() {
      const next = await context.get(fill(path, context.parameters));
      const wanted = next.names.includes(context.query.name) ? context.query.name : next.names[0];
      if (next !== list) setChildren(names, next.names.map((name) => element("option", { value: name }, visible(name, 100))));
      list = next;
      for (const part of [choice, text]) setAttribute(part, "hidden", wanted === undefined);
      if (wanted === undefined) return setText(note, "The job has no log yet.");
      names.value = wanted;
      const answer = await context.get(fill(LOG, { ...context.parameters, name: wanted }), { lines: LINES });
      if (answer === shown) return;
      shown = answer;
      draw(answer);
    },
    destroy() {},
  };
}
