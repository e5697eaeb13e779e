"""The command that `trainer/ranks.py` starts (`python -m trainer.rank_process`): torchrun, and then each rank as its child."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from cluster.launch import die_with_parent
from cluster.notify import notify, notify_ready
from trainer.config import TrainerConfig
from trainer.ranks import inside_torchrun


def _rank_main(file: Path) -> int:
    from trainer.train import train  # torchrun itself does not need it: 130 MB and seconds of its start

    config = TrainerConfig.model_validate_json(file.read_bytes())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with_parent(signal.SIGKILL, os.getppid())
    if os.environ["RANK"] != "0":
        return train(config, lambda: None)
    notify(f"MAINPID={os.getpid()}")
    code = train(config, notify_ready)
    notify(f"EXIT_STATUS={code}")
    return code


def _torchrun_main(parent: int, processes: str, file: str, meeting_directory: str) -> None:
    from torch.distributed.run import main

    die_with_parent(signal.SIGTERM, parent)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={meeting_directory}"]
    main([*rendezvous, f"--nproc-per-node={processes}", "-m", "trainer.rank_process", file])


if __name__ == "__main__":
    if inside_torchrun():
        sys.exit(_rank_main(Path(sys.argv[1])))
    _torchrun_main(int(sys.argv[1]), *sys.argv[2:])
