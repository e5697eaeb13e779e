"""What a manifest is to ask for: the job, its nodes, and what each of them has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from counterpoint.job.config import JobConfig
from counterpoint.job.placement import placements
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.configuration.toml_file import parse, read_text
from counterpoint.transport.errors import UserError

LONGEST_NAME = 40
"""Characters of a name in Kubernetes, which appends to it and allows 63 in all."""

GRACE_SECONDS = 300
"""How long before its end a job is asked to end: the runs drain, and the trainer writes a checkpoint."""


@dataclass(frozen=True, slots=True)
class Request:
    """A job and the nodes that it is to have."""

    file: Path
    """The job's file, absolute."""
    text: str
    """Its content."""
    name: str
    """What the scheduler calls the job: lower-case letters, digits and dashes."""
    output_dir: Path
    """As in the file."""
    nodes: int
    """With more than one, the job runs on Ray."""
    cpus: int
    """The CPUs of each node."""
    memory_gib: int
    """The memory of each node."""
    gpus: int
    """The GPUs of each node."""
    minutes: int
    """The scheduler ends the job after so many; 0: it does not."""
    needs_one_node: bool
    """Whether all roles are placed on one node, since they find each other by loopback."""


def request_of(
    file: Path, *, nodes: int, cpus: int, memory_gib: int, gpus: int | None = None, minutes: int = 0
) -> Request:
    """Reads and validates a job's file, by itself: this machine's `COUNTERPOINT_*` variables are not the scheduler's.

    Without `gpus`, each node has as many as the job uses. Raises `UserError`.
    """
    text = read_text(file)
    config = validate(JobConfig, parse(text, file), str(file), text=text)
    name = re.sub(r"[^a-z0-9]+", "-", config.output_dir.name.lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    if not name:
        raise UserError(f"{file}: output_dir = {str(config.output_dir)!r} gives the job no name; end it with letters")
    return Request(
        file=file.absolute(),
        text=text,
        name=name if name[0].isalpha() else f"job-{name}",
        output_dir=config.output_dir,
        nodes=nodes,
        cpus=cpus,
        memory_gib=memory_gib,
        gpus=_gpus_of(config) if gpus is None else gpus,
        minutes=minutes,
        needs_one_node=all(
            placement.collocate for placement in placements(config.model_copy(update={"backend": "ray"})).values()
        ),
    )


def _gpus_of(config: JobConfig) -> int:
    """How many GPUs the job uses on one machine: those that it names, or the one that its roles share."""
    named = {*(config.gpus.inference or []), *(config.gpus.trainer or [])}
    return len(named) or int(config.trainer.device == "cuda")


def run_command(request: Request, file: str) -> list[str]:
    """Returns the command of the job on its first node. It resumes: the scheduler may start it again."""
    return ["counterpoint", "run", file, "--resume", *(["--backend", "ray"] if request.nodes > 1 else [])]


def wait_for_nodes(request: Request) -> str:
    """Returns the shell command that waits until every node has joined the Ray cluster at `$RAY_ADDRESS`."""
    program = f"import ray, time; ray.init()\nwhile sum(node['Alive'] for node in ray.nodes()) < {request.nodes}: time.sleep(1)"
    return f'timeout {GRACE_SECONDS} python -c "{program}"'
