"""Ranks whose device is the one in the host's memory, for `test_ranks_on_gpus.py`: they run the learners of `tests/trainer`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.ranks import Ranks
from tests.gpu.host_device import NAME, host_device


def main(directory: Path, learner: str, *arguments: object) -> None:
    """Calls `main(directory, *arguments)` of a learner's module, with this device instead of the one that it names."""
    device, join, init = host_device(), ranks.join, dist.init_process_group

    @contextmanager
    def join_on_host(config: TrainerConfig, _: torch.device) -> Iterator[Ranks]:
        with join(config, device) as group:
            yield group

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "join", join_on_host)
        patched.setattr(dist, "init_process_group", lambda _, **given: init(NAME, **given))
        importlib.import_module(learner).main(directory, *arguments)
