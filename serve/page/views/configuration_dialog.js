// Shows a run's configuration as its orchestrator resolved it, and what was changed since. Secrets are hidden by the server.
import { element } from "../shell/dom.js";
import { passage, visible, whole } from "../shell/format.js";
import { openDialog } from "../widgets/dialog.js";

/** Opens the dialog for an answer of `/jobs/{job}/runs/{run}`. */
export function showConfiguration(run, { configuration, changes, changes_error: error }) {
  const entries = flat(configuration);
  const filter = element("input", { type: "search", class: "filter", placeholder: "Find a key", "aria-label": "Find a key", on: { input: () => narrow() } });
  const rows = entries.map(([key, value]) => element("tr", {}, element("th", { scope: "row", class: "mono" }, element("bdi", {}, visible(key, 100))), element("td", { class: "mono" }, element("bdi", {}, passage(value, 400)))));
  const narrow = () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const [index, [key, value]] of entries.entries()) rows[index].hidden = !`${key} ${value}`.toLowerCase().includes(wanted);
  };
  const list = element("table", { class: "data compact" }, element("caption", { class: "visually-hidden" }, "Configuration"), element("tbody", {}, rows));
  const history = changes.slice(-50).reverse().map((change) => element("li", {}, `From step ${whole(change.step)}: `, element("bdi", { class: "mono" }, passage(Object.entries(change.changes).map(([key, value]) => `${key} = ${JSON.stringify(value)} (was ${JSON.stringify(change.given?.[key])})`).join(", "), 400))));
  return openDialog({
    title: `Configuration of ${visible(run, 64)}`,
    wide: true,
    body: [
      error && element("p", { class: "muted" }, passage(error, 400)),
      history.length > 0 && element("div", {}, element("h3", {}, "Changed since it began"), element("ul", { class: "change-list" }, history)),
      entries.length === 0 ? element("p", { class: "muted" }, "The run has not written its configuration yet.") : [filter, element("div", { class: "configuration", tabindex: "0", role: "region", "aria-label": "Configuration" }, list)],
    ],
  });
}

/** A nested configuration as dotted keys with their values as JSON. */
function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value) || Object.keys(value).length === 0) return prefix ? [[prefix, JSON.stringify(value)]] : [];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key));
}
