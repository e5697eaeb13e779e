"""The command of each rank of supervised fine-tuning: `python -m counterpoint.trainer.sft.rank_process FILE`.

torch's agent starts it. `FILE` has the configuration, complete, in JSON (`trainer/sft/launch.py`). Rank 0 alone reads the data.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from counterpoint.cluster.notify import notify_ready
from counterpoint.trainer.rank_process import BAD_CONFIGURATION, run_rank
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.trainer.sft.train import run

logger = logging.getLogger("counterpoint.trainer.sft")


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
