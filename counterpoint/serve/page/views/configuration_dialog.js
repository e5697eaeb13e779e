// Shows a run's configuration as its orchestrator resolved it, which keys the job's file gives, what was changed since, and where those of
// other runs differ. Secrets are hidden by the server.
import { element } from "../shell/dom.js";
import { passage, visible, whole } from "../shell/format.js";
import { openDialog } from "../widgets/dialog.js";

/** Keys that differ between any two runs. */
const OF_EACH = new Set(["run_id", "output_dir"]);

/** Opens the dialog for an answer of `/jobs/{job}/runs/{run}`; `others` are the label and the configuration of runs to compare with. */
export function showConfiguration(run, { configuration, given, changes, changes_error: error }, others = []) {
  const entries = flat(configuration);
  const isGiven = (key) => Object.hasOwn(given, key);
  const hasFile = entries.some(([key]) => isGiven(key));
  const filter = element("input", { type: "search", class: "filter", placeholder: "Find a key", "aria-label": "Find a key", on: { input: () => narrow() } });
  const only = element("input", { type: "checkbox", on: { input: () => narrow() } });
  const rows = entries.map(([key, value]) => element("tr", { class: isGiven(key) ? "given" : null }, element("th", { scope: "row", class: "mono" }, element("bdi", {}, visible(key, 100))), element("td", { class: "mono" }, element("bdi", {}, passage(value, 400)), isGiven(key) && element("span", { class: "default" }, given[key] ? `in the file; default ${visible(given[key], 60)}` : "in the file"))));
  const narrow = () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const [index, [key, value]] of entries.entries()) rows[index].hidden = !`${key} ${value}`.toLowerCase().includes(wanted) || (only.checked && !isGiven(key));
  };
  const list = element("table", { class: "data compact" }, element("caption", { class: "visually-hidden" }, "Configuration"), element("tbody", {}, rows));
  const history = changes.slice(-50).reverse().map((change) => element("li", {}, `From step ${whole(change.step)}: `, element("bdi", { class: "mono" }, passage(Object.entries(change.changes).map(([key, value]) => `${key} = ${JSON.stringify(value)} (was ${JSON.stringify(change.given?.[key])})`).join(", "), 400))));
  return openDialog({
    title: `Configuration of ${visible(run, 64)}`,
    wide: true,
    body: [
      error && element("p", { class: "muted" }, passage(error, 400)),
      others.length > 0 && element("div", {}, element("h3", {}, "Where the runs differ"), differences([{ label: run, configuration }, ...others])),
      history.length > 0 && element("div", {}, element("h3", {}, "Changed since it began"), element("ul", { class: "change-list" }, history)),
      entries.length === 0 ? element("p", { class: "muted" }, "The run has not written its configuration yet.") : [element("div", { class: "controls" }, filter, hasFile && element("label", { class: "choice" }, only, "Only keys of the job's file")), element("div", { class: "configuration", tabindex: "0", role: "region", "aria-label": "Configuration" }, list)],
    ],
  });
}

/** A table of the keys whose values differ between runs, a column a run. */
function differences(runs) {
  const values = runs.map(({ configuration }) => new Map(flat(configuration)));
  const keys = [...new Set(values.flatMap((one) => [...one.keys()]))].filter((key) => !OF_EACH.has(key) && new Set(values.map((one) => one.get(key))).size > 1);
  if (keys.length === 0) return element("p", { class: "muted" }, "Their configurations are the same, but for id and directory.");
  const head = element("tr", {}, element("th", { scope: "col" }, "Key"), runs.map(({ label }) => element("th", { scope: "col" }, element("bdi", {}, visible(label, 100)))));
  const rows = keys.sort().map((key) => element("tr", {}, element("th", { scope: "row", class: "mono" }, element("bdi", {}, visible(key, 100))), values.map((one) => element("td", { class: "mono" }, element("bdi", {}, passage(one.get(key) ?? "–", 200))))));
  return element("div", { class: "configuration", tabindex: "0", role: "region", "aria-label": "Where the runs differ" }, element("table", { class: "data compact" }, element("caption", { class: "visually-hidden" }, "Keys that differ"), element("thead", {}, head), element("tbody", {}, rows)));
}

/** A nested configuration as dotted keys with their values as JSON. */
function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value) || Object.keys(value).length === 0) return prefix ? [[prefix, JSON.stringify(value)]] : [];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key));
}
