"""Makes the table of `docs/models.md` of what was found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perf.architectures.check import Outcome

ASPECTS = ("weights", "rows", "prompts", "adapter", "PEFT")
_ORDER = ("crashed", "wrong", "not made", "not run", "refused")
_LONGEST = 160


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one precision."""

    kind: str
    dtype: str
    outcomes: dict[str, Outcome]
    """The outcome of each aspect."""

    @property
    def worst(self) -> str:
        """The worst outcome of all aspects."""
        found = {outcome.found for outcome in self.outcomes.values()}
        return next((each for each in _ORDER if each in found), "right")


def table(rows: Sequence[Row]) -> str:
    """Returns Markdown: how many there are of each outcome, a table of models that are alike, and why something is not right."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    counts = {name: sum(row.worst == name for row in rows) for name in (*_ORDER, "right")}
    lines = [", ".join(f"{count} {name}" for name, count in counts.items()) + f" of {len(rows)}.", ""]
    lines += [f"| models | {' | '.join(ASPECTS)} |", "|---" * (len(ASPECTS) + 1) + "|"]
    notes: dict[str, list[str]] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind, own in by_kind.items():
        alike.setdefault(tuple(_cell(kind, aspect, own, notes) for aspect in ASPECTS), []).append(kind)
    for cells, names in sorted(alike.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    lines += ["", "Why not:", ""]
    lines += [f"- {reason}: {', '.join(sorted(set(whose)))}" for reason, whose in notes.items()]
    return "\n".join(lines)


def _cell(kind: str, aspect: str, rows: Sequence[Row], notes: dict[str, list[str]]) -> str:
    found: dict[str, list[str]] = {}
    for row in rows:
        outcome = row.outcomes.get(aspect)
        if outcome is None:
            continue
        found.setdefault(outcome.found, []).append(row.dtype)
        if outcome.detail:
            notes.setdefault(f"{aspect} {outcome.found}: {_short(outcome.detail)}", []).append(kind)
    if len(found) == 1 and len(next(iter(found.values()))) == len(rows):
        return next(iter(found))
    return "; ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in found.items())


def _short(reason: str) -> str:
    """Returns a reason that is the same for models that have the same: without their names, on one line."""
    reason = " ".join(reason.split())
    reason = re.sub(r"^\w+ cannot be trained: ", "", reason)
    reason = re.sub(r"^model = '[^']*' cannot be loaded: ", "cannot be loaded: ", reason)
    reason = re.sub(r"^model = '[^']*' (has parts for more than text) \(\w+, ", r"it \1 (", reason)
    reason = re.sub(r"(log-probabilities) differ by [\d.]+ nats; expected the same bits$", r"\1 differ", reason)
    reason = re.sub(r"\b[A-Z]\w+(?=(Self)?Attention\b)", "…", reason)
    return reason if len(reason) <= _LONGEST else reason[:_LONGEST] + "…"
