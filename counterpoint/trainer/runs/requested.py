"""What the runs in slots are asked for by files in their `control/` (`counterpoint/run/requests.py`); rank 0 carries it out.

A save begins between two rows: an open step has not changed the weights. A copy is accepted
(`counterpoint/trainer/runs/copies.py`) and happens at its step. The answers follow once the checkpoints are durable, which
training does not wait for.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from counterpoint.run.changes import LearningRates
from counterpoint.run.requests import (
    Answer,
    AnyRequest,
    CopyRequest,
    DamagedRequest,
    SaveRequest,
    read_answer,
    waiting_requests,
    write_answer,
)
from counterpoint.run.trainer_files import start_directory
from counterpoint.trainer.runs import copies
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.copies import Copy, CopyRefused
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.taken_over import keep
from counterpoint.transport.files.atomic import DISK_FAULTS, published_steps, remove_directory
from counterpoint.transport.printable import printable

logger = logging.getLogger(__name__)


class RunRequests:
    """Carries out the requests to the runs of one trainer, and answers them."""

    def __init__(self, output_dir: Path, checkpoints: Checkpoints) -> None:
        """Reads the requests of the runs in `output_dir`; saves are `checkpoints`."""
        self._output_dir = output_dir
        self._checkpoints = checkpoints

    def start(self, run: Run) -> None:
        """Accepts the copy with which a run begins, if it has no checkpoint and its configuration names one.

        What is against it becomes the run's failure.
        """
        if run.progress.step or (origin := run.config.training.start_from) is None:
            return
        try:
            copies.start(self._output_dir, run.run_id, origin)
        except CopyRefused as error:
            run.failure = f"training.start_from: {error}"

    def note_published(self, run: Run) -> None:
        """Notes the versions beyond the run's step, before they are removed: they will be trained again. Raises `OSError`."""
        newest = max(published_steps(run_directory(self._output_dir, run.run_id) / "broadcast"), default=0)
        if newest > run.progress.step:
            copies.note_published(self._output_dir, run.run_id, newest)

    def poll(self, run: Run, taken: int) -> bool:
        """Carries out what the run is asked for now, whose last step that is begun for good is `taken`.

        Returns whether anything was asked or answered. Raises `OSError` for a fault of the disk that all runs share.
        """
        base = self._output_dir
        places = f"{base}/run_{run.run_id}/control/requests", f"{base}/trainer/{run.run_id}/copies"
        if not any(map(os.path.exists, places)):  # a thousand runs are looked at each second
            return False
        directory, has_news = run_directory(base, run.run_id), False
        try:
            for sealed in self._sealed(run):
                has_news = True
                write_answer(directory, sealed)
                self._log(run, sealed)
                self.forget(run)
            for request_id, request in waiting_requests(directory, ("save", "copy")):
                has_news = True
                if (answer := self._answer(run, request_id, request, taken)) is not None:
                    write_answer(directory, answer, None if isinstance(request, DamagedRequest) else request)
                    self._log(run, answer)
        except OSError as error:
            if error.errno in DISK_FAULTS:  # of the disk that all runs share; any other concerns this run alone
                raise
            logger.warning("a request to run %s cannot be answered: %s", run.run_id, error)
        return has_news

    def learning_rate(self, run: Run, step: int) -> float:
        """Returns the peak learning rate of `step`, as configured or changed since. Raises `JournalError`."""
        directory = run_directory(self._output_dir, run.run_id)
        run.requests.rates = run.requests.rates or LearningRates(directory)
        rate = run.requests.rates.at(step)
        return run.config.training.learning_rate if rate is None else rate

    def forget(self, run: Run) -> None:
        """Removes the journals of copies that no kept checkpoint is older than, and whose requests are answered.

        Also the adapter with which the run has begun, unless that is its reference policy.
        """
        if run.durable_step and not run.config.training.reference_is_start:
            remove_directory(start_directory(self._output_dir, run.run_id))
        for copy in copies.all_accepted(self._output_dir, run.run_id) if run.durable_step else ():
            directory = run_directory(self._output_dir, run.run_id)
            answered = copy.request_id is None or read_answer(directory, copy.request_id) is not None
            if copy.step <= run.durable_step and answered:
                copies.forget(self._output_dir, run.run_id, copy.step)

    def _answer(self, run: Run, request_id: str, request: AnyRequest | DamagedRequest, taken: int) -> Answer | None:
        try:
            match request:
                case SaveRequest():
                    return self._saved(run, request_id)
                case CopyRequest():
                    self._copied(run, request, taken)
                case DamagedRequest():
                    raise CopyRefused(str(request))
        except (ValueError, KeyError) as error:  # a `CopyRefused`, or a file of the trainer's own that is damaged
            return Answer(request_id=request_id, outcome="refused", reason=str(error))
        return None

    def _sealed(self, run: Run) -> list[Answer]:
        """Returns the answers that are due: to copies that are durable."""
        if not (accepted := copies.all_accepted(self._output_dir, run.run_id)):
            return []
        newest = self._checkpoints.newest(run.run_id)
        directory = run_directory(self._output_dir, run.run_id)
        return [
            Answer(
                request_id=copy.request_id, outcome="done", step=copy.step, source_step=copy.source_step, kind="copy"
            )
            for copy in accepted
            if copy.step <= newest and copy.request_id is not None and read_answer(directory, copy.request_id) is None
        ]

    def _saved(self, run: Run, request_id: str) -> Answer | None:
        """Begins a checkpoint of the newest step, or answers with the newest durable one, if that is not older; else None."""
        if not run.progress.step:
            raise CopyRefused("nothing is trained yet: there is no step to save")
        asked = run.requests.saves
        step = asked.setdefault(request_id, run.progress.step)
        newest = self._checkpoints.newest(run.run_id)
        if newest < step:
            begun = self._checkpoints.pending(run.run_id) is not None or self._checkpoints.begin(run)
            if not begun:
                del asked[request_id]
                raise CopyRefused(f"step {run.progress.step} cannot be saved; the trainer's log says why")
            return None
        del asked[request_id]
        keep(self._output_dir, run.run_id, newest)
        return Answer(request_id=request_id, outcome="done", step=newest)

    def _copied(self, run: Run, request: CopyRequest, taken: int) -> None:
        """Accepts a copy, unless it was accepted before; it is answered once it is sealed."""
        if request.request_id in {copy.request_id for copy in copies.all_accepted(self._output_dir, run.run_id)}:
            return
        published = copies.published_before(self._output_dir, run.run_id)
        later = copies.accepted_steps(self._output_dir, run.run_id)
        step = 1 + max(taken, published, *later, 0)
        if step > run.config.last_step:
            raise CopyRefused(f"the run has no step left for a copy: its last is {run.config.steps} (steps)")
        source_step = request.step or copies.newest_durable(self._output_dir, request.source)
        copy = Copy(step, request.source, source_step, request.schedule, request.request_id)
        copies.accept(self._output_dir, run.run_id, copy, run)
        logger.info(
            "run %s takes over step %d of run %s in place of its update %d",
            run.run_id,
            source_step,
            request.source,
            step,
        )

    def _log(self, run: Run, answer: Answer) -> None:
        at = "" if answer.step is None else f" at step {answer.step}"
        because = f": {printable(answer.reason)}" if answer.reason else ""
        logger.info("request %s to run %s is %s%s%s", answer.request_id, run.run_id, answer.outcome, at, because)
