"""The state of one run in the trainer, and where it comes from: `run_<id>/control/orch.toml`.

The trainer trains one run for now; whatever differs between runs is here and nowhere else, so that many can stand side by side.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from orchestrator.config import OrchestratorConfig
from trainer.loss import Loss
from trainer.optimizer import Optimizer
from transport.atomic import write_atomically
from transport.records import Batch


class RunRefused(ValueError):
    """This run cannot be trained as it is; the message says why and what to do."""


@dataclass(slots=True)
class Progress:
    """How far a run has been trained."""

    step: int = 0
    """The last step trained, which is the policy version of the weights."""
    total_tokens: int = 0
    total_samples: int = 0


@dataclass(slots=True)
class Run:
    """One run: its configuration, what is trained, and how far."""

    index: int
    """Its slot among the trainer's `max_runs`."""
    run_id: str
    config: OrchestratorConfig
    optimizer: Optimizer
    loss: Loss
    progress: Progress = field(default_factory=Progress)
    durable_step: int = 0
    """Acknowledged as durable: the batches up to this step will not be asked for again."""
    waiting: dict[int, Batch] = field(default_factory=dict)
    """Batches received and not yet trained, by step; on rank 0."""

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.steps


def run_directory(output_dir: Path, run_id: str) -> Path:
    """`<output_dir>/run_<id>`."""
    return output_dir / f"run_{run_id}"


def read_run_config(output_dir: Path, run_id: str) -> str:
    """The validated configuration of a run, as JSON that `OrchestratorConfig.model_validate_json` takes on every rank.

    Raises:
        RunRefused: there is none or it is invalid, or the run was evicted. An invalid one is also explained in
            `control/config_validation_error.txt`, for the orchestrator to show.
    """
    control = run_directory(output_dir, run_id) / "control"
    evicted = control / "evicted.txt"
    if evicted.exists():
        raise RunRefused(
            f"run {run_id!r} was evicted ({evicted}): mend its cause and remove that file to let it in again"
        )
    path = control / "orch.toml"
    try:
        config = OrchestratorConfig.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise RunRefused(
            f"run {run_id!r} has no {path}; do orchestrator and trainer have the same output_dir?"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        refuse_config(output_dir, run_id, str(error))
        raise RunRefused(f"{path}: {error}") from error
    if config.run_id != run_id:
        message = f"run_id = {config.run_id!r}, but this is the directory of run {run_id!r}"
        refuse_config(output_dir, run_id, message)
        raise RunRefused(f"{path}: {message}")
    return config.model_dump_json()


def known_config(output_dir: Path, run_id: str) -> OrchestratorConfig | None:
    """The configuration that the run's orchestrator last wrote, None where there is none that can be read."""
    path = run_directory(output_dir, run_id) / "control" / "orch.toml"
    try:
        return OrchestratorConfig.model_validate(tomllib.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def refuse_config(output_dir: Path, run_id: str, message: str) -> None:
    """Writes `control/config_validation_error.txt`."""
    path = run_directory(output_dir, run_id) / "control" / "config_validation_error.txt"
    write_atomically(path, message.encode() + b"\n")


def evict(output_dir: Path, run_id: str, reason: str) -> None:
    """Writes `control/evicted.txt`: the trainer takes nothing more from this run until an operator removes the file."""
    write_atomically(run_directory(output_dir, run_id) / "control" / "evicted.txt", reason.encode() + b"\n")
