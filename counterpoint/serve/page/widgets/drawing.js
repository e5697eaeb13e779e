// Builds SVG drawings as shell/dom.js builds elements: texts stay texts, and no attribute can run code or load anything.
const NAMESPACE = "http://www.w3.org/2000/svg";
const ATTRIBUTES = /^(class|viewBox|width|height|x|y|x1|y1|x2|y2|cx|cy|r|rx|d|points|role|tabindex|transform|text-anchor|dominant-baseline|preserveAspectRatio|aria-[a-z]+|data-[a-z]+)$/;

/** Makes an SVG element. `properties` are attributes by name, `on` listeners by event; `null` leaves an attribute out. */
export function drawing(name, properties = {}, ...children) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (!ATTRIBUTES.test(key)) throw new Error(`the attribute ${key} may not be set`);
    else if (value !== null && value !== undefined) node.setAttribute(key, String(value));
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/** A title, which browsers show where the reader points. */
export function titled(text) {
  return drawing("title", {}, text);
}

/** A scale from values to 0..1, logarithmic if they are positive and span more than two decades; null for what it does not have. */
export function scaleOf(values) {
  const known = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (known.length === 0) return { at: () => null, least: null, greatest: null, isLog: false };
  const least = known.reduce((a, b) => Math.min(a, b));
  const greatest = known.reduce((a, b) => Math.max(a, b));
  const isLog = least > 0 && greatest / least >= 100;
  const place = (value) => (isLog ? Math.log(value / least) / Math.log(greatest / least) : (value - least) / (greatest - least));
  const at = (value) => (typeof value !== "number" || !Number.isFinite(value) ? null : greatest > least ? place(value) : 0.5);
  return { at, least, greatest, isLog };
}
