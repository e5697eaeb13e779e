"""An orchestrated run or a driven one on each of two real ranks, for `test_driven.py`.

Run it as `torchrun --nproc-per-node=2 -m tests.trainer.driven_ranks DIRECTORY MODEL KIND`. KIND is `driven`, `killed` (between a
contribution and its update), `resumed` or `orchestrated`; the adapters are then in the directory.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.driven import drive
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.runs.manager import MultiRunManager
from tests.trainer.conftest import make_batch
from tests.trainer.one_process_trainer import Life, write_member
from tests.trainer.test_driven import CONTRIBUTED, MEMBER, STEPS, ask, described, train


def main(directory: Path, model: str, kind: str) -> None:
    config = TrainerConfig(output_dir=directory, model=model, processes=2, threads=1, max_tokens=64, device="cpu")
    match kind:
        case "driven":
            drive_alone(config)
        case "killed":
            contribute_and_die(config)
        case "resumed":
            go_on(config.model_copy(update={"resume": True}))
        case _:
            orchestrate(config)


def drive_alone(config: TrainerConfig) -> None:
    with drive(config, described()) as driven:
        if driven is not None:
            for step in range(1, STEPS + 1):
                train(driven, step)
            driven.publish("last")
            batch = make_batch(STEPS + 1)
            results = driven.contribute(batch, MEMBER).columns["log_probabilities"]
            assert (results != 0).tolist() == (batch.loss_mask_T == 1).tolist(), "of both ranks"


def contribute_and_die(config: TrainerConfig) -> None:
    with drive(config, described()) as driven:
        if driven is not None:
            ask(driven, CONTRIBUTED)
            (config.output_dir / "contributed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def go_on(config: TrainerConfig) -> None:
    with drive(config, described()) as driven:
        if driven is not None:
            assert (driven.step, driven.item) == (1, 2), "what was saved"
            ask(driven)


def orchestrate(config: TrainerConfig) -> None:
    directory, model = config.output_dir, Path(config.model)
    with ranks.join(config, torch.device("cpu")) as group:
        if group.index:
            Learner(config, group, MultiRunManager(directory, 1, config.seed)).follow()
            return
        write_member(directory, model, "one", STEPS)
        one = Life(directory, model, {"one": STEPS}, ranks=group, max_runs=1, processes=2)
        one.until_step(one=STEPS)
        one.learner.stop()
        one.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
