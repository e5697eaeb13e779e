// Controls that fold behind a button where there is no room for them: on a phone a view begins with what it shows.
import { element } from "../shell/dom.js";

const NARROW = matchMedia("(max-width: 640px)");

/** Makes a box with `children` that is open on a wide screen, and on a narrow one if `isUsed()`, such as a filter that is set. */
export function fold(text, isUsed, ...children) {
  const box = element("details", { class: "fold" }, element("summary", { class: "button small" }, text), element("div", { class: "controls" }, children));
  const follow = () => { box.open = !NARROW.matches || isUsed(); };
  NARROW.addEventListener("change", follow);
  follow();
  return { element: box, destroy: () => NARROW.removeEventListener("change", follow) };
}
