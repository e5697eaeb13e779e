"""Runs of a job for the tests of document 000, and its manager on every rank of a real process group (`main`).

Every rank notes what its hooks were called with, and which adapters it has: `rank_N.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from counterpoint.run.trained import TrainedRun
from counterpoint.trainer.lora import MultiLoRALinear
from counterpoint.trainer.runs import get_multi_run_manager, setup_multi_run_manager
from counterpoint.transport.files.atomic import write_atomically
from tests.trainer.conftest import make_run_config


def write_run(output_dir: Path, run_id: str, age: float = 0.0, **keys: Any) -> Path:
    """Writes `run_<id>/control/orch.toml`, which is `age` seconds old; `keys` are of `[training]`, and `steps`."""
    config = make_run_config(output_dir, Path("/model"), **{"lora": {"rank": 2}, **keys})
    path = output_dir / f"run_{run_id}" / "control" / "orch.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = config.model_copy(update={"run_id": run_id}).model_dump(mode="json", exclude_none=True)
    write_atomically(path, tomli_w.dumps(values).encode())
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def main(directory: Path) -> None:
    """One rank: two runs, of which one gives its slot to a third."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, job = dist.get_rank(), directory / "job"
    setup_multi_run_manager(output_dir=job, max_runs=2)
    manager = get_multi_run_manager()
    layer = MultiLoRALinear(base_layer=torch.nn.Linear(8, 8), rank=4, n_adapters=manager.max_runs)
    layer.register_with_runs(manager, "layers.0.q_proj")
    notes: list[list[Any]] = []

    def creation(idx: int, run_id: str) -> None:
        dist.barrier()
        manager.reset_run_parameters(idx)
        notes.append(["creation", idx, run_id])

    def deletion(idx: int, run_id: str) -> None:
        dist.barrier()
        notes.append(["deletion", idx, run_id])

    def discovered(idx: int, run_id: str, config: TrainedRun) -> None:
        manager.scaling_factors[idx] = {"a": 20.0}.get(run_id, 1.0)

    manager.register_discovered_hook(discovered)
    manager.register_creation_hook(creation)
    manager.register_deletion_hook(deletion)

    def first() -> None:
        write_run(job, "a", age=1, lora={"rank": 4})
        write_run(job, "b", lora={"rank": 2})

    def then() -> None:
        shutil.rmtree(job / "run_a")
        write_run(job, "c", lora={"rank": 3})

    for change in (first, then):
        if rank == 0:
            change()
            manager.discover_runs()
        manager.synchronize_state()
        for idx in range(manager.max_runs):
            state = {name: each.tolist() for name, each in manager.get_state_dict_for_run(idx).items()}
            shapes = {name: [*each.shape] for name, each in manager.get_named_parameters_for_run(idx)}
            scales = [product.scale for product in layer.adapters[idx].values()]
            assert scales == [manager.scaling_factors[idx]]
            notes.append(["state", idx, *scales, state, shapes])
    (directory / f"rank_{rank}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()
