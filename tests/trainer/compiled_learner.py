"""Learners with compiled layers on real ranks that divide a model or share rows, for `test_compiled.py`: their results as JSON.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.compiled_learner DIRECTORY DENSE MIXTURE`, with a last argument
`refused` to let the last rank fail to compile, and the others seem to.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.model import compiled
from tests.trainer.lone_run import ALONE
from tests.trainer.sharded_learner import train_all

DENSE, MIXTURE = "dense-full", "moe-full"
"""The layers of the mixture are computed again in the backward pass."""

TRACED = partial(torch.compile, backend="eager")
"""Makes the same graphs, and calls torch's operations in their order: it leaves out what takes most of the time."""

WAYS: dict[bool, dict[str, tuple[dict[str, Any], list[str]]]] = {
    False: {
        "traced": ({"sharding": True, "context_parallel": 2}, [DENSE]),
        "all": ({"sharding": True, "context_parallel": 2, "expert_parallel": 2}, [MIXTURE]),
    },
    True: {
        "sharded": ({"sharding": True}, [DENSE]),
        "context": ({"sharding": False, "context_parallel": 2}, [DENSE]),
        "experts": ({"sharding": False, "expert_parallel": 2}, [MIXTURE]),
    },
}
"""By whether it is refused: how two ranks work together, and what is trained. To compile takes long, so that is all at once, and
`traced` is `TRACED`."""


def train(directory: Path, models: dict[str, Path], refused: bool) -> dict[str, Any] | None:
    """Returns the results of rank 0."""
    count = int(os.environ["WORLD_SIZE"])
    config = TrainerConfig(
        output_dir=directory,
        model=str(models["moe"]),
        processes=count,
        threads=1,
        context_parallel=2,
        expert_parallel=2,
        rank_silence_seconds=300,
    )
    with ranks.join(config, torch.device("cpu")) as group, pytest.MonkeyPatch.context() as patched:
        reports: list[str] = []
        for level in ("info", "warning"):
            patched.setattr(compiled.logger, level, lambda text, *values: reports.append(text % values))
        if refused:
            patched.setattr(torch, "compile", _as_it_is if group.index < count - 1 else _without_a_compiler)
        found: dict[str, Any] = {}
        graphs: dict[str, int] = {}
        index = group.index
        for way, (trainer, names) in WAYS[refused].items():
            place = directory / way
            place.mkdir(exist_ok=True)
            torch._dynamo.reset()  # which stops compiling a layer after so many learners in one process
            counters.clear()
            own = replace(
                group,
                context=group.context if "context_parallel" in trainer else None,
                experts=group.experts if "expert_parallel" in trainer else None,
            )
            with pytest.MonkeyPatch.context() as without_code:
                if not refused and (way == "traced" or index > 0):  # ranks have equal graphs: the code of one is enough
                    without_code.setattr(torch, "compile", TRACED)
                found[way] = train_all(place, models, own, names, compile=True, **trainer)
            graphs[way] = counters["stats"]["unique_graphs"]
    print("\n".join(reports))
    if index:
        return None
    return found | {
        "reports": reports,
        "graphs": graphs,
        "plain": train_all(directory, models, ALONE, [DENSE, MIXTURE]),
    }


def _as_it_is(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    return function


def _without_a_compiler(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    return fail


def main(directory: Path, dense: Path, mixture: Path, *refused: str) -> None:
    if (found := train(directory, {"dense": dense, "moe": mixture}, bool(refused))) is not None:
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
