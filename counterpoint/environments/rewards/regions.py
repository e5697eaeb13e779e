r"""Sets of real numbers, which the kind `math` compares itself, since math-verify does so by the order of answer and completion.

For the library 1 < x < 2 as the answer of the data equals (1, 2), but not the other way round, and 2 > x > 1 neither; its keyword
for that is off. Here each of the forms that `_FORMS` and `region` list is a set, and two are equal if the sets are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from counterpoint.environments.rewards.mathematics import OR, both_signs, in_latex, plain

_MOST_PARTS = 16
_VARIABLE = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)?"
_WORDS = {
    **dict.fromkeys(
        ("allrealnumbers", "allreals", "anyrealnumber", "everyrealnumber", "realnumbers", "therealnumbers"),
        r"\mathbb{R}",
    ),
    **dict.fromkeys(
        (
            "nosolution",
            "nosolutions",
            "thereisnosolution",
            "therearenosolutions",
            "norealsolution",
            "norealsolutions",
            "emptyset",
            "theemptyset",
        ),
        r"\emptyset",
    ),
}
"""Sets that have a name, as `plain` has it."""
_FORMS = [
    (re.compile(r"\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:mathbb|Bbb|mathbf)\s*(?:R|\{\s*R\s*\})(?![A-Za-z])|\\R(?![A-Za-z])|\u211d"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:backslash|smallsetminus)(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\geqq(?![A-Za-z])|\u2a7e|\u2267"), r"\\ge "),
    (re.compile(r"\\leqq(?![A-Za-z])|\u2a7d|\u2266"), r"\\le "),
    (re.compile(r"([\[(\]][^\]\[(),;]+);([^\]\[(),;]+[\]\[)])"), r"\1,\2"),
    (re.compile(rf"^\\\{{\s*(?:{_VARIABLE}\s*\\in\s*\\mathbb\{{R\}}|{_VARIABLE})\s*(?:\\mid|\||:)(.+)\\\}}$"), r"\1"),
    (re.compile(rf"^({_VARIABLE}\s*\\(?:not)?in)\s*\{{(.+)\}}$"), r"\1\2"),
]
"""What is written around a set: sizes of brackets, the set of all x with a property, braces."""
_BRACKETS = re.compile(r"([\]\[])([^\]\[(),;]+)[,;]([^\]\[(),;]+)([\]\[])")
"""An interval whose open ends may be turned brackets, as in ]1, 2[."""
_IS_SAID = re.compile(
    r"[<>≤≥≠∈\u2a7d\u2a7e\u2266\u2267\u211d]|\\(?:mathb[bf]|Bbb)\s*R|\\(?:R|backslash|smallsetminus|[lg]eqq)(?![A-Za-z])"
    r"|\\(?:l|g|le|ge|leq|geq|leqslant|geqslant|ne|neq)t?(?![A-Za-z])|\\(?:not)?in(?![A-Za-z])|^\s*\]|\[\s*$"
)
_AND = re.compile(r"\\(?:land|wedge)(?![A-Za-z])|\\text\{\s*and\s*\}|(?<![\\A-Za-z])and(?![A-Za-z])")
_COMMA = re.compile(r"[,;]")
_SIGN = re.compile(r"[<>=]|\\(?:not)?in(?![A-Za-z])|\\(?:l|g|le|ge|leq|geq|leqslant|geqslant|ne|neq)t?(?![A-Za-z])")
_BARE = re.compile(r"(?:[<>]|\\(?:l|g|le|ge|leq|geq|leqslant|geqslant|ne|neq)t?(?![A-Za-z]))")
"""A sign without anything before it: what is said of the number that was asked for."""
_HEAD = re.compile(rf"\s*{_VARIABLE}\s*(?:=|\\neq?(?![A-Za-z]))\s*")
"""What a number takes over from the part before it, as in `x = 1, 2` and `x \\ne 1, 2`."""
_NAMED = re.compile(rf"\s*({_VARIABLE})\s*(?:{_SIGN.pattern})")
_MEMBER = re.compile(rf"({_VARIABLE})\s*\\(not)?in(?![A-Za-z])(.+)", re.DOTALL)


Piece = tuple[Any, Any, bool, bool]
"""An interval: its ends, which are numbers of sympy, and whether they are open. A number is one from itself to itself."""


@dataclass(frozen=True, slots=True)
class Region:
    """A set of real numbers."""

    pieces: tuple[Piece, ...]
    """Its intervals, apart from one another and in order."""
    variable: str | None
    """The name of its numbers, if the text has one."""
    is_said: bool
    """It is said in a form that the library reads in one order only: an inequality, a membership, words, turned brackets."""


def may_be_said(text: str) -> bool:
    """Whether a text may be a region with `is_said`."""
    return _IS_SAID.search(text) is not None or plain(text) in _WORDS


def region(text: str) -> Region | None:
    """Returns the set that a formula or a text is.

    None for whatever is no set of real numbers, or is not solved for its variable: a problem is no answer.
    """
    is_said = may_be_said(text)
    text = in_latex(_WORDS.get(plain(text), text)).strip()
    for written, read in _FORMS:
        text = written.sub(read, text).strip()
    text = _BRACKETS.sub(_turned, both_signs(text))
    is_bare = _BARE.match(text) is not None
    text = f"x {text}" if is_bare else text
    variables: set[str] = set()
    try:
        found = _set(text, variables)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return None
    pieces = None if found is None or len(variables) > 1 else _pieces(found)
    if pieces is None:
        return None
    return Region(pieces, None if is_bare else next(iter(variables), None), is_said)


def same_region(expected: Region, found: Region, digits: int, *, strict: bool) -> bool:
    """Whether two sets are the same, with ends that are compared as other numbers are; with `strict` by names, too."""
    from counterpoint.environments.rewards import numeric

    if strict and None not in (expected.variable, found.variable) and expected.variable != found.variable:
        return False
    return len(expected.pieces) == len(found.pieces) and all(
        left[2:] == right[2:]
        and all(
            a == b or bool(a.is_finite and b.is_finite and numeric.same(a, b, digits))
            for a, b in zip(left[:2], right[:2], strict=True)
        )
        for left, right in zip(expected.pieces, found.pieces, strict=True)
    )


def are_joined_apart(one: str, other: str) -> bool:
    """Whether only one of two texts says "or", and the other that all of it holds at once: for the library both are a list."""
    at_once, choices = sorted((_split(each, OR) for each in (one, other)), key=len)
    names = [named and named[1] for named in map(_NAMED.match, choices)]
    if len(at_once) != 1 or len(choices) < 2 or None in names:
        return False
    return len(set(names)) > 1 or (_BARE.search(at_once[0]) is not None and len(_split(at_once[0], _AND)) > 1)


def _turned(found: re.Match[str]) -> str:
    opens, start, end, closes = found.groups()
    return ("(" if opens == "]" else "[") + start + "," + end + (")" if closes == "[" else "]")


def _set(text: str, variables: set[str]) -> Any:
    """Returns sympy's set; None for what is none. Adds the names of its numbers to `variables`."""
    from sympy import FiniteSet, Intersection, Union

    for separator, together in ((OR, Union), (_COMMA, Intersection), (_AND, Intersection)):
        parts = _split(text, separator)
        if not 1 < len(parts) <= _MOST_PARTS:
            continue
        parts = _with_heads(parts, may_exclude=separator is not OR)
        sets = [_set(part, variables) for part in parts]
        if not sets or None in sets:
            return None
        if separator is not OR and not (
            any(map(_SIGN.search, parts)) or all(isinstance(each, FiniteSet) for each in sets)
        ):
            return None  # pairs, such as (1,2) and (3,4)
        found = together(*sets)
        # People part by a comma what holds at once and what cannot, and say "1 and 2" of several numbers.
        is_list = separator is _COMMA or all(isinstance(each, FiniteSet) for each in sets)
        return Union(*sets) if is_list and found.is_empty else found
    return _of_one(text.strip(), variables)


def _with_heads(parts: list[str], *, may_exclude: bool) -> list[str]:
    """Returns parts, each with a variable and a sign, or none with any; empty for what says nothing as a whole."""
    if not any(map(_SIGN.search, parts)):
        return parts
    head, found = None, []
    for part in parts:
        if _SIGN.search(part):
            head = _HEAD.match(part)
        elif head is None or ("\\ne" in head[0] and not may_exclude):
            return []
        else:
            part = head[0] + part
        found.append(part)
    return found


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Returns the parts of a text between separators that stand in no brackets."""
    parts, start = [], 0
    for found in separator.finditer(text):
        before = text[: found.start()]
        if sum(map(before.count, "([{")) == sum(map(before.count, ")]}")):
            parts.append(text[start : found.start()])
            start = found.end()
    return [each for each in [*parts, text[start:]] if each.strip()]


def _of_one(text: str, variables: set[str]) -> Any:
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic, S

    if (member := _MEMBER.fullmatch(text)) is not None:
        variables.add(member[1].removeprefix("\\"))
        inner = _of_one(member[3].strip(), set())
        return S.Reals - inner if inner is not None and member[2] else inner
    parsed = parse(f"${text}$", parsing_timeout=None, extraction_config=[LatexExtractionConfig()])
    return _of_expression(parsed[0], variables) if parsed and isinstance(parsed[0], Basic) else None


def _of_expression(expression: Any, variables: set[str]) -> Any:
    from math_verify.grader import And
    from sympy import Abs, Eq, FiniteSet, Ge, Gt, Intersection, Interval, Le, Lt, Ne, Set, Symbol, Union, oo

    if isinstance(expression, Set):
        return expression
    if isinstance(expression, And):
        sets = [_of_expression(each, variables) for each in expression.args]
        return None if None in sets else Intersection(*sets)
    if getattr(expression, "is_number", False):
        return FiniteSet(expression.doit())
    if not isinstance(expression, Eq | Ne | Lt | Le | Gt | Ge):
        return None
    if isinstance(expression.rhs, Symbol | Abs):
        expression = expression.reversed
    left, right = expression.lhs, expression.rhs
    is_size = isinstance(left, Abs) and isinstance(left.args[0], Symbol)
    symbol = left.args[0] if is_size else left
    if not isinstance(symbol, Symbol) or not getattr(right, "is_number", False):
        return None
    variables.add(symbol.name)
    right = right.doit()
    found = _beside(type(expression), right)
    if not is_size:
        return found
    mirrored = _beside(type(expression.reversedsign), -right)
    return Union(Intersection(found, Interval(0, oo)), Intersection(mirrored, Interval(-oo, 0)))


def _beside(relation: Any, right: Any) -> Any:
    """Returns the set of all numbers that are in relation to one."""
    from sympy import Eq, FiniteSet, Ge, Gt, Interval, Le, Lt, Ne, S, oo

    return {
        Eq: lambda: FiniteSet(right),
        Ne: lambda: S.Reals - FiniteSet(right),
        Lt: lambda: Interval.open(-oo, right),
        Le: lambda: Interval(-oo, right),
        Gt: lambda: Interval.open(right, oo),
        Ge: lambda: Interval(right, oo),
    }[relation]()


def _pieces(found: Any) -> tuple[Piece, ...] | None:
    from sympy import FiniteSet, Interval, Union

    found = found.doit()
    pieces: list[Piece] = []
    for part in found.args if isinstance(found, Union) else () if found.is_empty else (found,):
        if isinstance(part, FiniteSet):
            pieces += [(each, each, False, False) for each in part.args]
        elif isinstance(part, Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        else:
            return None
    if not all(end.is_number and end.is_extended_real for each in pieces for end in each[:2]):
        return None
    return tuple(sorted(pieces, key=lambda each: each[0].evalf()))
