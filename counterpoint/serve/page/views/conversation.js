// A prompt's text as messages, as `counterpoint/job/reading/rollouts/conversation.py` has them: split where the usual chat templates begin one. What an environment wrote may look like a template's token:
// the text as it was sent is shown on request (views/rollout.js), and what a model wrote is never split.

/** Where a message begins; a group is its role. Those of ChatML, Llama, Gemma, DeepSeek, Phi and GLM, and Mistral. */
const BEGINNING = /<\|im_start\|>\s*(\w+)\n?|<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n?|<｜(User|Assistant)｜>|<\|(system|user|assistant|tool|developer|observation)\|>\n?|\[(\/?INST)\]/g;
const END = /(?<!\s)(?:\s*(?:<\|im_end\|>|<\|end\|>|<\|eot_id\|>|<\|eom_id\|>|<\|endoftext\|>|<\|end_of_text\|>|<end_of_turn>|<｜end▁of▁sentence｜>|<\/s>|<eos>))+\s*$/;
const START = /^\s*(?:<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<bos>|<s>)\s*/;
const ROLES = new Map(Object.entries({ inst: "user", "/inst": "assistant", model: "assistant" }));
const RESULT = /^\s*<tool_response>([\s\S]*)<\/tool_response>\s*$/;

/** The messages of a prompt, or of the part of it that is new, as `{role, text}`; without any token of a template, one without a role. */
export function messagesOf(prompt) {
  const begins = [...prompt.matchAll(BEGINNING)];
  const before = withoutEnd(prompt.slice(0, begins[0]?.index ?? prompt.length).replace(START, ""));
  const messages = begins.map((found, place) => {
    const role = found.slice(1).find((group) => group !== undefined).toLowerCase();
    const text = withoutEnd(prompt.slice(found.index + found[0].length, begins[place + 1]?.index ?? prompt.length));
    const result = RESULT.exec(text);
    return result ? { role: "tool", text: result[1] } : { role: ROLES.get(role) ?? role, text };
  });
  return [{ role: "", text: before }, ...messages].filter(({ text }) => text.trim() !== "");
}

/** A message without the tokens that end it. */
export function withoutEnd(text) {
  return text.slice(-2000).match(END) ? text.slice(0, -2000) + text.slice(-2000).replace(END, "") : text.replace(/\n+$/, "");
}
