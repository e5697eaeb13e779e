"""What a snapshot of an experiment holds comes back as it was."""

from __future__ import annotations

import math

import msgspec
import pytest

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.runner import codec
from counterpoint.tune.runner.progress import AttemptPhase, Exploit, HeldResult, TrialProgress


@pytest.mark.parametrize("iteration", [3, 2.5])
def test_the_progress_of_a_trial_comes_back(iteration: float) -> None:
    result = {"training_iteration": iteration, "loss": math.inf, "nested": {"x": [1, None]}}
    checkpoint = Checkpoint("t1", iteration, "/t1/checkpoint", result)
    progress = TrialProgress(
        7,
        "cpu",
        2,
        AttemptPhase.WAITING,
        iteration,
        latest=result,
        wanted=checkpoint,
        end="PAUSED",
        for_scheduler=checkpoint,
    )
    progress.exploit = Exploit(checkpoint, {"rate": 0.5}, "7_rate=0.5")
    progress.held.append(HeldResult(result, stop=True))
    again = msgspec.convert(codec.unpack(codec.pack(progress)), TrialProgress)
    assert again == progress
    assert type(again.counted) is type(iteration)
