// The line below the top that says when the page is not up to date: not connected since, or paused.
import { element, setChildren, setText } from "./dom.js";
import { clock, passage } from "./format.js";

/** Returns the function that a `Poller` tells its state. */
export function connectionLine(retry, resume) {
  const line = document.getElementById("connection");
  const text = element("span", {});
  const wait = element("span", { class: "muted" });
  const again = element("button", { type: "button", class: "button small", on: { click: retry } }, "Try now");
  const onward = element("button", { type: "button", class: "button small", on: { click: resume } }, "Resume");
  let timer = null;
  return ({ state, since, next, error }) => {
    clearInterval(timer);
    document.documentElement.dataset.connection = state;
    document.dispatchEvent(new CustomEvent("connection", { detail: state }));
    if (state === "connected") {
      setChildren(line);
    } else if (state === "paused") {
      setText(text, "Updates are paused.");
      setChildren(line, text, onward);
    } else {
      const { what, advice } = error.problem ?? { what: "The page itself failed", advice: error.message };
      setText(text, `Not connected since ${clock(since / 1000)}. ${passage(what, 200)}. ${passage(advice ?? "", 200)}`);
      const count = () => setText(wait, `Next try in ${Math.max(0, Math.round((next - Date.now()) / 1000))} s.`);
      count();
      timer = setInterval(count, 1000);
      setChildren(line, text, wait, again);
    }
  };
}
