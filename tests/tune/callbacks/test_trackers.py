"""The logger for TensorBoard: what its files show."""

from __future__ import annotations

import builtins
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from counterpoint.tune.callbacks.tensorboard_logger import TBXLoggerCallback
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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TuneError, match="pip install"):
        TBXLoggerCallback()
