"""Decides how a bisection goes on: which rollouts the next branch leaves out, by what the branches before it have shown.

A state machine without clock, I/O and processes; `counterpoint/job/branch/bisect.py` carries its instructions out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from counterpoint.transport.errors import UserError


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """The instruction to train again without these rollouts, and to look at the metric."""

    rollouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The end of a bisection."""

    rollouts: tuple[str, ...]
    """Those without which a branch was good: one, or as few as the branches sufficed for. Empty: the branch without those that
    were left was bad, so several rollouts did it together, or none of them."""


class Bisection:
    """Looks for the one of several rollouts that made a metric go bad."""

    def __init__(self, suspects: Sequence[str], most: int) -> None:
        """`most` is the largest number of branches, at least 1."""
        self._suspects, self._left = tuple(suspects), most
        self._asked: tuple[str, ...] = ()
        self._is_proven: bool | None = None
        """Whether a branch without just the suspects was good; None if there was none."""

    def next(self) -> LeaveOut | Narrowed:
        """Returns the next instruction. After one to leave rollouts out, call `measured` first."""
        if self._is_proven is False:
            return Narrowed(())
        halves = len(self._suspects) > 1 and self._left > 1
        if self._is_proven and not halves:
            return Narrowed(self._suspects)
        self._asked = self._suspects[: len(self._suspects) // 2] if halves else self._suspects
        return LeaveOut(self._asked)

    def measured(self, is_good: bool) -> None:
        """Takes what the branch of the last instruction has shown."""
        self._left -= 1
        if is_good or self._asked == self._suspects:
            self._suspects, self._is_proven = self._asked, is_good
        else:
            self._suspects, self._is_proven = self._suspects[len(self._asked) :], None


def branches_for(suspects: int, most: int) -> int:
    """Returns how many branches a bisection of so many rollouts takes at the most."""
    return min(most, (suspects - 1).bit_length() + 1)


@dataclass(frozen=True, slots=True)
class Fall:
    """Where a metric went bad, and the values with which others are compared: those of the good step and of the bad one."""

    step: int
    """The first step from which on each recorded value, up to the bad step, is nearer to the bad one."""
    good: float
    bad: float

    def is_good(self, value: float) -> bool:
        """Whether a value is nearer to the good one."""
        return abs(value - self.good) < abs(value - self.bad)


def fall_of(metric: str, values: Mapping[int, float], good: int, bad: int) -> Fall:
    """Returns where `metric`, with these values by step, went bad between a good step and a later bad one. Raises `UserError`."""
    if not good < bad:
        raise UserError(f"--good {good} --bad {bad}: the good step is the earlier one")
    for step in (good, bad):
        if step not in values:
            raise UserError(f"no value of {metric} is recorded of step {step}")
    if values[good] == values[bad]:
        raise UserError(f"{metric} is {values[good]:g} at both steps, {good} and {bad}: nothing went bad")
    fall = Fall(bad, values[good], values[bad])
    for step in sorted((each for each in values if good < each <= bad), reverse=True):
        if fall.is_good(values[step]):
            break
        fall = Fall(step, fall.good, fall.bad)
    return fall
