"""Recognizes what a TOML file configures by its sections, so that a file given to the wrong command is named."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from counterpoint.transport.configuration.toml_file import read_toml
from counterpoint.transport.errors import UserError


def other_kind(file: Path, model: type[BaseModel]) -> tuple[str, str] | None:
    """Returns the kind of a file and its command if the file's sections show that it is not a file of `model`, else None."""
    from counterpoint.cluster.spec import JobSpec
    from counterpoint.inference.config import InferenceConfig
    from counterpoint.job.config import JobConfig
    from counterpoint.job.sweep.targets import SweepConfig
    from counterpoint.run.config import RunConfig
    from counterpoint.trainer.config import TrainerConfig
    from counterpoint.trainer.sft.config import SftConfig

    try:
        given = read_toml(file).keys()
    except UserError:
        return None
    if not given - model.model_fields.keys():
        return None
    kinds: dict[tuple[str, str], type[BaseModel]] = {
        ("job", "run"): JobConfig,
        ("trainer", "trainer"): TrainerConfig,
        ("orchestrator", "orchestrator"): RunConfig,
        ("server", "inference"): InferenceConfig,
        ("sweep", "sweep"): SweepConfig,
        ("fine-tuning", "sft"): SftConfig,
        ("job of roles", "submit"): JobSpec,
    }
    return next((kind for kind, other in kinds.items() if not given - other.model_fields.keys()), None)
