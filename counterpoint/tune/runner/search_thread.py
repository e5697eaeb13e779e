"""The thread of the search algorithm: it hears the notifications in order, and proposes trials when it is asked.

A slow model delays nothing but its own proposals. Only this thread calls the algorithm. What it answers is fetched with
`take`; the function given at the start is called, in this thread, whenever there is an answer or `idle_after` has changed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from counterpoint.tune.errors import TuneError
from counterpoint.tune.runner.events import SearchSaved, TellComplete, TellResult, TrialsProposed
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.trial import Trial

ASK_AGAIN_SECONDS = 0.5
"""Seconds between two tries while the algorithm has nothing to propose and hears of nothing."""

END_SECONDS = 5.0
"""How long a busy algorithm is waited for at the end; the thread does not outlive the process."""


def tell(algorithm: SearchAlg, told: TellResult | TellComplete) -> None:
    """Tells a search algorithm one thing, in this thread."""
    match told:
        case TellResult(_, trial_id, result):
            algorithm.on_trial_result(trial_id, result)
        case TellComplete(_, trial_id, result, error):
            algorithm.on_trial_complete(trial_id, result, error)


def failed(algorithm: SearchAlg, error: BaseException) -> TuneError:
    """What ends an experiment whose search algorithm raised: it has no state to trust then."""
    return TuneError(f"the search algorithm {type(algorithm).__qualname__} failed: {type(error).__name__}: {error}")


class SearchThread:
    """Runs one search algorithm."""

    def __init__(self, algorithm: SearchAlg, heard: int, wake: Callable[[], None]) -> None:
        """Takes how many notifications the algorithm's state already includes."""
        self._algorithm = algorithm
        self._heard = heard
        self._wake = wake
        self._inbox: queue.SimpleQueue[TellResult | TellComplete | int | str] = queue.SimpleQueue()
        self._answers: deque[TrialsProposed | SearchSaved | BaseException] = deque()
        self._asked = 0
        self.idle_after: int | None = None
        """The notifications that it had heard when it last had nothing to propose; None once it has proposed."""
        self._thread = threading.Thread(target=self._run, name="search algorithm", daemon=True)
        self._thread.start()

    def tell(self, told: TellResult | TellComplete) -> None:
        """Passes a notification on."""
        self._inbox.put(told)

    def ask(self, count: int) -> None:
        """Asks for at most so many trials; the answer comes when there is one."""
        self._inbox.put(count)

    def save(self) -> None:
        """Asks for the algorithm's state."""
        self._inbox.put("save")

    def take(self) -> list[TrialsProposed | SearchSaved]:
        """Returns what was answered. Raises `TuneError` if the algorithm raised."""
        taken: list[TrialsProposed | SearchSaved] = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, BaseException):
                raise failed(self._algorithm, answer) from answer
            taken.append(answer)
        return taken

    def close(self) -> None:
        """Ends the thread."""
        self._inbox.put("end")
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again by `take`, in the runner's thread
            self._answer(error)

    def _serve(self) -> bool:
        """Hears one thing, and proposes once nothing else is to be heard. Returns False at the end."""
        try:
            request = self._inbox.get(timeout=ASK_AGAIN_SECONDS if self._asked else None)
        except queue.Empty:
            request = self._asked
        match request:
            case "end":
                return False
            case "save":
                self._answer(SearchSaved(self._algorithm.state(), self._heard))
            case TellResult() | TellComplete():
                tell(self._algorithm, request)
                self._heard = request.number
            case int():
                self._asked = request
        if self._asked and self._inbox.empty():
            self._propose()
        return True

    def _propose(self) -> None:
        trials: list[Trial] = []
        while len(trials) < self._asked and (trial := self._algorithm.next_trial()) is not None:
            trials.append(trial)
        finished = self._algorithm.is_finished()
        if trials or finished:
            self._asked, self.idle_after = 0, None
            self._answer(TrialsProposed(tuple(trials), self._algorithm.state(), self._heard, finished))
        elif self.idle_after != self._heard:
            self.idle_after = self._heard
            self._wake()

    def _answer(self, answer: TrialsProposed | SearchSaved | BaseException) -> None:
        self._answers.append(answer)
        self._wake()
