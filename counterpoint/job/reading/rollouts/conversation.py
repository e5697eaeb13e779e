"""The text of a recorded prompt as messages: split where the usual chat templates begin one.

A prompt's text may hold what looks like a template's token, since an environment or a person wrote it: this is for reading, and
the text as it was sent is shown on request. What a model wrote is never split. The page does the same
(`counterpoint/serve/page/views/conversation.js`).
"""

from __future__ import annotations

import re
from itertools import pairwise

_BEGINNING = re.compile(
    r"<\|im_start\|>\s*(\w+)\n?|<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n?"
    r"|<\uff5c(User|Assistant)\uff5c>|<\|(system|user|assistant|tool|developer|observation)\|>\n?|\[(/?INST)\]"
)
"""The beginning of a message; a group is its role. The forms: ChatML, Llama, Gemma, DeepSeek, Phi and GLM, and Mistral."""

_END = re.compile(
    r"(?<!\s)(?:\s*(?:<\|im_end\|>|<\|end\|>|<\|eot_id\|>|<\|eom_id\|>|<\|endoftext\|>|<\|end_of_text\|>|<end_of_turn>"
    r"|<\uff5cend\u2581of\u2581sentence\uff5c>|</s>|<eos>))+\s*$"
)
"""It begins where no space is before it: else each of many spaces would be tried as its begin."""
_START = re.compile(r"^\s*(?:<\|begin_of_text\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>|<bos>|<s>)\s*")
_ROLES = {"inst": "user", "/inst": "assistant", "model": "assistant"}
_RESULT = re.compile(r"\s*<tool_response>(.*)</tool_response>\s*", re.DOTALL)

_LOOKED_AT = 2000
"""Characters at the end of a text in which the tokens that end it are looked for."""


def messages_of(prompt: str) -> list[tuple[str, str]]:
    """Returns role and text of each message of a prompt, or of the part of it that is new.

    The role is empty for what no token of a template begins.
    """
    found = list(_BEGINNING.finditer(prompt))
    ends = [*(each.start() for each in found), len(prompt)]
    messages = [("", without_end(_START.sub("", prompt[: ends[0]])))]
    for begins, (_, end) in zip(found, pairwise(ends), strict=True):
        role = next(group for group in begins.groups() if group is not None).lower()
        text = without_end(prompt[begins.end() : end])
        result = _RESULT.fullmatch(text)
        messages.append(("tool", result[1]) if result else (_ROLES.get(role, role), text))
    return [(role, text) for role, text in messages if text.strip()]


def without_end(text: str) -> str:
    """Returns a message without the tokens that end it."""
    head, tail = text[:-_LOOKED_AT], text[-_LOOKED_AT:]
    return head + _END.sub("", tail) if _END.search(tail) else text.rstrip("\n")
