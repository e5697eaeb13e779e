"""Sends each trial to Weights & Biases as a run, if the package `wandb` is installed (it is in no extra).

Everything of W&B happens in one thread behind a bounded queue: a slow network delays no trial. When the queue is full results
are dropped and counted; what W&B raises is logged, and the experiment goes on.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from counterpoint.tune.callbacks.logger_callback import LoggerCallback
from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import TRAINING_ITERATION, Result, flattened
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)

_LONGEST_QUEUE = 10_000


class WandbLoggerCallback(LoggerCallback):
    """One run of W&B for each trial; a resumed trial goes on in its run.

    Args:
        project: The project at W&B.
        group: The runs' group; None for none.
        end_timeout_s: So long the end of the experiment waits for what is not sent yet.
        init: More arguments of `wandb.init`. The key comes from W&B's own environment or files, never from here.
    """

    def __init__(self, project: str, group: str | None = None, end_timeout_s: float = 60.0, **init: Any) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise TuneError("WandbLoggerCallback needs the package wandb: pip install wandb") from error
        self._init = {"project": project, "group": group, "resume": "allow", "reinit": "create_new", **init}
        self._end_timeout_s = end_timeout_s
        self._runs: dict[str, Any] = {}
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_LONGEST_QUEUE)
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def log_trial_start(self, trial: Trial) -> None:
        """Opens the trial's run."""
        trial_id, name, config = trial.trial_id, str(trial), trial.config
        self._soon(lambda: self._run(trial_id, name, config))

    def log_trial_result(self, iteration: int, trial: Trial, result: Result, number: int | None) -> None:
        """Sends the result, without the configuration."""
        flat = flattened({key: value for key, value in result.items() if key != "config"})
        trial_id, name, config = trial.trial_id, str(trial), trial.config
        self._soon(lambda: self._run(trial_id, name, config).log(flat, step=flat.get(TRAINING_ITERATION)))

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Ends the trial's run."""
        self._soon(lambda: self._finish(trial.trial_id, failed))

    def on_experiment_end(self, trials: Any, **info: Any) -> None:
        """Waits until everything is sent, but not longer than `end_timeout_s`."""
        if self._thread is None:
            return
        self._soon(self._finish_all)
        try:
            self._queue.put(None, timeout=self._end_timeout_s)
        except queue.Full:
            logger.warning("wandb: still busy after %g s; what is not sent is lost", self._end_timeout_s)
            return
        self._thread.join(self._end_timeout_s)
        if self._thread.is_alive():
            logger.warning("wandb: not everything is sent after %g s; the rest is lost", self._end_timeout_s)
        self._thread = None

    def _soon(self, call: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._dropped += 1
            if self._dropped in (1, 100, 10_000):
                logger.warning("wandb: its queue is full; %d calls are dropped so far", self._dropped)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("wandb failed; the experiment goes on")

    def _run(self, trial_id: str, name: str, config: dict[str, Any]) -> Any:
        if trial_id not in self._runs:
            self._runs[trial_id] = self._wandb.init(id=trial_id, name=name, config=config, **self._init)
        return self._runs[trial_id]

    def _finish(self, trial_id: str, failed: bool) -> None:
        if (run := self._runs.pop(trial_id, None)) is not None:
            run.finish(exit_code=int(failed))

    def _finish_all(self) -> None:
        for trial_id in list(self._runs):
            self._finish(trial_id, failed=False)
