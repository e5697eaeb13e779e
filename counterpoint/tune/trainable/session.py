"""What a function trainable calls while it runs: `tune.report`, `tune.checkpoint_dir`, and who it is. One session a process.

The function runs on a thread of its own. `report` hands its metrics to the trial's main thread and waits until the trial may go
on, so that a scheduler stops or pauses a function exactly at its reports.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.json_values import as_json
from counterpoint.tune.result import Result
from counterpoint.tune.trainable.trainable import TrialInfo

logger = logging.getLogger(__name__)

OWN = ".function_"
"""How the directories begin that a function writes checkpoints into, below its trial's; they become checkpoints at its report."""

_current: FunctionSession | None = None


class FunctionEnded(Exception):
    """The function has returned; there is no further result."""


class FunctionStopped(SystemExit):
    """Raised in the function's thread at `report` when its trial stops, so that its `finally` blocks run."""


class FunctionSession:
    """One function at work: its thread, and the hand-over of results and checkpoints."""

    def __init__(self, trial: TrialInfo, function: Callable[[FunctionSession], Any]) -> None:
        self.trial = trial
        self.made: Path | None = None
        """The directory of a checkpoint that the function has written since its last report."""
        self._function = function
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._turn = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="trainable", daemon=True)

    # --- the function's side ---

    def _run(self) -> None:
        try:
            returned = self._function(self)
            if returned is not None:
                self.report(**_as_metrics(returned))
            ended: BaseException = FunctionEnded()
        except FunctionStopped as stopped:
            ended = stopped
        except SystemExit as exit_call:
            ended = TuneError(f"the function called sys.exit({exit_call.code!r}) before it returned")
            ended.__cause__ = exit_call
        except MemoryError as error:
            traceback.clear_frames(error.__traceback__)  # what fills the memory is in the function's variables
            ended = error
        except BaseException as error:  # noqa: BLE001 - whatever it is, the trial's main thread raises it
            ended = error
        self._results.put(ended)

    def report(self, **metrics: Any) -> None:
        """Hands over a result, and waits until the trial may go on."""
        if threading.current_thread() is not self._thread:
            raise TuneError(
                f"tune.report was called on thread {threading.current_thread().name!r}; "
                "only the thread that runs the function may report"
            )
        result: Result = as_json(metrics, "the result", finite=False)
        self._results.put(result)
        self._turn.acquire()
        if self._stopping:
            raise FunctionStopped(0)

    @contextlib.contextmanager
    def checkpoint_dir(self) -> Iterator[str]:
        """Yields an empty directory, which is the function's checkpoint once it reports."""
        directory = Path(self.trial.logdir).absolute() / f"{OWN}{secrets.token_hex(4)}"
        directory.mkdir(parents=True)
        yield str(directory)
        if self.made is not None:
            discard(self.made)
        self.made = directory

    # --- the trial's side ---

    def next_result(self) -> Result:
        """Lets the function work until its next report. Raises what it raised, or `FunctionEnded`."""
        if not self.begun:
            self._thread.start()
        else:
            self._turn.release()
        found = self._results.get()
        if isinstance(found, BaseException):
            raise found
        return found

    @property
    def begun(self) -> bool:
        """Whether the function was called."""
        return self._thread.ident is not None

    def end(self, seconds: float) -> bool:
        """Ends the function at its report. Returns whether its thread has ended within so many seconds."""
        self._stopping = True
        if self.begun:
            self._turn.release()
            self._thread.join(seconds)
        return not self._thread.is_alive()


def discard(directory: Path) -> None:
    """Removes a checkpoint that nobody will ask for."""
    from counterpoint.transport.files.atomic import remove_directory

    remove_directory(directory)


def open_session(session: FunctionSession | None) -> None:
    """Makes a session the one that the functions below speak to; None ends that."""
    global _current
    _current = session


def report(_metric: Any = None, **metrics: Any) -> None:
    """Reports metrics of the trial, once an iteration. A single positional value is reported as `_metric`.

    Outside a trial it only logs them, so that a function can be tried without a tuner. Raises `TuneError` for a dict in one
    argument, or on another thread than the function's.
    """
    if isinstance(_metric, dict):
        raise TuneError(
            f"tune.report got a dict, {sorted(map(str, _metric))}; write tune.report(**metrics), or name=value for each"
        )
    if _metric is not None:
        metrics["_metric"] = _metric
    if _current is None:
        logger.warning("tune.report was called outside a trial: %s", metrics)
        return
    _current.report(**metrics)


@contextlib.contextmanager
def checkpoint_dir(step: int) -> Iterator[str]:
    """Yields an empty directory for a checkpoint, which counts from the next `tune.report` on.

    The function that is restored finds its path as `checkpoint_dir`. `step` is for the reader; the tuner counts by itself.
    Raises `TuneError` outside a trial's function.
    """
    if _current is None:
        raise TuneError(
            f"tune.checkpoint_dir(step={step}) was called outside a trial's function; there is nowhere to save"
        )
    with _current.checkpoint_dir() as directory:
        yield directory


def get_trial_id() -> str | None:
    """The id of the trial whose function this is; None outside one."""
    return None if _current is None else _current.trial.trial_id


def get_trial_name() -> str | None:
    """The name of the trial whose function this is; None outside one."""
    return None if _current is None else _current.trial.trial_name


def get_trial_dir() -> str | None:
    """The directory of the trial whose function this is; None outside one."""
    return None if _current is None else _current.trial.logdir


def _as_metrics(returned: Any) -> Result:
    if isinstance(returned, dict):
        return returned
    if isinstance(returned, int | float):
        return {"_metric": returned}
    raise TuneError(
        f"the function returned a {type(returned).__name__}; expected None, a dict of metrics, or one number"
    )
