// The profiles of a run's event loop as flame graphs: what the orchestrator's loop did while it was sampled.
import { fill } from "../shell/api.js";
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { clock, seconds, visible } from "../shell/format.js";
import { flameGraph } from "../widgets/flame_graph.js";

export const title = "Profile";
export const path = "/jobs/{job}/runs/{run}/profiles";
export const key = "b";

const NONE = "No profile has been taken. While the run goes on, the button Profile in its view takes one, as does `counterpoint profile`.";

/** Draws the view. */
export function render(root, context) {
  const graph = flameGraph({ label: "Time of the event loop by stack", announce: context.announce });
  const note = element("p", { class: "empty" }, "Reading the run's profiles.");
  const where = element("span", { class: "muted" });
  const choice = element("select", { "aria-label": "Which profile", on: { change: () => show(choice.value) } });
  const controls = element("div", { class: "controls", hidden: true }, choice, where);
  let shown = null;
  graph.element.hidden = true;
  root.append(element("div", { class: "view-title" }, element("h1", {}, "Profiles of ", element("bdi", {}, visible(context.parameters.run, 64)))), controls, note, graph.element);

  function show(name) {
    context.setQuery({ profile: name });
    context.refresh();
  }

  function drawList(profiles) {
    keep(choice, profiles, (one) => one.name, (one) => element("option", { value: one.name }), (node, one) => setText(node, `${clock(one.time)} · ${visible(one.name, 40)}`));
    setAttribute(controls, "hidden", profiles.length === 0);
  }

  function draw(answer) {
    graph.update(answer.frames);
    setText(where, answer.seconds > 0 ? `${seconds(answer.seconds)} sampled` : "");
    const isEmpty = answer.seconds <= 0;
    setText(note, answer.unreadable ? visible(answer.unreadable, 300) : isEmpty ? "This profile has no samples." : "");
    setAttribute(note, "hidden", !isEmpty);
    setAttribute(graph.element, "hidden", isEmpty);
  }

  return {
    async update() {
      const { profiles } = await context.get(fill(path, context.parameters));
      drawList(profiles);
      const wanted = context.query.profile ?? shown?.name ?? profiles[0]?.name;
      if (wanted === undefined) return setText(note, NONE);
      if (shown?.name !== wanted) {
        const answer = await context.get(fill(`${path}/{profile}`, { ...context.parameters, profile: wanted }));
        if (wanted !== (context.query.profile ?? wanted)) return;
        shown = answer;
        draw(answer);
      }
      choice.value = wanted;
    },
    destroy: () => {},
  };
}
