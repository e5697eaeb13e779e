// A name that is cut in its middle where there is no room for it: the names of a sweep's runs differ at their end.
import { element, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";

const MOST = 200;
const END = 14;

/** Makes an empty name; `changeName` fills it. */
export function nameOf(kind = "") {
  return element("bdi", { class: `name ${kind}`.trim() }, element("span", { class: "name-begin" }), element("span", { class: "name-end" }));
}

/** Brings a name up to date. Its last characters stay whole; what is before them is cut. */
export function changeName(node, name) {
  const characters = [...visible(name, MOST)];
  const at = characters.length > END + 4 ? characters.length - END : characters.length;
  setText(node.firstChild, characters.slice(0, at).join(""));
  setText(node.lastChild, characters.slice(at).join(""));
}
