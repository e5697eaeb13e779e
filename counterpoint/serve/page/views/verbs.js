// What may be done to a run or a server, as `GET /verbs` tells (the server's table is `counterpoint/job/admin/verbs.py`): a button for each verb, the
// dialog that asks before it acts, and what is told of its end.
import { element } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { field, openDialog, toast } from "../widgets/dialog.js";

const SOON_MILLISECONDS = 2500;
const LATER = Symbol("later");

/** Makes the button of a verb. */
export function verbButton(verb, onClick) {
  const text = verb.asks_first ? `${verb.label}…` : verb.label;
  return element("button", { type: "button", class: "button small", title: verb.summary, disabled: true, on: { click: onClick } }, text);
}

/** Whether a verb applies to what is in these states. */
export function isOffered(verb, states) {
  return verb.when === "" || states.includes(verb.when);
}

/**
 * Does what a verb does, after a question if the verb asks first. A refusal is shown in the dialog, or else by a note.
 *
 * @param {Object} verb - An entry of the table.
 * @param {string} title - The dialog's.
 * @param {function(Object): Promise} send - Posts the values of the verb's fields.
 * @param {Node[]} [more] - Further fields of the dialog.
 */
export async function perform(verb, title, send, more = []) {
  if (!verb.asks_first) return orNote(() => send({}));
  return openDialog({
    title,
    confirm: verb.is_dangerous ? `${verb.label} the run` : verb.label,
    tone: verb.is_dangerous ? "danger" : "",
    body: [verb.explanation, Object.entries(verb.fields).map(([name, schema]) => fieldOf(verb, name, schema)), more],
    act: (values) => send(Object.fromEntries(Object.entries(values).map(([name, value]) => [name, verb.fields[name]?.type === "number" ? Number(value) : value]))),
  });
}

/** Does something; shows by a note why it is refused. */
export async function orNote(action) {
  try {
    return await action();
  } catch (error) {
    toast(sentenceOf(error), "bad");
    return null;
  }
}

/** A field of a verb's dialog, from its JSON schema. */
function fieldOf(verb, name, schema) {
  const label = name.replace(/^./, (first) => first.toUpperCase()).replaceAll("_", " ");
  const help = schema.description;
  if (schema.type === "number") {
    return field({ name, label, help, type: "number", value: String(schema.default), min: schema.minimum ?? schema.exclusiveMinimum, max: schema.maximum, step: "any", required: true });
  }
  const required = name === "reason" && verb.needs_reason;
  return field({ name, label: required ? label : `${label} (optional)`, help, maxlength: schema.maxLength, required });
}

/**
 * Waits a moment for a change. If it has not ended by then, the dialog may close: the end is told by a note.
 *
 * `more` makes a link of the answer, for the note. Throws what the server refused within the moment.
 */
export async function inBackground(request, verb, more = () => null) {
  let isSoon = true;
  const told = request.then(
    (answer) => {
      toast(visible(answer.sentence, 1000), "good", more(answer));
      return answer;
    },
    (error) => {
      if (isSoon) throw error;
      toast(`${verb.label}: ${sentenceOf(error)}`, "bad");
      return null;
    },
  );
  const later = new Promise((resolve) => setTimeout(() => resolve(LATER), SOON_MILLISECONDS));
  const first = await Promise.race([told, later]);
  if (first !== LATER) return first;
  isSoon = false;
  toast(`Asked for: ${verb.label}. Its end will be told here.`);
  return true;
}

/** What a refusal says, as one sentence. */
export function sentenceOf(error) {
  const { what, expected, advice } = error.problem ?? { what: error.message };
  return [what, expected && `expected ${expected}`, advice].filter(Boolean).join("; ");
}
