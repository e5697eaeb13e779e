"""The command of each rank of supervised fine-tuning, which torch's agent starts: `python -m trainer.sft.rank_process FILE`.

`FILE` has the configuration, complete, in JSON (`trainer/sft/launch.py`). Rank 0 alone reads the data.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from cluster.notify import notify_ready
from trainer.rank_process import BAD_CONFIGURATION, run_rank
from trainer.sft.config import SftConfig
from trainer.sft.train import run

logger = logging.getLogger("trainer.sft")


def _rank_main(file: Path) -> int:
    config = SftConfig.model_validate(json.loads(file.read_bytes()))
    return run_rank(config.of_trainer, lambda: _lead(config))


def _lead(config: SftConfig) -> int:
    try:
        return run(config, notify_ready)
    except ValueError as error:
        logger.error("%s", error)
        return BAD_CONFIGURATION


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1])))
