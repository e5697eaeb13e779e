"""Predicts the speed of a job on given cards: its own division of them, the best one, and what it costs to the last step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counterpoint.job.config import JobConfig
from counterpoint.job.plan.card_rates import rates_of
from counterpoint.job.plan.choice import choose, of_longest_rows
from counterpoint.job.plan.devices import CPU, Gpus
from counterpoint.job.plan.dry_run import model_sizes
from counterpoint.job.plan.inference_memory import server_memory
from counterpoint.job.plan.measured import Measured
from counterpoint.job.plan.speed import Corrections, Rollouts, Speed, Work, best_split, predict
from counterpoint.job.plan.trainer_memory import rank_parts
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """The speed of a job on given cards."""

    cards: int
    """Those that the job's own division uses."""
    own: Speed
    best: Speed | None
    """The fastest division of all cards, if there are several."""
    corrections: Corrections | None
    """None: nothing was measured, and everything takes at least so long."""
    steps: int
    hours: float
    """Hours to the last step, with the job's own division."""
    price: float | None
    """What these hours cost on all its cards, in the currency of the price of a card hour; None without one."""

    def as_json(self) -> dict[str, Any]:
        """Returns the plan for programs."""
        idle = {"trainer_idle": self.own.trainer_idle, "servers_idle": self.own.servers_idle}
        return asdict(self) | {"card_hours": self.hours * self.cards, **idle}


def plan_speed(
    job: JobConfig, directory: Path, gpus: Gpus, known: Rollouts | Measured, price: float | None
) -> SpeedPlan:
    """Predicts the speed of a job of one run, whose model is in `directory`.

    `known` is what its rollouts are like, or a job that measured that. It corrects the prediction if both jobs compute on the
    same kind of device. Raises `ValueError` for a job of several runs, or of more cards, and for a card of unknown rates.
    """
    if len(job.every_run) != 1:
        raise ValueError(f"the speed of a job of {len(job.every_run)} runs is not planned; expected one run")
    rates = rates_of(gpus)
    corrections = None
    if isinstance(known, Measured):
        if known.job.trainer.device == job.trainer.device:
            there = predict(_work(known.job, Path(known.job.trainer.model), gpus, known.rollouts), rates, Corrections())
            corrections = known.corrections(there)
        rollouts = known.rollouts
    else:
        rollouts = known
    work = _work(job, directory, gpus, rollouts)
    if gpus.name != CPU and work.cards > gpus.count:
        raise ValueError(
            f"--gpus has {gpus.count} cards, and this job's speed is that on {work.cards}: each rank, and each part of a server, "
            f"is taken to have a card of its own; give --gpus {work.cards}x{gpus.name}, or fewer servers or ranks"
        )
    own = predict(work, rates, corrections or Corrections())
    trainer, training = job.trainer, work.training
    best = None
    if gpus.count > 1:
        best = best_split(
            work,
            gpus.count,
            lambda ranks: _fits(directory, trainer, training, ranks, gpus),
            rates,
            corrections or Corrections(),
        )
    (run,) = job.every_run
    hours = run.steps * own.wall / 3600
    cards = 1 if gpus.name == CPU else work.cards
    cost = None if price is None else hours * cards * price
    return SpeedPlan(cards, own, best, corrections, run.steps, hours, cost)


def _work(job: JobConfig, directory: Path, gpus: Gpus, rollouts: Rollouts) -> Work:
    sizes = model_sizes(directory)
    (run,) = job.every_run
    sequences = job.inference.max_num_seqs
    if gpus.name != CPU:
        sequences = max(1, server_memory(sizes, job.inference, gpus.memory).sequences)
    trainer = job.trainer
    if gpus.name != CPU and trainer.activation_checkpointing is None:
        trainer = choose(directory, trainer, [run.training], gpus.memory, gpus.memory).applied(trainer)
    return Work(
        sizes,
        run.training,
        run.schedule,
        job.inference,
        rollouts,
        job.trainer.dtype,
        trainer.checkpointed(sizes.layers) / sizes.layers,
        trainer.activation_checkpointing is not True,
        sequences,
        ranks=job.trainer.ranks,
        replicas=max(1, job.inference.replicas),
    )


def _fits(directory: Path, trainer: TrainerConfig, training: TrainingConfig, ranks: int, gpus: Gpus) -> bool:
    """Whether the trainer fits on cards of its own: as it is configured, or divided over them."""
    for sharding in {trainer.sharding and ranks > 1, ranks > 1}:
        update = {"processes": ranks, "nodes": 1, "sharding": sharding, "context_parallel": 1, "expert_parallel": 1}
        try:
            changed = TrainerConfig.model_validate(trainer.model_dump() | update)
            changed.check_model(directory)
        except ValueError:
            continue
        if changed.activation_checkpointing is None:
            changed = of_longest_rows(directory, changed, [training])
        if sum(rank_parts(directory, changed, [training], changed.max_tokens, gpus.memory).values()) <= gpus.memory:
            return True
    return False
