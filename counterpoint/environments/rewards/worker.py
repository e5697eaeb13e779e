"""A process that works on hostile text: compares mathematics, searches with regular expressions, calls a user's function.

`processes.py` starts it by this file's path and speaks with it over its standard streams: frames of JSON, each after its length.
It imports little of ours before a task needs it, so that it starts quickly, and holds no secret. The kernel kills it once a task
takes more processor time than allowed (`ITIMER_PROF`), whatever code runs at that moment; memory is limited, too.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import re
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.process.launch import die_with_parent
from counterpoint.transport.process.priority import side_nice

_FRAMING = Framing(16 * 2**20)  # as `processes.py`
_QUOTES = re.compile(r"^ {0,3}(?:>+ )+", re.MULTILINE)
"""Markdown's marks of a quoted line, which are no signs of a bound."""


def compare_mathematics(answer: str, text: str, float_rounding: int, strict: bool) -> dict[str, Any]:
    """Returns whether the answer in `text`, behind its reasoning, equals `answer`, as math-verify decides where it is no text.

    An empty `text` only tells whether `answer` can be read. The library's own time limits are off: they are of a clock's time, so
    a busy machine would change a reward.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    from counterpoint.environments.rewards import mathematics
    from counterpoint.environments.rewards.mathematics import end_of, plain, rewritten, spaced
    from counterpoint.environments.rewards.reasoning import after_reasoning
    from counterpoint.environments.rewards.regions import are_joined_apart, may_be_said, region, same_region

    expected, gold, fault, area = _expected(answer, float_rounding, strict)
    text = spaced(_QUOTES.sub("", after_reasoning(text)))
    if text and area is not None and (area.is_said or may_be_said(end_of(text))):
        found_area = region(rewritten(end_of(text)))
        if found_area is not None:
            return {"equal": same_region(area, found_area, float_rounding, strict=strict), "found": True}
    if text and are_joined_apart(rewritten(end_of(spaced(answer))), rewritten(end_of(text))):
        return {"equal": False, "found": True}
    if expected.kind == "text":
        end = end_of(text)
        found = plain(end)
        return {"equal": expected.text in (found, mathematics.choice_in(end)), "found": bool(found)}
    if fault:
        return {"fault": fault}
    bases = mathematics.base_of(answer), mathematics.base_of(text)
    if all(bases) and bases[0] != bases[1]:
        return {"equal": False, "found": True}
    if text and (in_order := mathematics.as_tuple(spaced(answer), text)) is not None:
        gold = parse(f"${in_order}$", parsing_timeout=None, extraction_config=[LatexExtractionConfig()])
    target = parse(mathematics.answer_in(text, expected.kind), parsing_timeout=None) if text else []
    equal = bool(target) and verify(gold, target, float_rounding=float_rounding, strict=strict, timeout_seconds=None)
    return {"equal": bool(equal), "found": bool(target)}


@lru_cache(256)
def _expected(answer: str, float_rounding: int, strict: bool) -> tuple[Any, list[Any], str, Any]:
    """Returns an answer of the data, its expressions, what is wrong with it if none can be compared, and its region or None."""
    from math_verify import LatexExtractionConfig, parse, verify

    from counterpoint.environments.rewards import numeric
    from counterpoint.environments.rewards.mathematics import end_of, read, rewritten, spaced
    from counterpoint.environments.rewards.regions import region

    numeric.install()
    expected = read(answer)
    area = region(rewritten(end_of(spaced(answer))))
    if expected.kind == "text":
        return expected, [], "", area

    def equals(target: list[Any]) -> bool:
        return bool(verify(gold, target, float_rounding=float_rounding, strict=strict, timeout_seconds=None))

    only = {"extraction_config": [LatexExtractionConfig()]} if expected.kind == "formula" else {}
    gold = parse(expected.text, parsing_timeout=None, **only)  # a formula as a whole, and not a number in it
    if not gold:
        return expected, gold, "the expected answer has no mathematical expression", area
    if not (numeric.has_value(gold[0]) and equals(gold[:1])):
        return expected, gold, "the expected answer has no value that equals itself", area
    for wrong in numeric.wrong_answers(gold[0]):
        if equals([wrong]):
            return expected, gold, f"the expected answer is found to equal {str(wrong)[:200]}, too", area
    return expected, gold, "", area


def search(pattern: str, text: str) -> dict[str, Any]:
    """Returns the last match of `pattern` in `text`, as its first group, or as a whole if it has none; null if there is none.

    `span` is where it begins and ends, and where the whole match ends twice for a group that has no part in it.
    """
    matches = deque(re.finditer(pattern, text), maxlen=1)
    if not matches:
        return {"match": None, "span": None}
    last = matches[0]
    group = 1 if last.re.groups else 0
    span = last.span(group) if last[group] is not None else (last.end(), last.end())
    return {"match": last[group] or "", "span": span}


def call(path: str, example: dict[str, Any], completion: str, state: dict[str, Any]) -> dict[str, Any]:
    """Calls the function `module:name` of an operator; returns its value, or what it raised."""
    from counterpoint.environments.base import Example

    module, _, name = path.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(Example(**example), completion, state)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return {"value": json.loads(json.dumps(value, default=float))}
    except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
        return {"raised": f"{type(error).__name__}: {error}"[:2000]}


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {"mathematics": compare_mathematics, "search": search, "call": call}


def _answer(task: str, arguments: dict[str, Any], cpu_seconds: float) -> dict[str, Any]:
    try:
        if task != "search":  # before the clock runs: an import may take longer than any task
            importlib.import_module("math_verify" if task == "mathematics" else arguments["path"].partition(":")[0])
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        return _TASKS[task](**arguments)
    except MemoryError:
        return {"over_limit": "memory"}
    except RecursionError:
        return {"over_limit": "depth"}
    except ModuleNotFoundError as error:
        return {"missing": error.name or str(error)}
    except Exception as error:  # noqa: BLE001 - a library's failure is an answer, too
        return {"fault": f"{type(error).__name__}: {error}"[:2000]}


def _bound(parent: int, memory_bytes: int) -> None:
    die_with_parent(signal.SIGKILL, parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(side_nice())


def main() -> None:
    """Answers tasks until the parent closes the stream. Arguments: the parent's process id, and bytes of memory."""
    _bound(int(sys.argv[1]), int(sys.argv[2]))
    logging.disable(logging.CRITICAL)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whatever a library prints must not look like an answer
        os.dup2(nothing, descriptor)
    while (frame := _FRAMING.read(requests.read)) is not None:
        request = json.loads(frame)
        answer = json.dumps(_answer(request["task"], request["arguments"], request["cpu_seconds"])).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            framed = _FRAMING.frame(answer)
        except BadFrame as error:
            framed = _FRAMING.frame(json.dumps({"fault": str(error)}).encode())
        answers.write(framed)
        answers.flush()


if __name__ == "__main__":
    main()
