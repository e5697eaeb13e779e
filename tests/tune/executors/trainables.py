"""Trainables of the tests: some that work, and every way not to."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint import tune

FOREVER = 3600.0


class Counter(tune.Trainable):
    """Counts, from where its config says; knows its checkpoints."""

    def setup(self, config: dict[str, Any]) -> None:
        self.count = int(config.get("begin", 0))

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count, "pid": os.getpid(), "done": self.count == self.config.get("until")}

    def save_checkpoint(self, checkpoint_dir: str) -> str:
        path = Path(checkpoint_dir) / "count"
        path.write_text(str(self.count))
        return str(path)

    def load_checkpoint(self, checkpoint: str) -> None:
        self.count = int(Path(checkpoint).read_text())

    def export_model(self, export_formats: Any, export_dir: str) -> dict[str, str]:
        Path(export_dir, "model").write_text(str(self.count))
        return {format_: str(Path(export_dir, "model")) for format_ in export_formats}

    def cleanup(self) -> None:
        Path(self.logdir, "cleaned").touch()


class Resettable(Counter):
    """Takes another config in place, if that lets it."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.count = int(new_config.get("begin", 0))
        return bool(new_config.get("in_place", True))


class Breaks(tune.Trainable):
    """Raises in its second step, and, if its config says so, in its end."""

    def step(self) -> dict[str, Any]:
        if self.iteration == 1:
            raise ValueError("no second step")
        return {}

    def cleanup(self) -> None:
        with Path(self.logdir, "cleaned").open("a") as file:
            file.write(f"after {self.iteration}\n")
        if self.config.get("hangs"):
            time.sleep(FOREVER)
        raise OSError("nothing to clean up")


def reports(config: dict[str, Any]) -> None:
    for value in range(config.get("times", 3)):
        tune.report(value=value, pid=os.getpid())


def counts(config: dict[str, Any], checkpoint_dir: str | None = None) -> None:
    """Counts from its checkpoint on, and makes one before each even count."""
    count = 0 if checkpoint_dir is None else int(Path(checkpoint_dir, "count").read_text())
    while True:
        count += 1
        if count % 2 == 0:
            with tune.checkpoint_dir(step=count) as directory:
                Path(directory, "count").write_text(str(count))
        tune.report(count=count)


def writes(config: dict[str, Any], reporter: Callable[..., None]) -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    reporter(trial=tune.get_trial_id())


class Devices(tune.Trainable):
    def step(self) -> dict[str, Any]:
        return {"devices": os.environ["CUDA_VISIBLE_DEVICES"]}


def leaves_a_child(config: dict[str, Any]) -> None:
    """Starts a process in a session of its own, which nobody ends."""
    child = subprocess.Popen(["sleep", str(FOREVER)], start_new_session=True, stdout=subprocess.DEVNULL)
    tune.report(child=child.pid, pid=os.getpid())


class CannotSave(tune.Trainable):
    def step(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        raise OSError("the disk is made of cheese")


class HangsInSave(CannotSave):
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        time.sleep(FOREVER)


class HangsInSetup(CannotSave):
    def setup(self, config: dict[str, Any]) -> None:
        time.sleep(FOREVER)


def closes_its_socket(config: dict[str, Any]) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # whichever number it has where the tests before left many open
    tune.report(one=1)


def hangs(config: dict[str, Any]) -> None:
    time.sleep(FOREVER)


def leaks(config: dict[str, Any]) -> None:
    kept = []
    while True:
        kept.append(bytearray(16 * 2**20))


def exits(config: dict[str, Any]) -> None:
    sys.exit(3)


class Exits(tune.Trainable):
    def step(self) -> dict[str, Any]:
        sys.exit(3)


def exits_at_once(config: dict[str, Any]) -> None:
    os._exit(3)


def segfaults(config: dict[str, Any]) -> None:
    ctypes.string_at(0)


def is_killed(config: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(config: dict[str, Any]) -> None:
    raise ValueError("no such luck")


def reports_nan(config: dict[str, Any]) -> None:
    tune.report(loss=float("nan"))
    tune.report(loss=float("inf"))


def reports_an_object(config: dict[str, Any]) -> None:
    tune.report(model=object())


def floods(config: dict[str, Any]) -> None:
    for _ in range(64):
        print("x" * 2**16)
        print("y" * 2**16, file=sys.stderr)
    raise ValueError("the end of the flood")
