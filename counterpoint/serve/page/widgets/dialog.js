// A modal dialog with a form: the browser's own <dialog>, which keeps the focus inside, closes at Escape and gives the focus back.
import { element, setChildren } from "../shell/dom.js";
import { errorPanel } from "../shell/errors.js";

/**
 * Opens a dialog and waits until it is closed.
 *
 * @param {Object} options
 * @param {string} options.title
 * @param {Array|Node|string} options.body - What the dialog shows; fields may be in it.
 * @param {string} [options.confirm] - The text of the button that acts; without it there is only "Close".
 * @param {string} [options.tone] - `danger` for what cannot be undone.
 * @param {boolean} [options.wide]
 * @param {function(Object): Promise<*>} [options.act] - Called with the fields' values by name. While it runs the button waits;
 *   if it throws, the dialog stays and shows the error.
 * @returns {Promise<*>} What `act` returned; null if the reader closed the dialog.
 */
export function openDialog({ title, body, confirm = "", tone = "", wide = false, act = async () => true }) {
  const opener = document.activeElement;
  const problem = element("div", {});
  const button = confirm && element("button", { type: "submit", class: `button ${tone || "primary"}` }, confirm);
  const close = element("button", { type: "button", class: "button", on: { click: () => dialog.close() } }, confirm ? "Cancel" : "Close");
  const form = element("form", { class: "dialog-form", method: "dialog" }, element("h2", { id: "dialog-title" }, title), element("div", { class: "dialog-body" }, body), problem, element("div", { class: "dialog-buttons" }, close, button));
  const dialog = element("dialog", { class: `dialog${wide ? " wide" : ""}`, "aria-labelledby": "dialog-title" }, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    let result = null;
    let acting = false;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (!confirm || acting) return;
      acting = true;
      button.setAttribute("aria-busy", "true");
      problem.replaceChildren();
      try {
        result = await act(Object.fromEntries(new FormData(form)));
        dialog.close();
      } catch (error) {
        setChildren(problem, errorPanel(error));
      } finally {
        acting = false;
        button.removeAttribute("aria-busy");
      }
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close();
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (opener instanceof HTMLElement && opener.isConnected) opener.focus();
      resolve(result);
    });
    dialog.showModal();
    (form.querySelector("input, select, textarea") || button || close).focus();
    dialog.scrollTop = 0; // a long one begins at its beginning, wherever its buttons are
  });
}

/** Closes the dialog that was opened last, if one is open. */
export function closeDialog() {
  [...document.querySelectorAll("dialog[open]")].at(-1)?.close();
}

/** A labelled field of a dialog. `type` is of an input, or `textarea`, or `select` with `options` (`{value, text}`). */
export function field({ name, label, type = "text", value = "", help = "", options = [], ...attributes }) {
  const id = `field-${name}`;
  const common = { id, name, "aria-describedby": help ? `${id}-help` : null, ...attributes };
  let control;
  if (type === "select") {
    control = element("select", common, options.map((option) => element("option", { value: option.value, selected: option.value === value }, option.text ?? option.value)));
  } else {
    control = element(type === "textarea" ? "textarea" : "input", type === "textarea" ? common : { type, ...common });
    control.value = value;
  }
  return element("div", { class: "field" }, element("label", { for: id }, label), control, help && element("p", { class: "field-help", id: `${id}-help` }, help));
}

/**
 * A note at the edge of the page, also read out. Good news without a link leave by themselves; all else stays until it is closed, so
 * that nobody has to be quick. Of more than four, good ones make room before others, the new one, too. `more` is shown behind the text: a link to what
 * it tells of.
 */
export function toast(text, tone = "good", more = null) {
  const close = element("button", { type: "button", class: "icon-button", "aria-label": "Close this note", on: { click: () => note.remove() } }, "\u00d7");
  const note = element("div", { class: "toast", dataset: { tone } }, element("span", {}, text, more && [" ", more]), close);
  const toasts = document.getElementById("toasts");
  toasts.append(note);
  while (toasts.children.length > 4) {
    const good = [...toasts.children].find((each) => each !== note && each.dataset.tone === "good");
    (good ?? (tone === "good" ? note : toasts.firstChild)).remove();
  }
  if (tone === "good" && !more) setTimeout(() => note.remove(), 8000);
  document.getElementById("announcer").textContent = text;
}
