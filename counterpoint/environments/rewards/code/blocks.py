"""Finds the program in a completion.

It is the last block of Python, else the last one without a language, as the known harnesses have it. Fences are those of
CommonMark; beyond it a fence may follow text in its line, as models write it. A completion is hostile: each line is read once.
"""

from __future__ import annotations

import re
from codeop import compile_command

from counterpoint.environments.rewards.reasoning import after_reasoning

_LONGEST = 1000
"""Characters of a line that is compiled to see whether it is code."""
_PYTHON = re.compile(r"(?:i?python|pypy|py)[0-9.]*", re.IGNORECASE)
_LANGUAGE = re.compile(r"\s*\{?\.?([^\s{},:;=()]*)")
_WORD = re.compile(r"\s*[A-Za-z][\w+#.-]*\s*")
_PREFIX = re.compile(r"[\s>]*(?:(?:[-*+]|\d{1,9}[.)])\s+)?")
"""What CommonMark has before a fence: quotes, the mark of a list's item, an indentation."""
_MOST_INDENTED = 64


class _Block:
    """A fenced block while it is read."""

    def __init__(self, fence: str, language: str, before: str) -> None:
        self._fence = fence
        self.is_python = _PYTHON.fullmatch(language) is not None
        self.has_language = bool(language)
        self._lines: list[str] = []
        self._is_in_text = False
        """The line is in a text of three quotation marks."""
        quotes = min(before.count(">"), _MOST_INDENTED)
        indented = min(len(before.rpartition(">")[2].removeprefix(" " if quotes else "")), _MOST_INDENTED)
        self._prefix = re.compile(rf"(?:\s*> ?){{0,{quotes}}}\s{{0,{indented}}}") if before else None

    @property
    def text(self) -> str:
        """What was read so far."""
        return "\n".join(self._lines)

    def ends_with(self, line: str) -> str | None:
        """Takes a line; returns what stands behind the fence if the block ends with it, else None."""
        line = line if self._prefix is None else self._prefix.sub("", line, count=1)
        mark = self._fence[0]
        content = line.lstrip()
        behind = content.lstrip(mark)
        if len(content) - len(behind) >= len(self._fence):
            is_indented = len(line) - len(content) > 3
            if not (is_indented and (self._is_in_text or behind.strip())):
                return behind
        code = line.rstrip().rstrip(mark)
        if (
            len(line.rstrip()) - len(code) >= len(self._fence)
            and code
            and not code[-1].isspace()
            and not self._is_in_text
        ):
            self._lines.append(code)
            return ""
        self._lines.append(line)
        self._is_in_text ^= bool((line.count('"""') + line.count("'''")) % 2)
        return None


def _opened(line: str) -> _Block | None:
    """Returns the block that a line opens. Text may stand before the fence if nothing but Python follows."""
    start = min((at for mark in ("```", "~~~") if (at := line.find(mark)) >= 0), default=-1)
    before, info = line[:start], line[start:].lstrip(line[start : start + 1])
    if start < 0 or "`" in info:
        return None
    fence = line[start : len(line) - len(info)]
    found = _LANGUAGE.match(info)
    language = "" if found is None else found[1]
    if _PREFIX.fullmatch(before):
        return _Block(fence, language, before)
    return _Block(fence, language, "") if _PYTHON.fullmatch(info.strip()) else None


def _begins_as_code(text: str) -> bool:
    """Whether the first line that is no comment is one of a program: no sentence, which stands before a program that was cut.

    It may be one of a function's body, which the prompt began.
    """
    lines = (line.strip() for line in text.split("\n"))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if len(first) > _LONGEST or (re.fullmatch(r"[\w ]*", first) and not first.startswith(("import ", "return "))):
        return False
    for before in ("", "async def f():\n "):
        try:
            compile_command(before + first.rstrip("\r"), "<completion>", "exec")
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            continue
        return True
    return False


def code_of(completion: str) -> str | None:
    """Returns the last fenced block of Python, else the last without a language; None if there is neither.

    Blocks without text do not count, and the last may be open at the end. A completion without any fence is a program as a whole.
    One whose only fence ends a program, which the prompt began, is what stands before it. What comes before the end of reasoning
    does not count, nor reasoning without an end.
    """
    answer = after_reasoning(completion, opened_only_at_start=True)
    blocks: list[_Block] = []
    before: list[str] = []
    block: _Block | None = None
    for line in answer.split("\n"):
        behind = "" if block is None else block.ends_with(line)
        before += [line] if not blocks else []
        if behind is None:
            continue
        # A fence with a word behind it opens a block, also where the one before was never closed.
        block = _opened(line) if block is None or _WORD.fullmatch(behind) else None
        blocks += [] if block is None else [block]
    if not blocks:
        return answer if answer.strip() else None
    text = "\n".join(before[:-1])
    if block is not None and len(blocks) == 1 and not block.has_language and _begins_as_code(text):
        return text
    written = [each for each in blocks if each.text.strip()]
    found = [each for each in written if each.is_python] or [each for each in written if not each.has_language]
    return found[-1].text if found else None
