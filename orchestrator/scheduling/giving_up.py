"""Decides when a run gives up: nothing has succeeded since its process began, and the failures cannot pass by themselves.

The scheduler's rule, pure: `docs/scheduling.md` explains it. A failure that may pass never counts, such as a model call without
an answer, a missed deadline, a connection, or any exception but those below. Nor does a run give up once one group has ended
otherwise, or while a group is played that had begun when enough had failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from counterpoint.orchestrator.scheduling.outcomes import DropReason

GROUPS = 32
"""The first groups of a process, without any completed rollout. If one example in five can succeed, one run in 1,000 begins
so."""

REFUSED_SECONDS = 30.0
"""Seconds that refusals have to last: a proxy before servers that are still starting may refuse everything for a while."""

SECONDS = 300.0
"""Seconds that failures of code have to last: a service that the code calls may be away for a while, and answer nonsense."""


class Lasting(StrEnum):
    """Why a failure cannot pass by itself."""

    REFUSED = "refused"
    """A server or the gateway refused the request's content, and refuses it each time."""
    CODE = "code"
    """Code raised an exception for an error in it, or a request was refused that followed answered ones."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why no rollout of a group completed."""

    lasting: Lasting
    cause: str
    """The text that all failures of one kind at one place share."""
    error: str
    """One of the failures in full."""


@dataclass(slots=True)
class GivingUp:
    """Counts the groups in which every rollout failed, from the start of the process."""

    _is_off: bool = False
    _groups: int = 0
    _began: float = 0.0
    _until: int = 0
    """The groups that had begun when enough had failed."""
    _is_refused: bool = True
    _causes: Counter[str] = field(default_factory=Counter)
    _errors: dict[str, str] = field(default_factory=dict)

    def group_finalized(
        self, dropped: DropReason | None, failure: Failure | None, at: float, *, begun: int, unfinished: Iterable[int]
    ) -> str | None:
        """Counts a group that was finalized at that time, in seconds. Returns why the run gives up, for a person, or None.

        `begun` groups have ids so far, and those of `unfinished` have not ended: they may yet succeed.
        """
        if self._is_off or dropped is DropReason.INFERENCE_FAILED:
            return None
        if dropped is None or failure is None:
            self._is_off = True
            return None
        self._began = self._began if self._groups else at
        self._groups += 1
        self._is_refused &= failure.lasting is Lasting.REFUSED
        self._causes[failure.cause] += 1
        self._errors.setdefault(failure.cause, failure.error)
        if self._groups < GROUPS or at - self._began < (REFUSED_SECONDS if self._is_refused else SECONDS):
            return None
        self._until = self._until or begun
        if any(group_id < self._until for group_id in unfinished):
            return None
        self._is_off = True
        cause, count = self._causes.most_common(1)[0]
        share = "each for" if count == self._groups else f"{count} of them for"
        return (
            f"nothing can succeed: all rollouts of the first {self._groups} groups failed, {share} this reason: "
            f"{self._errors[cause]}"
        )
