// What people wrote about a run: its notes and tags, and the dialog that changes them. They are texts, whatever is in them.
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { field, openDialog } from "../widgets/dialog.js";

const MOST_CHARACTERS = 2000;

/** Makes the line of tags and notes; `update` takes the run as `/jobs/{job}/runs/{run}` has it. */
export function runNotes(context) {
  const tags = tagList((tag) => (location.hash = context.link("/", {}, { tag })));
  const text = element("p", { class: "run-notes" });
  const root = element("div", { class: "run-noted" }, tags.element, text);
  return {
    element: root,
    update(run) {
      tags.update(run.tags);
      setText(text, visible(run.notes, MOST_CHARACTERS));
      setAttribute(root, "hidden", run.tags.length === 0 && run.notes === "");
    },
  };
}

/** Asks for the notes and tags of a run, which has those of `run`; `send` posts what has changed. */
export function notesDialog(verb, name, run, send) {
  const before = run.tags.join(" ");
  return openDialog({
    title: `Notes on ${name}`,
    confirm: "Save",
    body: [
      verb.explanation,
      field({ name: "tags", label: "Tags", value: before, maxlength: 700, help: "Words of letters, digits and _ . : / = + -, with spaces between them; at most 16." }),
      field({ name: "notes", label: "Notes", type: "textarea", value: run.notes, maxlength: MOST_CHARACTERS, rows: 6 }),
    ],
    act: ({ tags, notes }) => send({ ...(notes !== run.notes && { notes }), ...(tags !== before && { tags: tags.split(/[\s,]+/).filter(Boolean) }) }),
  });
}

/** A list of tags, each a button that calls `pick`; `update` takes the tags. */
export function tagList(pick) {
  const list = element("span", { class: "tags" });
  return {
    element: list,
    update(tags) {
      keep(list, tags, (tag) => tag, (tag) => element("button", { type: "button", class: "tag", title: `Runs with the tag ${visible(tag, 40)}`, on: { click: () => pick(tag) } }, element("bdi", {}, visible(tag, 40))));
      setAttribute(list, "hidden", tags.length === 0);
    },
  };
}
