"""What the state machine keeps of the search algorithm: its saved state, and what it must be told again after a resume.

The notifications are numbered. A saved state says how many of them it has heard; the later ones are kept until a newer state
covers them, so that a killed experiment's search algorithm goes on exactly where the journal ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from counterpoint.tune.result import Result
from counterpoint.tune.runner.events import AskSearch, TellComplete, TellResult, TrialsProposed


class SearchSide:
    """Numbers what is told, and asks for trials while fewer than `max_pending` are PENDING."""

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        self.finished = False
        self.asked = False
        self.state: dict[str, Any] | None = None
        """None until it has proposed a first time."""
        self.idle_after: int | None = None
        """The notifications that it had heard when it last had nothing to propose; None once it has proposed."""
        self.told = 0
        self.backlog: deque[TellResult | TellComplete] = deque()
        """The notifications after `state`."""

    def ask(self, pending: int) -> Iterator[AskSearch]:
        """Yields the request for more trials, if there is to be one."""
        if not (self.finished or self.asked) and pending < self.max_pending:
            self.asked = True
            yield AskSearch(self.max_pending - pending)

    @property
    def may_propose(self) -> bool:
        """Whether an answer is still to come that may be a trial: it was asked, and has not looked at all that it was told."""
        return self.asked and not self.finished and self.idle_after != self.told

    def proposed(self, event: TrialsProposed) -> None:
        """Notes that the search has answered."""
        self.asked, self.idle_after = False, None
        self.finished = event.finished
        self.saved(event.search_state, event.heard)

    def saved(self, state: dict[str, Any], heard: int) -> None:
        """There is a newer state."""
        self.state = state
        while self.backlog and self.backlog[0].number <= heard:
            self.backlog.popleft()

    def tell_result(self, trial_id: str, result: Result) -> TellResult:
        """Notes a notification, and returns it."""
        self.told += 1
        told = TellResult(self.told, trial_id, result)
        self.backlog.append(told)
        return told

    def tell_complete(self, trial_id: str, result: Result | None, error: bool = False) -> TellComplete:
        """Notes a notification, and returns it."""
        self.told += 1
        told = TellComplete(self.told, trial_id, result, error)
        self.backlog.append(told)
        return told
