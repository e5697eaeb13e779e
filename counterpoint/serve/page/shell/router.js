// Says which view the address asks for. The address after `#` is a path as the API's, `#/jobs/a/runs/b/loop?x=time`, whose parts
// are encoded; a view's `path` is its template. Nothing here draws.
import { fill } from "./api.js";

/** A link to a view within the page. */
export function link(template, parameters = {}, query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = search.toString();
  return `#${fill(template, parameters)}${text ? `?${text}` : ""}`;
}

/** What the address says: the parts of its path, decoded, and its query. An address that cannot be decoded is an empty one. */
export function parseAddress(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?", 2);
  try {
    const parts = path.split("/").filter((part) => part !== "").map(decodeURIComponent);
    return { parts, query: Object.fromEntries(new URLSearchParams(search)) };
  } catch {
    return { parts: [], query: {} };
  }
}

/**
 * Finds the view of an address.
 *
 * @param {Array<{path: string}>} views
 * @param {string} hash
 * @returns {{view: Object|null, parameters: Object, query: Object}} `view` is null if none has this address.
 */
export function route(views, hash) {
  const { parts, query } = parseAddress(hash);
  for (const view of views) {
    const template = view.path.split("/").filter((part) => part !== "");
    if (template.length !== parts.length) continue;
    const parameters = {};
    const fits = template.every((wanted, index) => {
      const name = /^\{(\w+)\}$/.exec(wanted)?.[1];
      if (name) parameters[name] = parts[index];
      return name !== undefined || wanted === parts[index];
    });
    if (fits) return { view, parameters, query };
  }
  return { view: null, parameters: {}, query };
}

/** The names of a template's parameters, in their order. */
export function parametersOf(template) {
  return [...template.matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
}
