// A table that sorts by a click on a heading, keeps its rows across updates, and draws at most some hundred of them.
import { element, keep, setAttribute, setChildren, setText } from "../shell/dom.js";
import { whole } from "../shell/format.js";

const ROWS = 100;
const SHARE_PIXELS = 140;

/** Characters from which a text may be cut, and is whole when it is pointed at. */
const CUT_FROM = 16;

/**
 * Makes a table.
 *
 * @param {Object} options
 * @param {string} options.caption - What it lists, for screen readers.
 * @param {Array<{key: string, title: string, unit?: string, number?: boolean, help?: string, wide?: boolean, width?: number, least?: number,
 *   value: function(*): *, cell?: function(*): (string|Node), change?: function(Element, *): void}>} options.columns - `value` sorts
 *   and, without `cell` or `change`, shows. `cell` makes text or a node anew for every update; `change` brings the given `<td>` up
 *   to date and so can keep what is in it. `number` aligns to the right. If any column has a `width` in pixels, tables of the same
 *   columns align with each other; a column without one takes what is left, and at least `least`.
 * @param {function(*): string} options.keyOf - A row's own key.
 * @param {string} [options.empty] - What an empty table says, and why it is empty.
 * @param {{key: string, descending: boolean}} [options.sort] - At first; without it the rows keep their order.
 * @param {boolean} [options.isStacked] - Whether each row is a block on a narrow screen, with the headings beside its values.
 * @param {function(*): string} [options.tone] - A row's tone (`bad`, `warn` or "").
 * @returns {{element: Element, update: function(Array): void}}
 */
export function table({ caption, columns, keyOf, empty = "Nothing here yet.", sort = null, isStacked = false, tone = () => "" }) {
  let rows = [];
  let shown = ROWS;
  let order = sort;
  const body = element("tbody", {});
  const headings = columns.map((column) => heading(column, () => sortBy(column)));
  const more = element("button", { type: "button", class: "button small", hidden: true, on: { click: () => draw((shown += 5 * ROWS)) } });
  const nothing = element("p", { class: "empty", hidden: true }, empty);
  const isFixed = columns.some((column) => column.width);
  const grid = element("table", { class: isFixed ? "data fixed" : "data" }, element("caption", { class: "visually-hidden" }, caption), widths(columns), element("thead", {}, element("tr", {}, headings)), body);
  if (isFixed) grid.style.minWidth = `${columns.reduce((sum, column) => sum + (column.width ?? column.least ?? SHARE_PIXELS), 0)}px`;
  const scroller = element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": caption }, grid);
  const box = element("div", { class: isStacked ? "table stacked" : "table" }, scroller, nothing, more);
  const showMore = () => {
    const left = scroller.scrollWidth - scroller.clientWidth - scroller.scrollLeft;
    setAttribute(box, "data-more", left > 1 ? "" : null);
  };
  scroller.addEventListener("scroll", showMore, { passive: true });
  new ResizeObserver(showMore).observe(scroller);

  function sortBy(column) {
    const isSame = order?.key === column.key;
    order = { key: column.key, descending: isSame ? !order.descending : Boolean(column.number) };
    draw();
  }

  function draw() {
    for (const [index, column] of columns.entries()) {
      const direction = order?.key !== column.key ? "none" : order.descending ? "descending" : "ascending";
      setAttribute(headings[index], "aria-sort", direction);
    }
    const sorted = order ? sortRows(rows, columns.find((column) => column.key === order.key), order.descending) : rows;
    keep(body, sorted.slice(0, shown), keyOf, () => element("tr", {}, columns.map((column) => element("td", { class: cellClass(column), dataset: { title: [column.title, column.unit].filter(Boolean).join(" ") } }))), (row, item) => {
      setAttribute(row, "data-tone", tone(item) || null);
      for (const [index, column] of columns.entries()) {
        changeCell(row.children[index], column, item);
        setAttribute(row.children[index], "data-unknown", isStacked && isMissing(column.value(item)));
      }
    });
    setAttribute(more, "hidden", sorted.length <= shown);
    setText(more, `Show more of ${whole(sorted.length)} rows`);
    setAttribute(scroller, "hidden", rows.length === 0);
    setAttribute(nothing, "hidden", rows.length > 0);
    showMore();
  }

  return {
    element: box,
    update(items) {
      rows = items;
      draw();
    },
  };
}

function heading(column, onClick) {
  const button = element("button", { type: "button", class: "sort", title: column.help ?? null, on: { click: onClick } }, column.title, column.unit && element("span", { class: "unit" }, column.unit));
  return element("th", { scope: "col", class: cellClass(column), "aria-sort": "none" }, button);
}

function widths(columns) {
  const group = element("colgroup", {}, columns.map(() => element("col", {})));
  for (const [index, column] of columns.entries()) if (column.width) group.children[index].style.width = `${column.width}px`;
  return group;
}

function cellClass(column) {
  return [column.number ? "number" : "text", column.wide ? "wide" : ""].join(" ").trim();
}

function changeCell(cell, column, item) {
  if (column.change) column.change(cell, item);
  else {
    const content = (column.cell ?? column.value)(item);
    if (content instanceof Node) setChildren(cell, content);
    else {
      setText(cell, content ?? "");
      if (!column.number) setAttribute(cell, "title", String(content ?? "").length > CUT_FROM ? content : null);
    }
  }
}

/** Sorted by a column, those without a value last whatever the direction. */
function sortRows(rows, column, descending) {
  const sign = descending ? -1 : 1;
  return [...rows].sort((first, second) => {
    const [a, b] = [column.value(first), column.value(second)];
    if (isMissing(a) || isMissing(b)) return Number(isMissing(a)) - Number(isMissing(b));
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  });
}

function isMissing(value) {
  return value === null || value === undefined || Number.isNaN(value);
}
