"""Counts the kinds of errors of failed rollouts by environment, for metrics, summaries and log lines.

The metric `rollouts/inference_failed`, not this file, counts rollouts with that outcome.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from counterpoint.orchestrator.scheduling.giving_up import Failure, Lasting
from counterpoint.transport.printable import shortened
from counterpoint.transport.records import Rollout

PREFIX = "failures/"
"""Prefix of the metrics `failures/<environment>/<kind>`, each a number of rollouts."""

MAX_KINDS = 20
"""Most kinds shown apart at once. `OTHER` stands for the rest."""

OTHER = "other"

NO_TURN = "it ended without any turn"
"""The kind of a rollout in which the environment never called the model."""

SHOWN_KINDS = 4

_LONGEST_KIND = 80

_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*): ")

_NUMBER = re.compile(r"(?P<setting>\b[a-z][a-z0-9]*(_[a-z0-9]+)+ = [\d.]+(e[+-]?\d+)?)|\d+")
"""A number, which may differ from rollout to rollout, or the value of a key of the configuration, which does not."""


_LASTING: Mapping[str, Lasting] = {
    "RequestRefused": Lasting.REFUSED,
    "AgentRefused": Lasting.REFUSED,
    **dict.fromkeys(
        (
            "AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError",
            "NotImplementedError", "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError",
            "ZeroDivisionError", "NoReward", "StateError", NO_TURN,
        ),
        Lasting.CODE,
    ),
}  # fmt: skip
"""Kinds of errors that cannot pass by themselves: Python's exceptions for an error in code, useless results of an environment's
code, and refusals. Any other kind may pass, such as an exception class of a library or an environment."""


def kind_of(error: str) -> str:
    """Returns an error's kind: the exception's type, or the part of its text that is the same for many rollouts."""
    if (named := _EXCEPTION.match(error)) is not None:
        return shortened(named[1], _LONGEST_KIND)
    text = error.partition(";")[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)
    return shortened(_NUMBER.sub(lambda found: found["setting"] or "N", text).strip(), _LONGEST_KIND)


def cause_of(error: str) -> str:
    """Returns the common part of all failures of one kind at one place (`environments.describe_error`)."""
    place = error.rpartition(" (in ")[2] if error.endswith(")") else ""
    return f"{kind_of(error)} {place}"


def lasting_failure(rollouts: Sequence[Rollout]) -> Failure | None:
    """Returns why every rollout of a group failed, if no such reason can pass by itself, else None."""
    failed = [rollout for rollout in rollouts if not rollout.inference_failed]
    kinds = {_lasting(rollout) for rollout in failed}
    if not failed or None in kinds:
        return None
    kind = Lasting.REFUSED if kinds == {Lasting.REFUSED} else Lasting.CODE
    error = failed[0].error or ""
    return Failure(kind, cause_of(error), error)


def lasting_failure_of_function(error: Exception) -> Failure | None:
    """Returns why an operator's function gave nothing of use, if that cannot pass by itself.

    The cause of `error` is the function's exception. Without one, `error` describes the function's bad result.
    """
    raised = error.__cause__
    if raised is not None and _LASTING.get(type(raised).__name__) is not Lasting.CODE:
        return None
    return Failure(Lasting.CODE, cause_of(str(error)), str(error))


def _lasting(rollout: Rollout) -> Lasting | None:
    kind = kind_of(rollout.error or "")
    # A prompt may be too long for the text sampled before it, and another sample be shorter: that has to last, too.
    return Lasting.CODE if kind == "RequestRefused" and rollout.turns else _LASTING.get(kind)


def count_failures(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Returns metrics: the number of failed rollouts, by environment and kind."""
    counts: Counter[str] = Counter()
    kinds: set[str] = set()
    for rollout in rollouts:
        if rollout.error is None or rollout.inference_failed:
            continue
        kind = kind_of(rollout.error)
        kind = kind if kind in kinds or len(kinds) < MAX_KINDS else OTHER
        kinds.add(kind)
        counts[f"{PREFIX}{rollout.environment}/{kind}"] += 1
    return dict(counts)


def sum_failures(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Sums the failures of metrics lines by environment and kind, the most frequent first."""
    totals: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for name, count in line.items():
            if not name.startswith(PREFIX):
                continue
            environment, slash, kind = name.removeprefix(PREFIX).partition("/")
            if slash:
                totals[environment, kind] += int(count)
    failures: dict[str, dict[str, int]] = {}
    for (environment, kind), count in totals.most_common():
        failures.setdefault(environment, {})[kind] = count
    return failures


def failures_in_words(failures: Mapping[str, Mapping[str, int]]) -> str:
    """Returns text such as `112 the reward is nan, 75 KeyError (in reverse)`, by environment. Empty for none."""
    return "; ".join(
        f"{_kinds_in_words(kinds)} (in {_printable(environment)})" for environment, kinds in failures.items()
    )


def most_frequent(failures: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the most frequent kind, such as `KeyError (in reverse)`. Empty for none."""
    for environment, kinds in failures.items():
        return f"{_printable(next(iter(kinds)))} (in {_printable(environment)})"
    return ""


def _kinds_in_words(kinds: Mapping[str, int]) -> str:
    shown = [f"{count} {_printable(kind)}" for kind, count in kinds.items()]
    rest = [f"and {len(shown) - SHOWN_KINDS} kinds more"] if len(shown) > SHOWN_KINDS else []
    return ", ".join(shown[:SHOWN_KINDS] + rest)


def _printable(text: str) -> str:
    """Replaces control characters: the text comes from an environment, and goes to a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
