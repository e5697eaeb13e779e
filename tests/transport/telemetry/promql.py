"""As much of PromQL as a test needs: the tokens of an expression, its brackets, its metrics with their matchers, its labels."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<duration>\d+[smhdwy]\b)|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)"""
    r"""|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<operator>=~|!~|!=|==|>=|<=|[-+*/%^=<>,])|(?P<open>[([{])|(?P<close>[)\]}])"""
)

WORDS = {
    "sum", "min", "max", "avg", "count", "by", "without", "on", "ignoring", "group_left", "group_right", "rate", "increase",
    "histogram_quantile", "time", "vector", "or", "and", "unless",
}  # fmt: skip

GROUPING = {"by", "without", "on", "ignoring"}

PAIRS = {"(": ")", "[": "]", "{": "}"}

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip

THRESHOLD = re.compile(
    r"(?P<since>time\(\) - )?(?P<name>\w+)(?:\{(?P<matchers>[^}]*)\})? (?P<by>==|!=|>=|<=|>|<) (?P<limit>[\d.]+)"
)


class PromQLError(ValueError):
    """The expression does not parse."""


@dataclass(frozen=True)
class Parsed:
    """What an expression names."""

    metrics: Sequence[tuple[str, tuple[str, ...]]]
    """Each metric with the labels of its matchers."""
    grouping: Sequence[str]
    """Labels by which it aggregates or matches."""


def parse(expression: str) -> Parsed:
    """Raises `PromQLError` for characters, brackets, functions and operators that do not fit."""
    tokens = _tokens(expression)
    metrics: list[tuple[str, tuple[str, ...]]] = []
    grouping: list[str] = []
    open_brackets: list[str] = []
    before, index = ("start", ""), 0
    while index < len(tokens):
        kind, text = tokens[index]
        after = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        if kind == "open":
            open_brackets.append(text)
        elif kind == "close":
            if not open_brackets or PAIRS[open_brackets.pop()] != text:
                raise PromQLError(f"{expression}: {text} closes nothing")
        elif kind == "name" and text in GROUPING:
            end = _closing(tokens, index + 1, expression)
            grouping += [each for what, each in tokens[index + 2 : end] if what == "name"]
            index = end
        elif kind == "name" and text not in WORDS:
            if before[0] in ("name", "number", "close") and before[1] not in (*WORDS, ")"):
                raise PromQLError(f"{expression}: an operator is missing before {text}")
            labels: tuple[str, ...] = ()
            if after == "{":
                end = _closing(tokens, index + 1, expression)
                labels = _labels(tokens[index + 2 : end], expression)
                index = end
            metrics.append((text, labels))
        before, index = tokens[index], index + 1
    if open_brackets:
        raise PromQLError(f"{expression}: {open_brackets} is not closed")
    if tokens[-1][0] == "operator":
        raise PromQLError(f"{expression}: it ends with an operator")
    return Parsed(metrics, grouping)


def firing(expression: str, samples: Sequence[tuple[str, Mapping[str, str], float]], now: float) -> bool | None:
    """Whether a rule that is a threshold holds for any sample; None for an expression that needs a history."""
    if (found := THRESHOLD.fullmatch(expression.strip())) is None:
        return None
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', found["matchers"] or ""))
    return any(
        COMPARISONS[found["by"]](now - value if found["since"] else value, float(found["limit"]))
        for name, labels, value in samples
        if name == found["name"] and wanted.items() <= labels.items()
    )


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    while position < len(expression):
        if (found := TOKEN.match(expression, position)) is None:
            raise PromQLError(f"{expression}: cannot read {expression[position:]!r}")
        position = found.end()
        assert found.lastgroup is not None
        if found.lastgroup != "space":
            tokens.append((found.lastgroup, found.group()))
    if not tokens:
        raise PromQLError("an empty expression")
    return tokens


def _closing(tokens: Sequence[tuple[str, str]], at: int, expression: str) -> int:
    if at >= len(tokens) or tokens[at][0] != "open":
        raise PromQLError(f"{expression}: a bracket is missing")
    for index in range(at + 1, len(tokens)):
        if tokens[index][1] == PAIRS[tokens[at][1]]:
            return index
    raise PromQLError(f"{expression}: {tokens[at][1]} is not closed")


def _labels(matchers: Sequence[tuple[str, str]], expression: str) -> tuple[str, ...]:
    labels = []
    for index in range(0, len(matchers), 4):
        kinds = [kind for kind, _ in matchers[index : index + 3]]
        if kinds != ["name", "operator", "string"] or matchers[index + 1][1] not in ("=", "!=", "=~", "!~"):
            raise PromQLError(f"{expression}: {matchers} are no matchers")
        if matchers[index + 3 : index + 4] not in ([], [("operator", ",")]):
            raise PromQLError(f"{expression}: a comma is missing")
        labels.append(matchers[index][1])
    return tuple(labels)
