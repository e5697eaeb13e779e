"""Runs supervised fine-tuning to its end: the trainer's own loop over items of data. Of several ranks this is the first.

It differs from a trainer of runs in two things. Weights are published with each checkpoint instead of each step, since no server
waits for them. And metrics that compare the trainer with an inference engine are left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import tomli_w

from counterpoint.environments.data.rows import DataError
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.rank_process import BAD_CONFIGURATION
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import get_multi_run_manager
from counterpoint.trainer.sft.batches import SftBatches
from counterpoint.trainer.sft.config import ENVIRONMENT, SftConfig
from counterpoint.trainer.train import train
from counterpoint.trainer.work.sources import Data
from counterpoint.transport.files.atomic import published_steps, write_atomically
from counterpoint.transport.records import Batch

logger = logging.getLogger(__name__)

_OF_INFERENCE = ("mismatch_kl", "importance_ratio", "masked_share", "replayed_share", "ess")
"""Metrics that have no meaning without an inference engine."""


def run(config: SftConfig, on_ready: Callable[[], object] = lambda: None) -> int:
    """Trains until the last epoch's end or a stop signal; returns the trainer's exit code. `config.model` is a directory.

    `on_ready` is called once the model is loaded. Raises `ValueError` for data, a chat template or a resume that cannot be; the
    message names it.
    """
    run_dir = run_directory(config.output_dir, config.run_id)
    if not config.resume and (earlier := checkpoint.holds_any(config.output_dir)) is not None:
        raise ValueError(
            f"{earlier} is from an earlier training; continue it with --resume (in a file: resume = true), move it aside with "
            "--fresh, or use another output_dir"
        )
    batches = SftBatches(config, _ends_of_trained(run_dir / "sft.json", config))
    file = run_dir / "sft.json"
    if config.on_long == "error" and not (config.resume and file.exists()):
        batches.check_lengths()
    _check_identity(file, batches, config.resume)
    if config.resume:
        _refuse_lost_checkpoints(file, config)
        batches.refuse_fewer_epochs(checkpoint.newest_step(config.output_dir, config.run_id))
    _note_identity(file, batches, _kept(config))
    described = config.run(batches.steps).model_dump(mode="json", exclude_none=True)
    (run_dir / "control").mkdir(parents=True, exist_ok=True)
    (config.output_dir / "trainer").mkdir(exist_ok=True)
    write_atomically(run_dir / "control" / "orch.toml", tomli_w.dumps(described).encode())
    data = _Data(config, batches)
    code = train(config.of_trainer, on_ready, {config.run_id: Data(data.make, data.line, data.note)})
    refusal = get_multi_run_manager().registry.refused.get(config.run_id) if code == 0 else None
    if code == 0 and not run_dir.exists():
        refusal = f"its directory {run_dir} was deleted"
    if refusal is not None:
        logger.error("%s", refusal)
        return BAD_CONFIGURATION
    if data.fault is not None:
        trained = checkpoint.newest_step(config.output_dir, config.run_id)
        kept = f"; the weights of step {trained} are in {newest_weights(config)}" if trained else ""
        raise DataError(f"{data.fault}{kept}")
    if code == 0:
        logger.info("the weights are in %s", newest_weights(config))
    return code


class _Data:
    """What the trainer asks the data for, and tells them."""

    def __init__(self, config: SftConfig, batches: SftBatches) -> None:
        self._config = config
        self._batches = batches
        self.fault: DataError | None = None
        """Why there is no further batch, if there is none."""

    def make(self, step: int) -> Batch | None:
        """Returns the batch of a step; None after one that cannot be used."""
        try:
            return self._batches.batch(step)
        except DataError as error:
            self.fault = error
            return None

    def line(self, step: int, metrics: dict[str, MetricValue]) -> dict[str, MetricValue]:
        """Leaves out the metrics that have no meaning here, and says how many epochs are trained."""
        line: dict[str, MetricValue] = {"epoch": self._batches.epoch(step)}
        for name, value in metrics.items():
            first, *rest = name.split("/")
            if first not in _OF_INFERENCE and ENVIRONMENT not in rest:
                line[name] = value
        return line

    def note(self) -> None:
        """Notes which checkpoints there are, unless the run's directory was deleted."""
        file = run_directory(self._config.output_dir, self._config.run_id) / "sft.json"
        if file.exists():
            _note_identity(file, self._batches, _kept(self._config))


def newest_weights(config: SftConfig) -> Path:
    """Returns the directory of the newest published weights: a model, or an adapter in PEFT's format."""
    directory = run_directory(config.output_dir, config.run_id) / "broadcast"
    return directory / f"step_{published_steps(directory)[-1]}"


def _ends_of_trained(path: Path, config: SftConfig) -> dict[int, int]:
    """Returns the ends of the shorter batches that will not be trained again: with fewer epochs they were the last."""
    if not config.resume or not path.exists():
        return {}
    trained = checkpoint.newest_step(config.output_dir, config.run_id)
    ends = {int(step): end for step, end in json.loads(path.read_text()).get("ends", {}).items()}
    return {step: end for step, end in ends.items() if step <= trained}


def _check_identity(path: Path, batches: SftBatches, resume: bool) -> None:
    """Raises `ValueError` for a resume with another model or batches than the run began with."""
    identity = json.loads(json.dumps(batches.identity))
    former = json.loads(path.read_text()) if resume and path.exists() else identity
    known = identity.keys() & former.keys()  # what a former version did not note is not compared
    if changed := sorted(name for name in known if former[name] != identity[name]):
        raise ValueError(
            f"{path}: {', '.join(changed)} changed since the run began, so its steps would be those of another run; put them "
            "back, or use another output_dir"
        )


def _kept(config: SftConfig) -> int:
    """Returns the step of the oldest of the newest checkpoints, which are kept; 0 without any."""
    steps = published_steps(checkpoints_directory(config.output_dir, config.run_id))
    return min(steps[-config.trainer.keep_checkpoints :], default=0)


def _refuse_lost_checkpoints(path: Path, config: SftConfig) -> None:
    """Raises `ValueError` if the run has had a checkpoint that it would begin before."""
    had = json.loads(path.read_text()).get("checkpoint", 0) if path.exists() else 0
    found = checkpoint.newest_step(config.output_dir, config.run_id)
    if found < had:
        directory = checkpoints_directory(config.output_dir, config.run_id)
        newest = (
            f"the newest checkpoint in {directory} is of step {found}" if found else f"{directory} has no checkpoint"
        )
        raise ValueError(
            f"{newest}, and the run had one of step {had} ({path}). Nothing was removed. Mount or restore {directory.parent}, or "
            f"start anew with --fresh; the newest published weights are in {path.parent / 'broadcast'}"
        )


def _note_identity(path: Path, batches: SftBatches, kept: int) -> None:
    """Notes the model and batches of a run that begins or goes on, and the step of the oldest checkpoint that it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noted = batches.identity | {"ends": batches.ends, "checkpoint": kept}
    write_atomically(path, json.dumps(noted, indent=2).encode() + b"\n")
