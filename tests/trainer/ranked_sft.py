"""Supervised fine-tuning on each of several real ranks, one configuration after another, for `test_sft.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from counterpoint.trainer.ranks import is_follower
from counterpoint.trainer.runs import manager
from counterpoint.trainer.sft import train
from counterpoint.trainer.sft.batches import SftBatches
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.trainer.train import train as follow


def stop_at(last: int, patch: pytest.MonkeyPatch) -> None:
    """Has a signal ask this process to stop when the batch of a step is made."""
    batch = SftBatches.batch

    def stopping(self: SftBatches, step: int) -> Any:
        if step == last:
            signal.raise_signal(signal.SIGTERM)
        return batch(self, step)

    patch.setattr(SftBatches, "batch", stopping)


def main(directory: Path, work: Sequence[tuple[SftConfig, int, int]]) -> None:
    """Trains by each configuration, over a port, up to the step at whose batch it is to stop; 0 for its end.

    `ended` has a line for each: the exit code, or the error. The others than rank 0 have to end well.
    """
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # by which a rank knows that it is one of several
    for config, port, last in work:
        os.environ["MASTER_PORT"] = str(port)
        manager._manager = None
        if is_follower():
            assert follow(config.of_trainer, lambda: None) == 0
            continue
        with pytest.MonkeyPatch.context() as patch, (directory / "ended").open("a") as ended:
            stop_at(last, patch)
            try:
                print(train.run(config), file=ended)
            except ValueError as error:
                print(error, file=ended)
