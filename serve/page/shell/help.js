// The dialog that lists the keys.
import { element } from "./dom.js";
import { openDialog } from "../widgets/dialog.js";

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
    title: "Keys",
    wide: true,
    body: element("div", { class: "help" }, section("Anywhere", shortcuts), section("On a chart (Tab reaches it)", CHARTS)),
  });
}

function section(title, shortcuts) {
  const rows = shortcuts.map(({ keys, text }) => element("tr", {}, element("th", { scope: "row" }, keys.split(" ").map((key) => [element("kbd", {}, key), " "])), element("td", {}, text)));
  return element("section", {}, element("h3", {}, title), element("table", { class: "keys" }, element("tbody", {}, rows)));
}
