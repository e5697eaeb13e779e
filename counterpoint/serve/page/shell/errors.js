// Shows what went wrong: what, where, which value, what was expected, and what to do about it.
import { element } from "./dom.js";
import { passage } from "./format.js";

/** A panel for an error of the API, or of the page itself. */
export function errorPanel(error) {
  const problem = error.problem ?? { what: "The page itself failed", value: `${error.name}: ${error.message}`, advice: "Load the page again; please report it if it comes back." };
  const facts = [
    ["where", problem.where],
    ["value", problem.value],
    ["expected", problem.expected],
  ].filter(([, value]) => value !== undefined && value !== null && value !== "");
  return element(
    "div",
    { class: "error-panel", role: "alert" },
    element("p", { class: "error-what" }, passage(problem.what ?? "The server refused", 600)),
    facts.length > 0 &&
      element("dl", { class: "error-facts" }, facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, element("bdi", {}, passage(typeof value === "string" ? value : JSON.stringify(value), 600)))])),
    problem.advice && element("p", { class: "error-advice" }, passage(problem.advice, 600)),
  );
}
