// The dialog that changes keys of a run: every key that may change with its value, of which the reader edits some.
import { ApiError } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { openDialog } from "../widgets/dialog.js";

/**
 * Opens the dialog.
 *
 * @param {Object} context - The view's.
 * @param {Object} verb - Its entry in the table of verbs.
 * @param {{changeable: Object}} control - The keys that may change, with their values.
 * @param {function(Object): Promise} send - Posts the changes.
 */
export function changeDialog(context, verb, control, send) {
  const rows = Object.entries(control.changeable).map(([key, value]) => row(key, value));
  const filter = element("input", { type: "search", class: "filter", placeholder: "Find a key", "aria-label": "Find a key", on: { input: () => narrow() } });
  const narrow = () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const { key, node, input } of rows) setAttribute(node, "hidden", !key.toLowerCase().includes(wanted) && input.value === input.defaultValue);
  };
  const count = element("p", { class: "muted", role: "status" }, "Nothing is changed yet.");
  const list = element("div", { class: "keys-to-change", on: { input: () => setText(count, summary(rows)) } }, rows.map(({ node }) => node));
  return openDialog({
    title: `${verb.label} ${visible(context.parameters.run, 64)}`,
    confirm: verb.label,
    wide: true,
    body: rows.length === 0 ? "Which keys may change is not known: the run has not begun, or its configuration cannot be read." : [verb.explanation, filter, list, count],
    act: () => {
      const changes = Object.fromEntries(rows.filter(isChanged).map(({ key, value, input }) => [key, parsed(key, value, input.value)]));
      if (Object.keys(changes).length === 0) throw new ApiError(0, { what: "No value is changed", advice: "Edit a value, or cancel." });
      return send({ changes });
    },
  });
}

function row(key, value) {
  const id = `key-${key}`;
  const text = typeof value === "string" ? value : JSON.stringify(value);
  const input = element("input", { id, name: key, value: text, spellcheck: "false", autocomplete: "off", class: "mono" });
  return { key, value, input, node: element("div", { class: "key-row" }, element("label", { for: id, class: "mono" }, element("bdi", {}, visible(key, 80))), input) };
}

function isChanged({ input }) {
  return input.value !== input.defaultValue;
}

function summary(rows) {
  const changed = rows.filter(isChanged);
  return changed.length === 0 ? "Nothing is changed yet." : changed.map(({ key, input }) => `${visible(key, 60)}: ${visible(input.defaultValue, 30)} → ${visible(input.value, 30)}`).join("; ");
}

/** A value as its key had it: a text stays a text, everything else is JSON. */
function parsed(key, value, text) {
  if (typeof value === "string") return text;
  try {
    return JSON.parse(text.trim());
  } catch {
    throw new ApiError(0, { what: `${key} cannot have this value`, where: key, value: text, expected: value === null ? "JSON, such as 0.5 or \"text\"" : `JSON, as ${JSON.stringify(value).slice(0, 80)}` });
  }
}
