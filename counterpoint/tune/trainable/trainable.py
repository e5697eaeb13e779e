"""The class that users derive a trainable from. Names and meanings are those of `Trainable` in Ray Tune 1.x.

An object lives in the process of its trial, which calls `train`, `save`, `restore`, `reset` and `stop`
(`counterpoint/tune/executors/ trial_process.py`). The same object can be used without a tuner.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from counterpoint.tune import result as keys
from counterpoint.tune.json_values import as_json
from counterpoint.tune.result import Result
from counterpoint.tune.trainable import saved_state
from counterpoint.tune.trainable.saved_state import TrainableProgress


@dataclass(frozen=True)
class TrialInfo:
    """Which trial an object trains, as far as the trainable may know."""

    trial_id: str = ""
    trial_name: str = ""
    logdir: str = "."


class Trainable:
    """A training that goes step by step, can be saved and restored, and may take another config in place.

    Derive from it and define `step`; `setup`, `save_checkpoint`, `load_checkpoint`, `reset_config`, `cleanup` and
    `export_model` as needed.
    """

    def __init__(self, config: dict[str, Any] | None = None, trial: TrialInfo | None = None) -> None:
        """Calls `setup`. Users override that, not this."""
        self.config = config or {}
        self._trial = trial or TrialInfo()
        self._begin()
        self.setup(copy.deepcopy(self.config))

    def _begin(self) -> None:
        self._progress = TrainableProgress()
        self._since_restore = TrainableProgress()
        self._saved: Path | None = None
        """The checkpoint that holds exactly the present state, if there is one."""

    # --- what users define ---

    def setup(self, config: dict[str, Any]) -> None:
        """Prepares the training. Called once, before the first step or a restore."""

    def step(self) -> Result:
        """Trains for one iteration and returns its metrics; `done: True` among them ends the trial."""
        raise NotImplementedError(f"{type(self).__name__} defines no step()")

    def save_checkpoint(self, checkpoint_dir: str) -> str | dict[str, Any] | None:
        """Saves the state, into a directory that becomes a checkpoint whole or not at all.

        Returns:
            None or a path in that directory, when it wrote files there; or the state itself as a dict of JSON values.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no save_checkpoint(), so it has no checkpoints")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Takes back the path or the dict that `save_checkpoint` returned; the directory's path if that was None."""
        raise NotImplementedError(f"{type(self).__name__} defines no load_checkpoint(), so it cannot be restored")

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Takes another config in place, as if newly set up with it.

        Returns:
            Whether it did; if not, a new object takes this one's place.
        """
        return False

    def cleanup(self) -> None:
        """Releases what `setup` took. Called once, when the trial stops in order or has raised something, not when killed."""

    def export_model(self, export_formats: Sequence[str], export_dir: str) -> dict[str, str]:
        """Writes the model in these formats. Returns the paths by format."""
        return {}

    # --- what the tuner calls ---

    def train(self) -> Result:
        """Makes one step. Returns its metrics with the iteration, the times and the totals that are filled in."""
        began = time.monotonic()
        result = self.step()
        if not isinstance(result, dict):
            raise TypeError(f"step() returned a {type(result).__name__}; expected a dict of metrics")
        return self._complete(result, time.monotonic() - began)

    def _complete(self, metrics: Result, seconds: float) -> Result:
        result: Result = as_json(metrics, "the result", finite=False)
        self._saved = None
        seconds = result.setdefault(keys.TIME_THIS_ITER_S, seconds)
        for counted in (self._progress, self._since_restore):
            counted.iteration += 1
            counted.time_total += seconds
            if result.get(keys.TIMESTEPS_THIS_ITER) is not None:
                counted.timesteps_total = (counted.timesteps_total or 0) + result[keys.TIMESTEPS_THIS_ITER]
            if result.get(keys.EPISODES_THIS_ITER) is not None:
                counted.episodes_total = (counted.episodes_total or 0) + result[keys.EPISODES_THIS_ITER]
        result.setdefault(keys.DONE, False)
        result.setdefault(keys.TIMESTEPS_TOTAL, self._progress.timesteps_total)
        result.setdefault(keys.EPISODES_TOTAL, self._progress.episodes_total)
        now = datetime.now()
        result.setdefault("timestamp", int(now.timestamp()))
        return result | {
            keys.TRAINING_ITERATION: self._progress.iteration,
            keys.TIME_TOTAL_S: self._progress.time_total,
            keys.TRIAL_ID: self.trial_id,
            keys.EXPERIMENT_ID: self.trial_id,
            "date": now.strftime("%Y-%m-%d_%H-%M-%S"),
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "node_ip": _address(),
            "config": self.config,
            "time_since_restore": self._since_restore.time_total,
            "timesteps_since_restore": self._since_restore.timesteps_total or 0,
            "iterations_since_restore": self._since_restore.iteration,
        }

    def save(self, checkpoint_dir: str | None = None) -> str:
        """Makes a checkpoint that is durable when this returns; `logdir/checkpoint_NNNNNN` unless another path is given.

        Returns:
            Its path.
        """
        path = Path(checkpoint_dir or Path(self.logdir) / f"checkpoint_{self.iteration:06d}").absolute()
        if self._saved != path:
            saved_state.write(path, self.save_checkpoint, self._saved_progress(), self.trial_id)
            self._saved = path
        return str(path)

    def _saved_progress(self) -> TrainableProgress:
        """How far the state had come that `save_checkpoint` saves."""
        return self._progress

    def restore(self, checkpoint_path: str) -> None:
        """Goes on from a checkpoint of this class: its state, its iteration and its totals."""
        state, progress = saved_state.read(Path(checkpoint_path).absolute())
        self.load_checkpoint(state)
        self._progress, self._since_restore = progress, TrainableProgress()
        self._saved = Path(checkpoint_path).absolute()

    def reset(self, new_config: dict[str, Any], trial: TrialInfo | None = None) -> bool:
        """Begins anew with another config, for this or another trial, if `reset_config` can.

        Returns:
            Whether it did.
        """
        if not self.reset_config(copy.deepcopy(new_config)):
            return False
        self.config, self._trial = new_config, trial or self._trial
        self._begin()
        return True

    def stop(self) -> None:
        """Ends the training: `cleanup`."""
        self.cleanup()

    # --- what both may ask ---

    @property
    def iteration(self) -> int:
        """How many steps the training has made, those before a restore included."""
        return self._progress.iteration

    training_iteration = iteration

    @property
    def logdir(self) -> str:
        """The trial's directory."""
        return self._trial.logdir

    @property
    def trial_id(self) -> str:
        """The trial's id; empty without a tuner."""
        return self._trial.trial_id

    @property
    def trial_name(self) -> str:
        """The trial's name, for people."""
        return self._trial.trial_name

    def get_config(self) -> dict[str, Any]:
        """The config that it trains with."""
        return self.config

    def get_state(self) -> dict[str, Any]:
        """The counters that are saved beside each checkpoint."""
        return asdict(self._progress)


@cache
def _address() -> str:
    """The address by which others would reach this machine. Sends nothing: connecting a datagram socket only picks a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
