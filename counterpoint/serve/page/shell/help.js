// The dialog that lists the keys, and the words of ours that a reader may not know.
import { element } from "./dom.js";
import { openDialog } from "../widgets/dialog.js";
import { WORDS } from "./words.js";

const CHARTS = [
  { keys: "drag", text: "Zoom in" },
  { keys: "+ -", text: "Zoom in, zoom out" },
  { keys: "← →", text: "Move the cursor" },
  { keys: "Shift ← →", text: "Move the zoomed range" },
  { keys: "0", text: "Show everything again" },
  { keys: "Enter", text: "Open the point, where that is possible" },
];

/** Shows the page's shortcuts (`{keys, text}`) and those of charts. */
export function showHelp(shortcuts) {
  return openDialog({
    title: "Keys and words",
    wide: true,
    body: element("div", { class: "help" }, section("Anywhere", shortcuts), section("On a chart (Tab reaches it)", CHARTS), words()),
  });
}

function words() {
  return element("section", { class: "words" }, element("h3", {}, "Words (all are in docs/glossary.md)"), element("dl", { class: "pairs" }, Object.entries(WORDS).map(([word, meaning]) => [element("dt", {}, word), element("dd", {}, meaning)])));
}

function section(title, shortcuts) {
  const rows = shortcuts.map(({ keys, text }) => element("tr", {}, element("th", { scope: "row" }, keys.split(" ").map((key) => [element("kbd", {}, key), " "])), element("td", {}, text)));
  return element("section", {}, element("h3", {}, title), element("table", { class: "keys" }, element("tbody", {}, rows)));
}
