"""What `counterpoint eval` evaluates: weights on disk, a model that running servers have, or the base model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.inference.base import Probe, WeightUpdate
from counterpoint.inference.checkpoint import ADAPTER_WEIGHTS, read_header
from counterpoint.orchestrator.evaluation.alone import Subject
from counterpoint.orchestrator.evaluation.versions import adapter_name
from counterpoint.run.adapter_description import read_description, require_one_scale, require_targets
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import STABLE, published_steps

ADAPTER_SETTINGS = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class EvaluatedCheckpoint:
    """Weights on disk."""

    directory: Path
    step: int | None
    """The step that the probe or the directory's name says; None if neither does."""
    rank: int | None
    """The rank of an adapter; None: full weights."""
    probe: Probe | None


def find_checkpoint(given: Path) -> EvaluatedCheckpoint:
    """Returns the checkpoint at `given`: weights, or a directory of steps, such as `best/`, of which the newest is meant.

    Raises `UserError`.
    """
    directory = given.absolute()
    steps = published_steps(directory)
    if steps:
        directory /= f"step_{steps[-1]}"
    name, _, number = directory.name.partition("_")
    step = int(number) if name == "step" and number.isascii() and number.isdigit() else None
    if not directory.is_dir():
        there = published_steps(directory.parent)
        advice = f"; {directory.parent} has steps {', '.join(map(str, there))}" if there else ""
        raise UserError(f"--checkpoint {directory}: there is no such directory{advice}")
    if step is not None and not (directory / STABLE).exists():
        raise UserError(f"--checkpoint {directory}: it has no {STABLE}: it is being written or removed")
    try:
        probe = Probe.read(directory / "probe.json")
    except FileNotFoundError:
        probe = None
    except (OSError, ValueError) as error:
        raise UserError(f"--checkpoint {directory}: {error}") from None
    step = probe.version if probe is not None else step
    if (directory / ADAPTER_SETTINGS).is_file():
        try:
            return EvaluatedCheckpoint(directory, step, _rank_of_adapter(directory), probe)
        except (OSError, ValueError) as error:
            raise UserError(f"--checkpoint {directory}: {error}") from None
    if (directory / "config.json").is_file():
        return EvaluatedCheckpoint(directory, step, None, probe)
    raise UserError(
        f"--checkpoint {directory}: it holds neither {ADAPTER_SETTINGS} (an adapter) nor config.json (a model); expected a "
        "directory such as run_default/broadcast/step_10 or run_default/best"
    )


def _rank_of_adapter(directory: Path) -> int:
    """Returns an adapter's rank.

    Raises `OSError` and `ValueError`, as for one that is more than plain LoRA: vLLM goes by rank, alpha and the tensors' names.
    """
    description = read_description(directory)
    require_one_scale(description)
    tensors, rank = read_header(directory / ADAPTER_WEIGHTS), description["r"]
    require_targets(description, tensors)
    for name, entry in tensors.items():
        if ".lora_A." in name and entry.shape[:1] != (rank,) and not description.get("target_parameters"):
            raise ValueError(f"it has {name} of shape {[*entry.shape]}, and its r is {rank}")
    return int(rank)


def subject_of(
    run: RunConfig, checkpoint: EvaluatedCheckpoint | None, model: str | None, servers: list[str]
) -> Subject:
    """Returns what is evaluated at `servers`; none are given if one is started. Raises `UserError`.

    `model` names a model that running servers have.
    """
    base = run.served_model if servers and run.served_model else run.model
    described: dict[str, Any] = {"servers": servers} if servers else {}
    if checkpoint is None:
        name = model or base
        return Subject(name, described | {"model": name}, None if servers else 0, follows=bool(servers))
    described["checkpoint"] = str(checkpoint.directory)
    if checkpoint.rank is None:
        if servers:
            raise UserError(
                "--server with --checkpoint: full weights would replace those that the server has; leave --server out"
            )
        return Subject(str(checkpoint.directory), described, checkpoint.step)
    # A name of this process alone: one that was killed owns its name until the server ends, and the run itself has one, too.
    name = f"{adapter_name(run.run_id)}-{secrets.token_hex(4)}"
    if checkpoint.probe is None:
        if servers:
            raise UserError(
                f"--checkpoint {checkpoint.directory}: without probe.json a running server cannot be shown to hold it; leave "
                "--server out"
            )
        return Subject(name, described, checkpoint.step)
    update = WeightUpdate(checkpoint.probe.version, checkpoint.directory, checkpoint.probe, name)
    return Subject(name, described, checkpoint.step, update)
