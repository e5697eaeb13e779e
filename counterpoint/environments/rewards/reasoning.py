"""Finds where the reasoning of a model ends in its text.

A server without a reasoning parser leaves it there. The marks are those of the models that vLLM's parsers know, and of prompts
that ask for reasoning in tags. A mark in quotation marks is a mention of it.
"""

from __future__ import annotations

import re

_NAME = r"(?:think\w*|thoughts?|reason(?:ing)?|reflection|analysis|scratchpad)"
_TAG = rf"(?:\w+[:|])?{_NAME}(?::\w+)?"
_OPENS = (
    rf"<{_TAG}\s*>",
    r"\[THINK\]",
    "◁think▷",
    r"<\|(?:START_THINKING|begin_of_(?:thought|reasoning)|content_thinking|channel\|>\s*(?:analysis|commentary)\b|plamo:begin_think)",
    r"<\|channel>\s*thought\b",
    r"<\|open\|>\s*think\s*<\|sep\|>",
    r"\A\s*(?:analysis(?=[A-Z])|Here(?:'s| is) my thought process:)",
)
_ENDS = (
    rf"</{_TAG}\s*>",
    r"\[/THINK\]",
    "◁/think▷",
    r"<\|(?:END_THINKING\|>|end_of_(?:thought|reasoning)\|>|content_text\|>|channel\|>\s*final\b|plamo:end_think:plamo\|>)",
    r"<channel\|>",
    r"<\|close\|>\s*think\s*<\|sep\|>",
    r"assistantfinal|Here(?:'s| is) my response:",
)
_UNQUOTED = r"(?:(?:(?<!`)|(?<=``))(?:{0})|(?<=`)(?:{0})(?!`(?!`)))(?!['\"])"
_OPEN = re.compile(_UNQUOTED.format("|".join(_OPENS)), re.IGNORECASE)
_END = re.compile(_UNQUOTED.format("|".join(_ENDS)), re.IGNORECASE)


_SPEAKS_OF_IT = re.compile(rf"\b{_NAME}\b|◁|assistantfinal", re.IGNORECASE)


def answer_for(pattern: str, completion: str) -> str:
    """Returns what an operator's expression is searched in: what is behind the reasoning, or all if it speaks of reasoning."""
    return completion if _SPEAKS_OF_IT.search(pattern) else after_reasoning(completion)


def after_reasoning(text: str, *, opened_only_at_start: bool = False) -> str:
    """Returns what stands behind the last end of reasoning, up to the next mark that opens it again.

    Reasoning that has no end, as of an answer that was cut, is reasoning up to the text's end. With `opened_only_at_start` a mark
    that opens it counts at the beginning only: a program may have one within.
    """
    *_, end = [0, *(found.end() for found in _END.finditer(text))]
    opened = _OPEN.search(text, end)
    if opened is not None and opened_only_at_start and text[end : opened.start()].strip():
        opened = None
    return text[end:] if opened is None else text[end : opened.start()]
