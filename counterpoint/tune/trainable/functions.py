"""A function of the user as a trainable: `f(config)`, `f(config, checkpoint_dir=None)` or `f(config, reporter)`.

Its checkpoints are those that it makes itself (`tune.checkpoint_dir`): each becomes durable before the result that follows it. To
save a function is to name the newest a second time.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from counterpoint.transport.files.atomic import remove_directory
from counterpoint.tune.errors import AbortTrialExecution, TuneError
from counterpoint.tune.result import Result
from counterpoint.tune.trainable import saved_state
from counterpoint.tune.trainable.saved_state import METADATA, TrainableProgress
from counterpoint.tune.trainable.session import OWN, FunctionEnded, FunctionSession, discard, open_session
from counterpoint.tune.trainable.trainable import Trainable, TrialInfo

CHECKPOINT_DIR = "checkpoint_dir"

END_SECONDS = 5.0
"""How long a function may clean up after itself when its trial stops, in its `finally` blocks."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_FILES_OF_OURS = ("STABLE", METADATA)


class FunctionTrainable(Trainable):
    """A function on a thread of its own."""

    _function: Callable[..., Any]
    """The user's function, set by `trainable_class`."""
    made: Path | None = None
    """The checkpoint that the function made in the step that has just ended."""

    def setup(self, config: dict[str, Any]) -> None:
        """Prepares the thread; it starts with the first step."""
        for left in Path(self.logdir).glob(f"{OWN}*"):  # by an attempt that was killed
            discard(left)
        self._newest: Path | None = None
        """Its newest checkpoint, or the one that it begins from."""
        self._newest_progress = TrainableProgress()
        self._restored_from: str | None = None
        self._session = FunctionSession(self._trial, self._call)
        open_session(self._session)

    def _call(self, session: FunctionSession) -> Any:
        function = type(self)._function
        parameters = inspect.signature(function).parameters
        if CHECKPOINT_DIR in parameters:
            return function(self.config, checkpoint_dir=self._restored_from)
        required = [each for each in parameters.values() if each.default is each.empty and each.kind not in _VARIADIC]
        return function(self.config, session.report) if len(required) > 1 else function(self.config)

    def step(self) -> Result:
        """Lets the function work until its next report. Raises `FunctionEnded` when it returns instead."""
        return self._session.next_result()

    def train(self) -> Result:
        """Does as `Trainable.train`; makes what the function has saved before its report a checkpoint of this iteration."""
        self.made = None
        result = super().train()
        wrote, self._session.made = self._session.made, None
        if wrote is not None:
            unique = wrote.name.removeprefix(OWN)  # a former checkpoint of this iteration may be about to be deleted
            self.made = Path(self.logdir).absolute() / f"checkpoint_{self.iteration:06d}-{unique}"
            saved_state.write(self.made, lambda into: _move(wrote, into), self._progress, self.trial_id)
            self._saved = self._newest = self.made
            self._newest_progress = replace(self._progress)
        return result

    @property
    def saved_iteration(self) -> int:
        """The iteration at which the function made what `save` saves."""
        return self._newest_progress.iteration

    def _saved_progress(self) -> TrainableProgress:
        return self._newest_progress

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Links the files of the function's newest checkpoint, which nobody writes again, into the directory."""
        if self._newest is None:
            raise TuneError(
                "the function has made no checkpoint yet; it makes one with `with tune.checkpoint_dir(step=...)` before a report"
            )
        ours = shutil.ignore_patterns(*_FILES_OF_OURS)
        shutil.copytree(self._newest, checkpoint_dir, copy_function=_link, dirs_exist_ok=True, ignore=ours)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Has the function begin from this directory. A function that runs cannot go back."""
        if self._session.begun:
            raise TuneError(
                "a function that has begun cannot be restored; stop the trial and start it from the checkpoint"
            )
        if CHECKPOINT_DIR not in inspect.signature(type(self)._function).parameters:
            raise AbortTrialExecution(
                f"{type(self).__name__} cannot be restored: it takes no checkpoint_dir; write f(config, checkpoint_dir=None)"
            )
        self._restored_from = str(checkpoint)

    def restore(self, checkpoint_path: str) -> None:
        """See `Trainable.restore`."""
        super().restore(checkpoint_path)
        self._newest, self._newest_progress = self._saved, replace(self._progress)

    def reset(self, new_config: dict[str, Any], trial: TrialInfo | None = None) -> bool:
        """Runs the function anew, once it has ended."""
        if not self._session.end(END_SECONDS):
            return False
        self.config, self._trial = new_config, trial or self._trial
        self._begin()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Ends the function at its report; its `finally` blocks run."""
        self._session.end(END_SECONDS)
        open_session(None)
        if self._session.made is not None:
            discard(self._session.made)


def trainable_class(target: Any, path: str) -> type[Trainable]:
    """Returns the class for what an import path named: a `Trainable`, or a function made into one.

    Raises `TuneError` for anything else.
    """
    if inspect.isclass(target) and issubclass(target, Trainable):
        return target
    if inspect.isclass(target) or not callable(target):
        raise TuneError(f"{path} is neither a function nor a class derived from tune.Trainable")
    return type(path.rpartition(":")[2], (FunctionTrainable,), {"_function": staticmethod(target)})


def require_export(kind: type[Trainable]) -> None:
    """Raises `TuneError` for a trainable that exports nothing: a function, or a class without `export_model`."""
    if kind.export_model is Trainable.export_model:
        raise TuneError(
            f"export_formats are given, and {kind.__name__} exports nothing: a class derived from tune.Trainable defines "
            "export_model(export_formats, export_dir); a function writes its model itself, into tune.get_trial_dir()"
        )


def _move(source: Path, into: str) -> None:
    for entry in source.iterdir():
        entry.rename(Path(into) / entry.name)
    remove_directory(source)


def _link(source: str, target: str) -> str:
    """Names a file a second time; copies it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


__all__ = ["FunctionEnded", "FunctionTrainable", "require_export", "trainable_class"]
