"""Several ranks for tests of what they compute together: forked from the server that has torch and transformers imported.

torchrun would start each with an import of its own, which takes longer than most of these computations. In `test_ranks.py` and
`test_sharding.py` trainers start their ranks themselves, as they always do.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port
from tests.trainer.orchestrator_end import processes


def launch(count: int, directory: Path, *arguments: object, module: str, seconds: float = 3 * DEADLINE_SECONDS) -> None:
    """Calls `main(directory, *arguments)` of a module on so many ranks, with torchrun's variables.

    What they print goes to `log_COUNT` in the directory. Fails with its end once one of them has failed, or after `seconds`.
    """
    log, port = directory / f"log_{count}", free_port()
    ranks = [
        processes.Process(target=_rank, args=(module, (directory, *arguments), index, count, port, log))
        for index in range(count)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + seconds
    try:
        running = {rank.sentinel: rank for rank in ranks}
        while running and all(rank.exitcode in (None, 0) for rank in ranks):
            ended = wait(running, max(0.0, deadline - time.monotonic()))
            assert ended, f"{len(running)} of {count} ranks still run after {seconds} s:\n{_end_of(log)}"
            for sentinel in ended:
                running.pop(sentinel).join()  # type: ignore[arg-type]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * count, _end_of(log)
    assert "returned a view tensor" not in log.read_text(), "FSDP cannot protect such a tensor"


def _end_of(log: Path) -> str:
    return log.read_text()[-20_000:] if log.exists() else "nothing was printed"


def _rank(module: str, arguments: Sequence[object], index: int, count: int, port: int, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    importlib.import_module(module).main(*arguments)
