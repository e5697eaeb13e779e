// A row of single numbers with names and units: what one looks at first.
import { element, keep, setAttribute, setText } from "../shell/dom.js";

/** Makes the row; `update` takes a list of `{name, value, unit, tone, help}` whose values are texts. */
export function figures(label) {
  const root = element("dl", { class: "figures", "aria-label": label });
  return {
    element: root,
    update(items) {
      keep(root, items, (item) => item.name, make, change);
    },
  };
}

function make(item) {
  return element("div", { class: "figure", title: item.help ?? null }, element("dt", {}, item.name), element("dd", {}, element("span", {}), element("span", { class: "unit" })));
}

function change(node, item) {
  const [value, unit] = node.lastChild.children;
  setAttribute(node, "data-tone", item.tone || null);
  setText(value, item.value);
  setText(unit, item.unit ?? "");
}
