"""Puts the memory of a job, or of a fine-tuning, together: each GPU's occupants, and what does not fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from counterpoint.inference.server import check_sizes, read_model
from counterpoint.job.plan.advice import Advice, enough_gpus, largest_tokens, server_advice, trainer_advice
from counterpoint.job.plan.choice import LayerChoice, choose, of_longest_rows
from counterpoint.job.plan.devices import GIB, Gpus
from counterpoint.job.plan.disk import disk_parts
from counterpoint.job.plan.dry_run import ModelSizes, model_sizes
from counterpoint.job.plan.inference_memory import ServerMemory, server_memory, utilization
from counterpoint.job.plan.planned import Planned
from counterpoint.job.plan.trainer_memory import host_parts, rank_parts, state_bytes
from counterpoint.job.sections import ServersConfig

LARGER = "the model or the GPUs"
"""What to change where no change of the job suffices."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """What cannot fit."""

    part: str
    key: str
    """The key to change."""
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a job, or of a fine-tuning, on given GPUs; bytes."""

    gpus: Gpus
    model: ModelSizes
    trainer: dict[str, int]
    """The memory of one rank, by part."""
    host: dict[str, int]
    """The host memory of rank 0, by part."""
    disk: dict[str, int]
    """What stays on the disk for resumes, branches and checks, by part (`counterpoint/job/plan/disk.py`)."""
    trainer_room: int
    """What one rank may use: its GPU, without the share of a server on it."""
    chosen: LayerChoice | None
    """The layers that are computed again, where the file does not say."""
    max_tokens: int
    largest_max_tokens: int
    """The largest `max_tokens` that fits, with as many layers computed again as the file allows; 0 if none does."""
    server: ServerMemory | None
    sequences: int
    """How many sequences run at once on all servers."""
    problems: list[Misfit]
    advice: list[str]
    """Changes with which a server, and those with which the trainer fits."""

    def as_json(self) -> dict[str, Any]:
        """Returns the plan for programs."""
        return asdict(self) | {"fits": not self.problems}


def make_plan(planned: Planned, directory: Path, gpus: Gpus) -> Plan:
    """Predicts the memory of what trains the model in `directory`.

    Raises `ValueError` for a model that cannot be read, or that trainer or servers refuse whatever the memory.
    """
    planned.trainer.check_model(directory)
    sizes, trainer, runs = model_sizes(directory), planned.trainer, planned.runs
    if trainer.expert_parallel > 1 and not sizes.expert_layers:
        raise ValueError(
            f"trainer.expert_parallel = {trainer.expert_parallel}: the experts of the model in {directory} cannot be divided"
        )
    _check_servers(planned, directory)
    server = server_memory(sizes, planned.servers, gpus.memory) if planned.servers is not None else None
    used, shared = _placed(planned)
    together = 0 if server is None else server.share * planned.servers_a_gpu
    room = gpus.memory - (together if shared else 0)
    longest, chosen = trainer, None
    if trainer.activation_checkpointing is None:
        longest = of_longest_rows(directory, trainer, runs)
        chosen = choose(directory, trainer, runs, gpus.memory, room)
        trainer = chosen.applied(trainer)
        planned = replace(planned, trainer=trainer)

    parts = rank_parts(directory, trainer, runs, trainer.max_tokens, gpus.memory)
    largest = largest_tokens(
        lambda tokens: sum(rank_parts(directory, longest, runs, tokens, gpus.memory).values()), room
    )
    problems, advice = [], []
    if len(used) > gpus.count:
        problems.append(Misfit("GPUs", "gpus", f"the job uses {len(used)} GPUs; there are {gpus.count}"))
    elif max(used) >= gpus.count:
        problems.append(Misfit("GPUs", "gpus", f"the job names GPU {max(used)}; there are {gpus.count}, from 0 on"))
    if planned.servers is not None and together > gpus.memory:
        problems.append(
            Misfit(
                "GPUs",
                "gpus.inference",
                f"without it, the {planned.servers.replicas} servers are all on the first GPU, and take {gib(together)} GiB "
                f"of its {gib(gpus.memory)}",
            )
        )
    running = 0
    if planned.servers is not None and server is not None:
        running = min(server.sequences, planned.servers.max_num_seqs) * planned.servers.replicas
        if not server.sequences:
            advice += (found := server_advice(planned, planned.servers, sizes, gpus))
            problems.append(_server_problem(planned.servers, server, found))
    if sum(parts.values()) > room:
        advice += (found := trainer_advice(planned, directory, sizes, gpus, shared))
        problems.append(_trainer_problem(parts, room, server, shared, found))
    if problems and (more := enough_gpus(planned, directory, sizes, gpus, shared, max(len(used), max(used) + 1))):
        advice.append(Advice("gpus", more))
    host = host_parts(directory, trainer, runs)
    disk = disk_parts(sizes, planned, state_bytes(directory, trainer, runs))
    return Plan(
        gpus,
        sizes,
        parts,
        host,
        disk,
        room,
        chosen,
        trainer.max_tokens,
        largest,
        server,
        running,
        problems,
        [each.words for each in advice],
    )


def choose_for(planned: Planned, directory: Path, memory: int) -> LayerChoice:
    """Chooses the layers that the trainer computes again, as `make_plan` does. Raises `ValueError` as `choose`."""
    room = memory
    if planned.servers is not None and _placed(planned)[1]:
        server = server_memory(model_sizes(directory), planned.servers, memory)
        room -= server.share * planned.servers_a_gpu
    return choose(directory, planned.trainer, planned.runs, memory, room)


def _check_servers(planned: Planned, directory: Path) -> None:
    if planned.servers is not None:
        servers = planned.servers.model_copy(update={"model": str(directory)})
        try:
            check_sizes(servers, read_model(servers))
        except ValueError as error:
            raise ValueError(f"inference: {error}") from None


def _placed(planned: Planned) -> tuple[set[int], bool]:
    """Returns the GPUs that are used, and whether the trainer shares one with a server.

    Without `[gpus]` all roles see all GPUs, and each takes the first ones.
    """
    servers, gpus = planned.servers, planned.gpus
    trainer = set(gpus.trainer or range(planned.trainer.processes))
    occupied = set(gpus.inference or range(servers.tensor_parallel_size)) if servers is not None else set[int]()
    if planned.trainer.nodes > 1:  # each on a machine of its own
        return set(range(planned.trainer.ranks + len(occupied))), False
    return trainer | occupied, bool(trainer & occupied)


def _server_problem(servers: ServersConfig, server: ServerMemory, advice: list[Advice]) -> Misfit:
    length = servers.max_model_len
    parts = {name: count for name, count in server.parts.items() if name != "KV cache"}
    part = max(parts, key=lambda name: parts[name])
    kv = server.parts.get("KV cache", 0)
    key = advice[0].key if advice else {"adapter slots": "inference.lora.max_adapters"}.get(part, LARGER)
    if kv:
        message = (
            f"the KV cache has room for {kv // server.token:,} tokens; one sequence may have {length:,} "
            "(inference.max_model_len)"
        )
        return Misfit("KV cache", key, message)
    message = (
        f"a server has {gib(server.share)} GiB ({utilization(servers):.0%} of a GPU), and needs "
        f"{gib(sum(parts.values()))} before its KV cache; its largest part: {part}, {gib(parts[part])} GiB"
    )
    return Misfit(part, key, message)


def _trainer_problem(
    parts: dict[str, int], room: int, server: ServerMemory | None, shared: bool, advice: list[Advice]
) -> Misfit:
    part = max(parts, key=lambda name: parts[name])
    beside = f" beside a server ({gib(server.share)} GiB)" if shared and server is not None else ""
    return Misfit(
        part,
        advice[0].key if advice else LARGER,
        f"a rank of the trainer needs {gib(sum(parts.values()))} GiB and has {gib(room)}{beside}; its largest part: "
        f"{part}, {gib(parts[part])} GiB",
    )


def gib(count: int) -> str:
    """Formats bytes."""
    return f"{count / GIB:.1f}"
