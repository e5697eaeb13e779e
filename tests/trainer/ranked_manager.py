"""A manager on every rank of a real process group, for `test_ranks.py`: what its hooks were called with, as JSON a rank.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.ranked_manager DIRECTORY`. Every creation and deletion hook makes a
collective call, which would hang or mix up numbers if the ranks' hooks did not meet.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import RunProgress
from counterpoint.transport.files.atomic import write_atomically
from tests.trainer.runs.test_manager import write


def main(directory: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, entries = dist.get_rank(), []
    job = directory / "job"
    manager = MultiRunManager(job, 2)

    def meet(kind: str, slot: int, run_id: str, *more: Any) -> None:
        total = torch.tensor([float(slot + 10 * len(run_id))])
        dist.all_reduce(total)
        progress = manager.registry.in_slot(slot).progress.step if kind == "creation" else None
        entries.append([kind, slot, run_id, float(total), progress])

    manager.register_creation_hook(lambda *arguments: meet("creation", *arguments))
    manager.register_deletion_hook(lambda *arguments: meet("deletion", *arguments))
    manager.register_discovered_hook(
        lambda i, r, c: setattr(manager.registry.in_slot(i), "progress", RunProgress(step=len(r)))
    )
    if rank == 1:
        try:
            manager.discover_runs()
        except RuntimeError as error:
            entries.append(["refused", str(error)])

    def change_one() -> None:
        write(job, "a", age=2)
        write(job, "bb", age=1, max_grad_norm=math.inf)  # which JSON proper has no word for
        write(job, "ccc")

    def change_two() -> None:
        write_atomically(job / "run_a" / "control" / "evicted.txt", b"enough")

    def change_three() -> None:
        (job / "run_ccc").rename(directory / "deleted")
        write(job, "bb", learning_rate=0.25)

    for change in (change_one, change_two, change_three):
        if rank == 0:
            change()
            assert manager.discover_runs()
        manager.synchronize_state()
        entries.append(
            [
                list(manager.registry.run_ids.items()),
                [run.config.training.learning_rate for run in manager.registry.at()],
            ]
        )
    (directory / f"rank_{rank}.json").write_text(json.dumps(entries))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
