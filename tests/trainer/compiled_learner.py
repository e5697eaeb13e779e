"""Learners with compiled layers of a sharded model on two real ranks, for `test_compiled.py`: what they compute, as JSON.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.compiled_learner DIRECTORY DENSE MIXTURE`, with a last argument
`refused` to let the second rank fail to compile, and the first one seem to.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.lone_run import ALONE
from tests.trainer.sharded_learner import train_all
from trainer import ranks
from trainer.config import TrainerConfig
from trainer.model import compiled

SCENARIOS = ["dense-full", "moe-full"]
"""The layers of the mixture are computed again in the backward pass."""


def train(directory: Path, models: dict[str, Path], refused: bool) -> dict[str, Any] | None:
    """Returns the results of rank 0."""
    config = TrainerConfig(output_dir=directory, model=str(models["dense"]), processes=2, threads=1)
    config = config.model_copy(update={"rank_silence_seconds": 300})
    with ranks.join(config, torch.device("cpu")) as group, pytest.MonkeyPatch.context() as patched:
        reports: list[str] = []
        for level in ("info", "warning"):
            patched.setattr(compiled.logger, level, lambda text, *values: reports.append(text % values))
        if refused:
            patched.setattr(torch, "compile", _without_a_compiler if group.index else _as_it_is)
        found = {"sharded": train_all(directory, models, group, SCENARIOS, compile=True)}
        index = group.index
    print("\n".join(reports))
    if index:
        return None
    return found | {"reports": reports, "plain": train_all(directory, models, ALONE, SCENARIOS)}


def _as_it_is(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    return function


def _without_a_compiler(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    return fail


def main(directory: Path, dense: Path, mixture: Path, *refused: str) -> None:
    if (found := train(directory, {"dense": dense, "moe": mixture}, bool(refused))) is not None:
        (directory / f"found_{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
