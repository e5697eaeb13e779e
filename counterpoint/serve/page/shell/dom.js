// Builds and changes the page's elements. Every text of a job goes through `textContent` here; nothing in the page parses text
// as HTML, so that what a model wrote stays text.

/**
 * Makes an element.
 *
 * @param {string} name - Its tag.
 * @param {Object} [properties] - Attributes by name; `class`, `dataset` (an object) and `on` (listeners by event) besides. An
 *   attribute of `false`, `null` or `undefined` is left out; `true` is written without a value.
 * @param {...(Node|string|number|null|undefined|Array)} children - Nodes, and texts that stay texts.
 */
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (key === "dataset") Object.assign(node.dataset, value);
    else setAttribute(node, key, value);
  }
  node.append(...nodes(children));
  return node;
}

/** Makes an icon of the page's own paths (`d` of a 16 x 16 drawing); screen readers skip it. */
export function icon(d) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" })) svg.setAttribute(key, value);
  const path = document.createElementNS(namespace, "path");
  path.setAttribute("d", d);
  svg.append(path);
  return svg;
}

/** Sets or removes an attribute. Only links within the page, and none that runs code, are allowed as `href`. */
export function setAttribute(node, name, value) {
  if (/^on|^style$|^srcdoc$/i.test(name)) throw new Error(`the attribute ${name} may not be set`);
  if (name === "href" && !String(value).startsWith("#")) throw new Error(`${value} is no link within the page`);
  if (value === false || value === null || value === undefined) node.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
}

/** Sets a node's text, and leaves an equal text alone: selections survive, and screen readers stay silent. */
export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

/** Replaces a node's children, unless they are these already. */
export function setChildren(node, ...children) {
  const wanted = nodes(children);
  if (wanted.length === node.childNodes.length && wanted.every((child, index) => child === node.childNodes[index])) return;
  node.replaceChildren(...wanted);
}

/**
 * Keeps one child a key, in the order of `items`: children that stay are not touched, so that they keep focus and scroll.
 *
 * @param {Element} parent
 * @param {Array} items
 * @param {function(*): string} keyOf
 * @param {function(*): Element} make - Makes an item's child.
 * @param {function(Element, *): void} [change] - Brings a child up to date, also right after it was made.
 */
export function keep(parent, items, keyOf, make, change = () => {}) {
  const before = parent.keptChildren ?? new Map();
  const after = new Map();
  let position = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue;
    const child = before.get(key) ?? make(item);
    before.delete(key);
    after.set(key, child);
    change(child, item);
    if (child === position) position = position.nextSibling;
    else parent.insertBefore(child, position);
  }
  for (const child of before.values()) child.remove();
  parent.keptChildren = after;
}

/** The texts and nodes of nested lists, without the empty ones, as nodes. */
function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}
