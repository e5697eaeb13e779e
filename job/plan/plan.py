"""Puts a job's memory together: each GPU's occupants, what does not fit and which key to change, and what would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job.config import JobConfig
from job.placement import devices
from job.plan.devices import GIB, Gpus
from job.plan.dry_run import ModelSizes, model_sizes
from job.plan.inference_memory import ServerMemory, server_memory, utilization
from job.plan.trainer_memory import SHARED, host_parts, rank_parts
from run.config import LoraConfig, TrainingConfig
from trainer.config import TrainerConfig
from transport.files.shared_memory import SHARED_MEMORY, shared_memory_size

STEP = 256
"""`max_tokens` are proposed in multiples of it."""

MOST_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class Problem:
    """What cannot fit."""

    part: str
    key: str
    """To change."""
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a job on given GPUs; bytes."""

    gpus: Gpus
    model: ModelSizes
    trainer: dict[str, int]
    """Of one rank, by part."""
    host: dict[str, int]
    """Of rank 0 in its host's memory, by part."""
    trainer_room: int
    """What one rank may use: its GPU, without the share of a server on it."""
    max_tokens: int
    largest_max_tokens: int
    """That fits; 0 if none does."""
    server: ServerMemory | None
    sequences: int
    """That run at once on all servers."""
    problems: list[Problem]
    advice: list[str]
    """Changes with which the trainer fits."""

    def as_json(self) -> dict[str, Any]:
        """Returns the plan for programs."""
        return asdict(self) | {"fits": not self.problems}


def make_plan(job: JobConfig, directory: Path, gpus: Gpus) -> Plan:
    """Predicts the memory of a job whose model is in `directory`. Raises `ValueError` for a model that cannot be read."""
    job.trainer.check_model(directory)
    sizes, trainer = model_sizes(directory), job.trainer
    if trainer.expert_parallel > 1 and not sizes.expert_layers:
        raise ValueError(
            f"trainer.expert_parallel = {trainer.expert_parallel}: the experts of the model in {directory} cannot be divided"
        )
    runs = _runs(job)
    server = server_memory(sizes, job.inference, gpus.memory) if job.inference.replicas else None
    used, shared = _placed(job)
    room = gpus.memory - (server.share if server is not None and shared else 0)

    def total(changed: TrainerConfig, tokens: int, trained: list[TrainingConfig] = runs) -> int:
        return sum(rank_parts(directory, changed, trained, tokens).values())

    parts = rank_parts(directory, trainer, runs, trainer.max_tokens)
    largest = largest_tokens(lambda tokens: total(trainer, tokens), room)
    problems = [] if server is None else _server_problems(job, server)
    if used > gpus.count:
        problems.insert(0, Problem("GPUs", "gpus", f"the job uses {used} GPUs; there are {gpus.count}"))
    advice: list[str] = []
    if sum(parts.values()) > room:
        problems.append(_trainer_problem(parts, room, trainer, largest, server, shared))
        advice = _advice(job, runs, room, gpus, largest, total)
    host = host_parts(directory, trainer, runs)
    problems += _shared_memory_problems(host.get(SHARED, 0), trainer)
    running = min(server.sequences, job.inference.max_num_seqs) * job.inference.replicas if server is not None else 0
    return Plan(gpus, sizes, parts, host, room, trainer.max_tokens, largest, server, running, problems, advice)


def largest_tokens(total: Callable[[int], int], room: int) -> int:
    """Returns the largest multiple of `STEP` tokens, nearly, for which `total` is at most `room`; 0 if there is none.

    `total` grows almost evenly with the tokens, so each guess lies on the line through the last two values.
    """
    fits, before, after = 0, STEP, 16 * STEP
    low, high = total(before), total(after)
    for tokens, needed in ((before, low), (after, high)):
        fits = tokens if needed <= room else fits
    if not fits:
        return 0
    for _ in range(3):
        slope = max((high - low) / (after - before), 1.0)
        guess = min(int(after + (room - high) / slope), MOST_TOKENS) // STEP * STEP
        if guess in (before, after) or guess <= fits:
            break
        before, low, after, high = after, high, guess, total(guess)
        fits = guess if high <= room else fits
    return fits


def _runs(job: JobConfig) -> list[TrainingConfig]:
    """The runs trained at once, those with the largest adapters if not all are; a guest is like the job's own run."""
    every = [run.training for run in job.every_run] or [job.orchestrator.training]
    by_rank = sorted(every, key=lambda run: run.lora.rank if run.lora is not None else 0, reverse=True)
    if job.stay:
        by_rank += [by_rank[0]] * (job.trainer.max_runs - len(by_rank))
    return by_rank[: job.trainer.max_runs]


def _placed(job: JobConfig) -> tuple[int, bool]:
    """Returns how many GPUs the job uses, and whether the trainer shares one with a server."""
    by_role = {name: set(its) for name, its in devices(job).items()}
    trainer = by_role.pop("trainer") or set(range(job.trainer.processes))
    servers = [
        its or set(range(job.inference.tensor_parallel_size)) for its in by_role.values()
    ]  # without [gpus] all see all
    occupied = set().union(*servers)
    if job.trainer.nodes > 1:  # each on a machine of its own
        return job.trainer.ranks + len(occupied), False
    return len(trainer | occupied), bool(trainer & occupied)


def _server_problems(job: JobConfig, server: ServerMemory) -> list[Problem]:
    if server.sequences:
        return []
    length = job.inference.max_model_len
    largest = {name: count for name, count in server.parts.items() if name != "KV cache"}
    part = max(largest, key=lambda name: largest[name])
    kv = server.parts["KV cache"]
    key = {
        "weights": "inference.tensor_parallel_size",
        "adapter slots": "inference.lora.max_adapters",
        "activations": "inference.max_num_batched_tokens",
    }.get(part, "inference.extra_args")
    if kv > 0:
        fits = kv // server.token
        message = (
            f"the KV cache has room for {fits:,} tokens; one sequence may have {length:,} (inference.max_model_len)"
        )
        return [Problem("KV cache", "inference.max_model_len" if fits >= 16 else key, message)]
    message = (
        f"a server has {gib(server.share)} GiB ({utilization(job.inference):.0%} of a GPU), and needs "
        f"{gib(server.share - kv)} before its KV cache; its largest part are the {part}, {gib(largest[part])} GiB"
    )
    return [Problem(part, key, message)]


def _shared_memory_problems(needed: int, trainer: TrainerConfig) -> list[Problem]:
    """Compares with this machine, as published weights have to be on the servers' machine, where there is shared memory."""
    if not needed or needed <= (room := shared_memory_size()):
        return []
    message = (
        f"{trainer.keep_broadcasts + 1} versions of the weights need {gib(needed)} GiB (trainer.keep_broadcasts and one more), "
        f"and {SHARED_MEMORY} of this machine has {gib(room)} GiB; what does not fit would be published as files"
    )
    return [Problem(SHARED, "trainer.broadcast", message)]


def _trainer_problem(
    parts: dict[str, int], room: int, trainer: TrainerConfig, largest: int, server: ServerMemory | None, shared: bool
) -> Problem:
    fixed = [name for name in parts if name not in ("activations", "row", "context and fragments")]
    part = max(parts if largest else fixed, key=lambda name: parts[name])
    key = {
        "activations": "trainer.max_tokens",
        "adapters": "trainer.max_runs",
    }.get(part, "trainer.processes" if trainer.sharding and trainer.ranks > 1 else "trainer.sharding")
    if largest:
        key = "trainer.max_tokens"
    beside = f" beside a server ({gib(server.share)} GiB)" if shared and server is not None else ""
    return Problem(
        part,
        key,
        f"a rank of the trainer needs {gib(sum(parts.values()))} GiB and has {gib(room)}{beside}; its largest part are "
        f"the {part}, {gib(parts[part])} GiB",
    )


def _advice(
    job: JobConfig,
    runs: list[TrainingConfig],
    room: int,
    gpus: Gpus,
    largest: int,
    total: Callable[[TrainerConfig, int, list[TrainingConfig]], int],
) -> list[str]:
    """Returns single changes, and then joined ones, with which the trainer fits."""
    trainer = job.trainer
    servers = job.inference.replicas * job.inference.tensor_parallel_size
    free = max(gpus.count - servers, 1)
    found = [f"trainer.max_tokens = {largest}"] if largest else []
    recompute = {"activation_checkpointing": True}
    divide = {"sharding": True, "processes": free, "nodes": 1}
    adapter = [run.model_copy(update={"lora": LoraConfig()}) if run.lora is None else run for run in runs]
    offered: list[tuple[str, dict[str, Any], list[TrainingConfig], int]] = [
        ("trainer.activation_checkpointing = true", recompute, runs, room),
        (f"trainer.sharding = true, trainer.processes = {free}, on GPUs of its own", divide, runs, gpus.memory),
        (
            f"trainer.sharding = true, trainer.processes = {free}, on GPUs of its own, trainer.activation_checkpointing = true",
            divide | recompute,
            runs,
            gpus.memory,
        ),
        ("[orchestrator.training.lora], trainer.activation_checkpointing = true", recompute, adapter, room),
    ]
    for words, update, trained, limit in offered:
        changed = trainer.model_copy(update=update)
        if (changed == trainer and trained == runs) or changed.ranks % changed.expert_parallel:
            continue
        if total(changed, trainer.max_tokens, trained) <= limit:
            found.append(words)
    return found


def gib(count: int) -> str:
    """Formats bytes."""
    return f"{count / GIB:.1f}"
