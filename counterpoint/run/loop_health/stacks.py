"""Samples a thread's Python stack in microseconds, and describes it later.

Reading another thread's stack needs the GIL, which that thread waits for. So a sample has only code objects and instruction
offsets; lines, names and paths are found later. Used by `counterpoint/run/loop_health/blame.py`.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from types import CodeType, FrameType

Position = tuple[CodeType, int]
"""A code object and the offset of its current instruction, in bytes."""

Stack = tuple[Position, ...]
"""The frames of a thread, the innermost first."""

_LIBRARIES = frozenset(
    {
        "aiohttp", "aiosignal", "google", "jinja2", "markupsafe", "msgpack", "msgspec", "multidict", "numpy", "orjson",
        "prometheus_client", "pybase64", "pydantic", "rich", "scipy", "tokenizers", "torch", "transformers", "uvloop", "yarl",
        "zmq",
    }
)  # fmt: skip
"""Installed packages that are libraries, like the standard library: their caller is named instead. Any other installed package
may be an environment, whose code is named."""

_OURS = f"{PurePath(__file__).parents[2]}/"
"""The directory of our package `counterpoint`, in the repository or among the installed ones. Paths are shown from here."""

_SHOWN_FRAMES = 8


def stack_of(frame: FrameType | None) -> Stack:
    """Returns the stack that ends in `frame`. Holds the GIL for about a tenth of a microsecond per frame."""
    positions: list[Position] = []
    while frame is not None:
        positions.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(positions)


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A line of code, for a person."""

    function: str
    """The function's qualified name."""
    file: str
    """Relative to where it was imported from."""
    line: int
    inside: str = ""
    """The innermost function, if it is a library's."""
    ours: bool = False
    """Whether it is Counterpoint's own code, which its user cannot change."""


NOWHERE = CodePlace("", "", 0)
"""Stands for unknown code."""


def place_of(stack: Stack) -> CodePlace:
    """Returns the innermost place outside libraries; without one, the innermost of all. `NOWHERE` for an empty stack."""
    if not stack:
        return NOWHERE
    code, offset = next((position for position in stack if not _is_library(position[0].co_filename)), stack[0])
    innermost = stack[0][0]
    inside = innermost.co_qualname if innermost is not code else ""
    return CodePlace(
        code.co_qualname, _shown(code.co_filename), _line(code, offset), inside, _is_ours(code.co_filename)
    )


def is_known(stack: Stack) -> bool:
    """Whether the stack has code outside libraries."""
    return any(not _is_library(code.co_filename) for code, _ in stack)


def describe(stack: Sequence[Position]) -> str:
    """Returns one line for people: `inner (file:2) < outer (file:1)`; of a long stack both ends."""
    frames = [frame_name(position) for position in stack]
    if len(frames) > _SHOWN_FRAMES:
        frames[_SHOWN_FRAMES // 2 : -_SHOWN_FRAMES // 2] = ["..."]
    return " < ".join(frames)


def frame_name(position: Position) -> str:
    """Returns a frame for people: `function (file:line)`."""
    code, offset = position
    return f"{code.co_qualname} ({_shown(code.co_filename)}:{_line(code, offset)})"


def source_of(stack: Stack) -> str:
    """Returns the text of the line that `place_of` names; empty without source. May read the file."""
    place = place_of(stack)
    code = next((code for code, _ in stack if code.co_qualname == place.function), None)
    if code is None:
        return ""
    try:
        return linecache.getline(code.co_filename, place.line).strip()
    finally:
        linecache.cache.pop(code.co_filename, None)  # it would keep the whole file's lines, for good


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


@cache
def _is_library(file: str) -> bool:
    parts = PurePath(file).parts
    for directory in ("site-packages", "dist-packages"):
        if directory in parts:
            package = parts[parts.index(directory) + 1]
            return package.removesuffix(".py") in _LIBRARIES
    return file.startswith(("<frozen ", sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")))


@cache
def _is_ours(file: str) -> bool:
    return file.startswith(_OURS)


@cache
def _shown(file: str) -> str:
    directories = [_OURS, *(directory.rstrip("/") + "/" for directory in sys.path if directory)]
    return file.removeprefix(max((each for each in directories if file.startswith(each)), key=len, default=""))
