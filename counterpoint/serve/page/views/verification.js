// The mark of a run's receipts: asks the server to check the run against them, as `counterpoint verify` does, and shows the verdict.
import { fill } from "../shell/api.js";
import { element, setAttribute } from "../shell/dom.js";
import { visible, whole } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { openDialog } from "../widgets/dialog.js";
import { orNote } from "./verbs.js";

const PATH = "/jobs/{job}/runs/{run}/verification";
const TONES = { sound: "good", damaged: "bad", "broken chain": "bad" };

/** Makes the button that asks, and the mark that shows the verdict. `update` takes whether the run goes on: then nothing can be verified. */
export function verification(context) {
  const { job, run } = context.parameters;
  const mark = badge("");
  const button = element("button", { type: "button", class: "button small", on: { click: () => orNote(ask) } }, "Verify");
  setAttribute(mark, "hidden", true);

  async function ask() {
    if (button.hasAttribute("aria-busy")) return;
    button.setAttribute("aria-busy", "true");
    try {
      const found = await context.get(fill(PATH, { job, run }));
      changeBadge(mark, found.verdict === "sound" ? `verified, ${whole(found.steps)} receipts` : found.verdict, TONES[found.verdict] ?? "warn");
      setAttribute(mark, "hidden", false);
      openDialog({ title: `Receipts of ${visible(run, 64)}: ${found.verdict}`, wide: true, body: bodyOf(found) });
    } finally {
      button.removeAttribute("aria-busy");
    }
  }

  return {
    button,
    mark,
    update(isAlive) {
      setAttribute(button, "disabled", isAlive);
      setAttribute(button, "title", isAlive ? "The run goes on: verify it once it has ended" : "Checks the run against its receipts");
      if (isAlive) setAttribute(mark, "hidden", true); // the verdict was on fewer steps
    },
  };
}

/** What was found, checked and not checked, and the hash to note elsewhere. */
function bodyOf({ findings, more, checked, unchecked, head }) {
  const lines = [...findings, ...(more > 0 ? [`and ${whole(more)} more`] : [])];
  return [
    lines.length > 0 && element("ul", { class: "change-list" }, lines.map((text) => element("li", {}, element("bdi", {}, visible(text, 400))))),
    list("Checked", checked),
    list("Not checked", unchecked),
    head && element("p", {}, "Newest receipt: ", element("code", {}, visible(head, 64)), ". Note it elsewhere: it pins all before it."),
  ];
}

function list(title, counts) {
  const entries = Object.entries(counts).sort();
  return entries.length > 0 && element("div", {}, element("h3", {}, title), element("ul", {}, entries.map(([what, count]) => element("li", {}, `${visible(what, 200)}: ${whole(count)}`))));
}
