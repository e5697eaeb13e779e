"""Configuration of a rubric: a list of parts, each of a kind. The kinds `judge` and `code` have their keys beside their code."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from counterpoint.transport.config import Config, Identifier


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_compiles)]
"""A regular expression of Python's `re`."""

CpuSeconds = Annotated[float, Field(gt=0, le=600)]


class PartConfig(Config):
    """What all parts of a rubric have."""

    name: Annotated[Identifier, Field(max_length=32)] | None = None
    """Unique in the rubric; the metric has it. Unset: the kind."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The reward is the sum of the parts' values, each times its weight. 0: the part is a metric only."""

    required: float | None = Field(default=None, allow_inf_nan=False)
    """A gate: the reward is 0 unless this part's value is at least this. Gates are scored first; the parts after one that is not
    reached are not scored and have no metric."""


class MathConfig(PartConfig):
    """Whether the last mathematical expression of the completion equals the answer (extra `math-verify`): 1 or 0."""

    kind: Literal["math"]

    float_rounding: int = Field(default=6, ge=0, le=30)
    """Decimal places, and significant digits, that a decimal must share with a number that is no integer."""

    strict: bool = True
    """Names of variables count, and a set is no tuple."""

    cpu_seconds: CpuSeconds = 5.0
    """Most processor time of one comparison. A completion that needs more has the value 0 and the metric `<part>/over_limit`."""


class ExactConfig(PartConfig):
    """Whether the completion is the answer: 1 or 0. White space at both ends never counts."""

    kind: Literal["exact"]

    extract: Pattern | None = None
    """Compare what the last match of this expression's first group has, or else the whole match. No match: 0."""

    answers_column: str | None = None
    """A column with a list of answers, of which any counts. Unset: the example's answer."""

    ignore_case: bool = False
    """Letters in either case are the same."""

    ignore_punctuation: bool = False
    """Punctuation marks and symbols do not count."""

    collapse_whitespace: bool = True
    """A run of white space is one space."""

    cpu_seconds: CpuSeconds = 2.0
    """The limit of CPU time for `extract`, as in `math`."""


class RegexConfig(PartConfig):
    """Whether the expression is found in the completion: 1 or 0."""

    kind: Literal["regex"]

    pattern: Pattern
    """Searched anywhere; `(?s)`, `(?i)`, `(?m)` at its beginning set flags, `\\A` and `\\Z` anchor it."""

    absent: bool = False
    """1 if it is not found."""

    cpu_seconds: CpuSeconds = 2.0
    """The limit of CPU time, as in `math`."""


class FunctionConfig(PartConfig):
    """An operator's own function `(example, completion, state)` that returns a number or a dictionary of numbers."""

    kind: Literal["function"]

    path: str
    """`package.module:name`, a function or an async function."""

    isolation: Literal["thread", "process"] = "thread"
    """The place where a plain function runs. A thread cannot be stopped; a process is killed at its limit. An async
    function runs on the event loop with `thread`."""

    cpu_seconds: CpuSeconds = 10.0
    """Most processor time of one call in a process. A call that needs more fails its rollout."""

    memory_mb: int = Field(default=2048, ge=256)
    """Most address space of a process."""
