"""Predicts the seconds of a step of the trainer and of the servers, which of them idles, and the best division of the cards.

Each part takes the longer of its operations and its bytes over the card's rates: the roofline of Williams et al. (CACM 52, 2009).
Nothing else is counted, so a prediction without a measured step is the least that it can take; with one, each side is as many
times slower as it was there. Communication between ranks, and between the cards of a server, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.plan.card_rates import CardRates
from counterpoint.job.plan.dry_run import ModelSizes
from counterpoint.job.plan.inference_memory import WIDTH, kv_bytes
from counterpoint.job.plan.operations import (
    ADAMW_BYTES,
    attention_operations,
    trained_parameters,
    training_operations,
    weights_of,
)
from counterpoint.run.config import ScheduleConfig
from counterpoint.run.trained import TrainingConfig


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What rollouts are like, on average."""

    prompt: float
    """Prompt tokens of all turns of one."""
    completion: float
    """Completion tokens of all turns of one."""
    trained: float
    """Tokens of its samples."""
    played: float = 1.0
    """Rollouts that are played for one that is trained: others are filtered, too old, or failed."""
    cached: float = 0.0
    """Share of the prompt tokens that the servers' caches have."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """How many times longer the sides took than predicted, in a measured run."""

    trainer: float = 1.0
    servers: float = 1.0
    publishing: float = 0.0
    """Seconds of a step in which the trainer published weights, however large the batch."""
    pause: float = 0.0
    """Seconds of a step in which the servers loaded weights or did not serve, and of its boundary."""


@dataclass(frozen=True, slots=True)
class Work:
    """A job, as far as its speed depends on it."""

    sizes: ModelSizes
    training: TrainingConfig
    schedule: ScheduleConfig
    servers: InferenceConfig
    rollouts: Rollouts
    dtype: str
    """The trainer's precision."""
    checkpointing: float
    """The share of the layers that the trainer computes again."""
    keeps_attention: bool
    """Whether it keeps their attention."""
    sequences: int
    """Sequences that fit into the KV cache of one server."""
    ranks: int = 1
    replicas: int = 1

    @property
    def cards(self) -> int:
        """Cards of all ranks and servers, where they share none."""
        return self.ranks + self.replicas * self.servers.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class Speed:
    """A predicted step; seconds, and tokens a second."""

    ranks: int
    replicas: int
    trainer: float
    """Seconds of the trainer's work."""
    servers: float
    """Seconds of the servers' work, and of their pause."""
    wall: float
    trainer_tokens: float
    """Tokens a second while it trains."""
    server_tokens: float
    """Completion tokens a second of all servers while they generate."""
    staleness: float
    """The mean."""

    @property
    def trainer_idle(self) -> float:
        """The share of the time in which the trainer waits, of 1."""
        return 1 - self.trainer / self.wall

    @property
    def servers_idle(self) -> float:
        """The same of the servers."""
        return 1 - self.servers / self.wall


def trainer_seconds(work: Work, rates: CardRates) -> float:
    """Returns the least seconds of a step of the trainer: all passes over its samples, divided by the ranks, and AdamW."""
    rollouts = work.rollouts
    operations = work.schedule.rollouts_per_step * training_operations(
        work.sizes,
        work.training,
        rollouts.trained,
        checkpointing=work.checkpointing,
        keeps_attention=work.keeps_attention,
    )
    rate = rates.single if work.dtype == "float32" else rates.half
    update = ADAMW_BYTES * trained_parameters(work.sizes, work.training) * work.training.updates_per_step
    return operations / (rate * work.ranks) + update / rates.bandwidth


def decode_seconds(work: Work, rates: CardRates, sequences: float) -> float:
    """Returns the least seconds in which one server generates a token of each of so many sequences.

    It reads the weights once, and the keys and values of each sequence, of which each card has whole heads: Pope et al.,
    "Efficiently Scaling Transformer Inference" (arXiv:2211.05102), section 2.
    """
    sizes, width, cards = work.sizes, WIDTH[work.servers.dtype], work.servers.tensor_parallel_size
    context = _context(work.rollouts)
    weights = weights_of(sizes)
    read = width * weights.touched(sequences) + sequences * context * cards * kv_bytes(sizes, cards, width)
    operations = sequences * 2 * weights.active + attention_operations(sizes, sequences, context)
    return max(read / rates.bandwidth, operations / _rate(work, rates)) / cards


def sequences_at_once(work: Work) -> float:
    """Returns how many sequences one server has at once: what may be in flight, and what it may hold."""
    schedule = work.schedule
    in_flight = min(
        schedule.most_in_flight, schedule.max_lead_steps * schedule.rollouts_per_step * work.rollouts.played
    )
    return max(1.0, min(in_flight / work.replicas, work.servers.max_num_seqs, work.sequences))


def rollout_seconds(work: Work, rates: CardRates, at_once: float) -> float:
    """Returns the least seconds of a rollout's share of one server that plays so many at once: prompts, then token by token.

    A prompt has no logits but of its last token.
    """
    rollouts = work.rollouts
    prompt = rollouts.prompt * (1 - rollouts.cached)
    layers = weights_of(work.sizes).active - work.sizes.vocabulary * work.sizes.hidden
    operations = 2 * layers * prompt + attention_operations(work.sizes, prompt, rollouts.prompt / 2)
    prefill = operations / (_rate(work, rates) * work.servers.tensor_parallel_size)
    return prefill + rollouts.completion / at_once * decode_seconds(work, rates, at_once)


def server_seconds(work: Work, rates: CardRates) -> float:
    """Returns the least seconds in which all servers play the rollouts of a step."""
    played = work.schedule.rollouts_per_step * work.rollouts.played / work.replicas
    return played * rollout_seconds(work, rates, sequences_at_once(work))


def step_seconds(trainer: float, servers: float, rollout: float, lead: float) -> float:
    """Returns the seconds of a step: those of its trainer, of its servers, or of the way from one version to another.

    A group for step t begins under version t - lead, lasts `rollout` seconds, and is then trained: `lead` steps have that much
    time. Where rollouts last differently, a batch is full up to half a step later: `lead` is then less by up to a half.
    """
    return max(trainer, servers, (max(rollout, servers if lead == 1 else 0.0) + trainer) / lead)


def predict(work: Work, rates: CardRates, corrections: Corrections) -> Speed:
    """Predicts a step. With `max_lead_steps` = 1 trainer and servers take turns; else the slowest sets the pace."""
    schedule, rollouts = work.schedule, work.rollouts
    trainer = corrections.trainer * trainer_seconds(work, rates) + corrections.publishing
    generation = corrections.servers * server_seconds(work, rates)
    servers = generation + corrections.pause
    alone = corrections.servers * rollout_seconds(work, rates, 1)
    wall = step_seconds(trainer, servers, alone, schedule.max_lead_steps)
    count, in_flight = schedule.rollouts_per_step, sequences_at_once(work) * work.replicas
    return Speed(
        work.ranks,
        work.replicas,
        trainer,
        servers,
        wall,
        count * rollouts.trained / trainer,
        count * rollouts.played * rollouts.completion / generation,
        mean_staleness(trainer, servers, wall, in_flight / (count * rollouts.played), schedule.max_lead_steps),
    )


def mean_staleness(trainer: float, servers: float, wall: float, in_flight: float, lead: int) -> float:
    """Returns the mean staleness of a step; `in_flight` are steps of rollouts.

    Servers that have time left wait for the lead: then that is the staleness. Else:
    A rollout ships 1 + (d + T) / wall steps after the version that it began with, if it lasts d seconds, T pass between the
    shipping of a batch and the loading of its weights, and neither begins at a fixed moment of a step: half a step until the
    batch is full and half a step since the version was loaded are the 1. By Little's law (Operations Research 9, 1961) d is
    what is in flight over the rate. The lead bounds the sum at a rollout's start.
    """
    return float(lead) if servers < wall else min(float(lead), 1 + in_flight + trainer / wall)


def splits(work: Work, cards: int, fits: Callable[[int], bool]) -> Iterator[Work]:
    """Yields the job with every division of the cards: so many ranks, if a rank of so many fits, and servers on the others."""
    for ranks in range(1, cards):
        replicas = (cards - ranks) // work.servers.tensor_parallel_size
        if replicas and fits(ranks):
            yield replace(work, ranks=ranks, replicas=replicas)


def best_split(
    work: Work, cards: int, fits: Callable[[int], bool], rates: CardRates, corrections: Corrections
) -> Speed | None:
    """Returns the fastest division, of equal ones that with the fewest cards; None if none is possible."""
    found = [(predict(each, rates, corrections), each.cards) for each in splits(work, cards, fits)]
    return min(found, key=lambda each: (each[0].wall, each[1]))[0] if found else None


def _context(rollouts: Rollouts) -> float:
    """Tokens before a generated one, on average: its prompt, and half of its completion."""
    return max(1.0, rollouts.trained - rollouts.completion / 2)


def _rate(work: Work, rates: CardRates) -> float:
    return rates.single if work.servers.dtype == "float32" else rates.half
