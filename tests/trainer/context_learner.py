"""Learners on real ranks that share rows, for `test_context.py`: what they compute, beside one plain rank, as JSON.

Run it as `torchrun --nproc-per-node=N -m tests.trainer.context_learner DIRECTORY DENSE MIXTURE [SCENARIO ...]`. Two ranks share
each row and have the whole model each; of four, two share a row and all share the model. Without scenarios passes fail, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.ranks import Ranks
from tests.trainer.lone_run import ALONE
from tests.trainer.sharded_learner import FITS, SCENARIOS, Bench, train_all, train_failing

REFERENCE = "dense-full-reference"

NAMES = [name for name in SCENARIOS if name != "dense-lora-other-reference"]
"""What two ranks train. Rows of a reference that is another model are shared as those of `REFERENCE` are."""


def train_beside_a_failing_reference(directory: Path, models: dict[str, Path], group: Ranks) -> dict[str, Any]:
    """Steps in which the last rank lacks memory for many tokens of the reference policy's rows."""
    model, runs, routed = SCENARIOS[REFERENCE]
    place = directory / "failing-reference"
    if group.index == 0:
        place.mkdir()
    bench, failures = Bench(place, models[model], group, runs, sharding=False, context_parallel=2), list[int]()
    if group.index == 0:
        result = {"lines": [bench.train(step, routed) for step in (1, 2)]}
        bench.learner.stop()
        return result
    opened = bench.learner._references.open

    def lack_memory(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if output.shape[1] > FITS:
            failures.append(output.shape[1])
            torch.empty(2**58)

    def open_failing(*arguments: Any) -> Any:
        reference = opened(*arguments)
        assert reference is not None
        reference.get_submodule("model.layers.1.mlp").register_forward_hook(lack_memory)
        return reference

    bench.learner._references.open = open_failing  # type: ignore[assignment,method-assign]
    bench.learner.follow()
    assert failures, "no row of the reference has failed"
    return {}


def main(directory: Path, dense: Path, mixture: Path, *only: str) -> None:
    models = {"dense": dense, "moe": mixture}
    count = int(os.environ["WORLD_SIZE"])
    shared: dict[str, Any] = {"sharding": count > 2, "context_parallel": 2}
    config = TrainerConfig(
        output_dir=directory, model=str(dense), processes=count, threads=1, rank_silence_seconds=300, **shared
    )
    with ranks.join(config, torch.device("cpu")) as group:
        found = {"shared": train_all(directory, models, group, list(only) or NAMES, **shared)}
        if not only:
            failing = train_failing(directory, models, group, False, **shared)
            found["failing"] = failing | {REFERENCE: train_beside_a_failing_reference(directory, models, group)}
        index = group.index
    if index == 0:
        if not only:
            found["failing-plain"] = train_failing(directory, models, ALONE)
            found["plain"] = train_all(directory, models, ALONE, NAMES)
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
