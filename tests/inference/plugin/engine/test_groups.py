"""Groups that talk by gloo compute as torch's own, on one thread for their connections."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from counterpoint.inference.plugin.engine.groups import share_a_thread
share_a_thread()
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=50))
groups = [dist.new_group([0, 1], backend="gloo") for _ in range(3)] + [dist.new_group([0], backend="gloo")]
for group in groups[: 4 - rank]:
    summed = torch.tensor([1.0 + rank])
    dist.all_reduce(summed, group=group)
    assert summed.item() == (3.0 if group is not groups[3] else 1.0), summed
dist.destroy_process_group(groups[0])
dist.barrier(groups[1])
threads = [open(f"/proc/self/task/{each}/comm").read().strip() for each in os.listdir("/proc/self/task")]
print(threads.count("gloo_tcp_loop"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("interface", "threads"), [("", ["1", "1"]), ("lo", ["5", "4"])], ids=["any", "named"])
def test_groups_share_the_thread_for_their_connections(tmp_path: Path, interface: str, threads: list[str]) -> None:
    """Where an interface is named, each group of a process has its own."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUPS, str(rank), str(tmp_path / "store")],
            env={"GLOO_SOCKET_IFNAME": interface} if interface else {},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [rank.communicate(timeout=100)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert found == threads
