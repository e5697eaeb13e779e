"""Loggers for trackers: TensorBoard's files, and a thread that speaks to W&B and never delays a trial."""

from __future__ import annotations

import builtins
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from counterpoint.tune.callbacks.tensorboard_logger import TBXLoggerCallback
from counterpoint.tune.callbacks.wandb_logger import WandbLoggerCallback
from counterpoint.tune.errors import TuneError
from counterpoint.tune.trial import Trial


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard shows: of each file all scalars, those from a later file's first step on only from that file."""
    shown: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.suffix):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            event = Event.FromString(data[offset + 12 : offset + 12 + length])
            offset += 12 + length + 4
            if event.session_log.status == 1:  # START: what is purged
                shown = [each for each in shown if each[1] < event.step]
            shown += [
                (value.tag, event.step, value.simple_value)
                for value in event.summary.value
                if value.HasField("simple_value")
            ]
    return shown


def test_tensorboard_shows_numbers_and_a_resume_replaces_what_is_told_again(tmp_path: Path) -> None:
    trial = Trial("m:a", {"lr": 0.5}, "one", str(tmp_path), evaluated_params={"lr": 0.5, "none": None})
    for begin in (1, 2):
        logger = TBXLoggerCallback()
        for number in range(begin, begin + 2):
            result = {
                "training_iteration": number,
                "eval": {"loss": number / 2},
                "ok": True,
                "note": "x",
                "list": [1.0, 2.0],
            }
            logger.on_trial_result(0, [trial], trial, result, number=number)
        logger.on_trial_result(0, [trial], trial, {"training_iteration": 3, "eval": {"loss": float("nan")}}, number=3)
        if begin == 1:
            logger.on_experiment_end([trial])
        else:
            logger.on_trial_complete(0, [trial], trial)
            logger.on_trial_complete(0, [trial], trial)
    assert [each for each in scalars(tmp_path / "one") if each[0].startswith("ray/")] == [
        ("ray/tune/eval/loss", step, step / 2) for step in (1, 2, 3)
    ]


class Wandb(SimpleNamespace):
    """Stands for the package: keeps what it is told, and can be made to wait or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.is_called = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def init(self, **arguments: Any) -> Any:
        self.told.append(("init", arguments["id"], arguments["project"], arguments["config"]))
        self.is_called.set()
        self.may_go_on.wait(60)
        if arguments["name"] == "broken_x":
            raise ConnectionError("no network")
        trial_id = arguments["id"]
        return SimpleNamespace(
            log=lambda values, step: self.told.append(("log", trial_id, values, step)),
            finish=lambda exit_code: self.told.append(("finish", trial_id, exit_code)),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_wandb_gets_a_run_for_each_trial(wandb: Wandb) -> None:
    logger = WandbLoggerCallback("project")
    one, two = Trial("m:a", {"lr": 1}, "one"), Trial("m:a", {"lr": 2}, "two")
    logger.on_trial_start(0, [], one)
    logger.on_trial_result(0, [], one, {"eval": {"loss": 2}, "training_iteration": 4, "config": {}}, number=4)
    logger.on_trial_fail(0, [], one)
    logger.on_trial_result(0, [], two, {"loss": 3, "training_iteration": 1}, number=1)
    logger.on_experiment_end([one, two])
    assert wandb.told == [
        ("init", "one", "project", {"lr": 1}),
        ("log", "one", {"eval/loss": 2, "training_iteration": 4}, 4),
        ("finish", "one", 1),
        ("init", "two", "project", {"lr": 2}),
        ("log", "two", {"loss": 3, "training_iteration": 1}, 1),
        ("finish", "two", 0),
    ]
    assert "wandb" not in {thread.name for thread in threading.enumerate()}


def test_a_wandb_that_hangs_or_fails_delays_nothing(
    wandb: Wandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("counterpoint.tune.callbacks.wandb_logger._LONGEST_QUEUE", 3)
    wandb.may_go_on.clear()
    logger = WandbLoggerCallback("project", end_timeout_s=0.01)
    trial = Trial("m:broken", {}, "x")
    logger.on_trial_start(0, [], trial)
    assert wandb.is_called.wait(60)  # from here on nothing leaves the queue
    for number in range(9):
        logger.on_trial_result(0, [], trial, {"loss": number}, number=number)
    thread = logger._thread
    assert thread is not None
    logger.on_experiment_end([trial])
    assert "its queue is full" in caplog.text
    assert "still busy after 0.01 s" in caplog.text
    wandb.may_go_on.set()
    logger._end_timeout_s = 60
    logger.on_experiment_end([trial])
    thread.join(60)
    assert not thread.is_alive()
    assert "wandb failed; the experiment goes on" in caplog.text


@pytest.mark.parametrize(
    ("make", "package"), [(TBXLoggerCallback, "tensorboardX"), (lambda: WandbLoggerCallback("p"), "wandb")]
)
def test_a_missing_package_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TuneError, match="pip install"):
        make()
