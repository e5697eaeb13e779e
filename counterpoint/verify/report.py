"""What a verification finds: damage, each piece with its file, step and rollout, and what could not be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from counterpoint.verify.files import Unreadable

SOUND, DAMAGED, NO_RECEIPTS, BEING_WRITTEN, BROKEN_CHAIN = 0, 1, 3, 4, 5
"""The exit codes of `counterpoint verify`, besides 2 for a wrong call."""

MOST_FINDINGS = 1000
"""Findings that are kept; further ones are counted."""

_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Damage:
    """One piece of damage."""

    file: str
    """Relative to the run's directory."""
    step: int | None
    rollout: str | None
    what: str
    """The damage in words, for a person."""

    def __str__(self) -> str:
        """Returns the finding in one line."""
        named = (("step", self.step), ("rollout", self.rollout))
        where = [self.file, *(f"{kind} {value}" for kind, value in named if value is not None)]
        return f"{', '.join(where)}: {self.what}"


@dataclass(slots=True)
class Verdict:
    """The result of a verification."""

    run: str
    unit: str = "step"
    """What has a receipt: a step, or an item of a driven run."""
    steps: int = 0
    """Steps, or items, with a receipt."""
    head: str = ""
    """The hash of the last receipt: note it elsewhere."""
    heads: set[str] = field(default_factory=set)
    """The hashes of all receipts."""
    findings: list[Damage] = field(default_factory=list)
    more: int = 0
    """Findings that are only counted."""
    checked: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    """What could not be checked, in words, and how often."""
    code: int = SOUND

    @property
    def total(self) -> int:
        """All findings, those only counted included."""
        return len(self.findings) + self.more

    def damage(
        self, file: str, what: str, step: int | None = None, rollout: str | None = None, code: int = DAMAGED
    ) -> None:
        """Adds a finding. Values of the directory may be in `what`: it is made printable and cut."""
        self.code = max(self.code, code)
        self.more += len(self.findings) == MOST_FINDINGS
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Damage(file, step, rollout and printable(str(rollout)), printable(what)))

    @contextmanager
    def reading(
        self, file: str, step: int | None = None, code: int = DAMAGED, may_miss: bool = False
    ) -> Iterator[None]:
        """Makes a finding of a file that cannot be read within, or is missing; with `may_miss` a missing one is none."""
        try:
            yield
        except FileNotFoundError:
            if not may_miss:
                self.damage(file, "it is missing", step, code=code)
        except (Unreadable, NotADirectoryError) as error:
            self.damage(file, str(error), step, code=code)

    def count(self, is_checked: bool, what: str, why: str) -> None:
        """Counts one of `what` as checked, or as unchecked for the reason `why`."""
        counts, key = (self.checked, what) if is_checked else (self.unchecked, why)
        counts[key] += 1

    def values(self) -> dict[str, Any]:
        """Returns the report as plain values, for JSON."""
        names = ("run", "code", "steps", "head", "more", "checked", "unchecked")
        return {name: getattr(self, name) for name in names} | {"findings": list(map(asdict, self.findings))}

    def text(self) -> str:
        """Returns the report for a person."""
        lines = [str(finding) for finding in self.findings]
        lines += [f"and {self.more} more"] if self.more else []
        checked = ", ".join(f"{count} {what}" for what, count in sorted(self.checked.items()))
        lines += [f"checked: {checked or 'nothing'}"]
        lines += [f"not checked: {what} ({count})" for what, count in sorted(self.unchecked.items())]
        lines += [f"head: {self.head}"] if self.head else []
        verdict = "sound" if self.code == SOUND else f"{self.total} pieces of damage"
        return "\n".join([*lines, f"run {self.run}, {self.steps} {self.unit}s: {verdict}"])


def printable(text: str) -> str:
    """Returns text that cannot steer a terminal, cut to one short line."""
    shown = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
