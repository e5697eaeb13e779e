"""Checkpoints of one run, `trainer/<run_id>/checkpoints/step_N/`: all that an exact resume needs.

`state.safetensors` holds the weights, the optimizer's moments and the random state as tensors, `state.json` the progress.
Nothing is pickled. A directory appears whole, with its `STABLE` marker, or not at all. `counterpoint/trainer/runs/checkpoints.py`
writes them while training goes on.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from counterpoint.run.trained import TrainedRun
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.runs import control_files, shard_files
from counterpoint.trainer.runs.run import Run, RunProgress
from counterpoint.trainer.runs.slices import OtherSlices
from counterpoint.trainer.taken_over import FORMAT, description_of
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.files.atomic import flush_directory, prune_steps, publish_directory, published_steps
from counterpoint.transport.files.format_number import OtherFormatError

logger = logging.getLogger(__name__)


def newest_step(output_dir: Path, run_id: str) -> int:
    """Returns the step of the newest checkpoint of a run; 0 if there is none."""
    return max(published_steps(checkpoints_directory(output_dir, run_id)), default=0)


def holds_any(output_dir: Path) -> Path | None:
    """Returns a published checkpoint of any run under `output_dir`, or None."""
    return next((marker.parent for marker in output_dir.glob("trainer/*/checkpoints/step_*/STABLE")), None)


def finished_runs(output_dir: Path) -> list[TrainedRun]:
    """Returns the configurations of the runs under `output_dir` if all of them, except evicted ones, are trained to their ends.

    An empty list if one is not, by its checkpoints, or cannot be read.
    """
    finished: list[TrainedRun] = []
    for run_id, found in control_files.scan(output_dir).items():
        if found.evicted:
            continue
        try:
            config = control_files.read_config(output_dir, run_id)
        except control_files.InvalidConfig:
            return []  # admission reports what is wrong with it
        if config is None or newest_step(output_dir, run_id) < config.last_step:
            return []
        finished.append(config)
    return finished


def set_aside(output_dir: Path, run_id: str) -> None:
    """Moves the checkpoints of a run whose directory was deleted to `trainer/.deleted-<run_id>/`, or with `~2`, `~3`, ... there.

    Another run of that name then starts afresh, and a run deleted by mistake is not lost: nor is one whose directory was only not
    mounted, so that the trainer has seen a new one of its name meanwhile.
    """
    former = output_dir / "trainer" / run_id
    if former.is_dir():
        former.rename(next(path for path in _names_aside(output_dir, run_id) if not path.exists()))


def were_set_aside(output_dir: Path, run_id: str) -> list[Path]:
    """Returns where the checkpoints of former runs of that name are, the last ones last."""
    return list(takewhile(Path.exists, _names_aside(output_dir, run_id)))


def _names_aside(output_dir: Path, run_id: str) -> Iterator[Path]:
    name = f".deleted-{run_id}"
    return (output_dir / "trainer" / (name if number == 1 else f"{name}~{number}") for number in count(1))


def set_aside_deleted(output_dir: Path) -> None:
    """Does the same for every run whose directory was deleted while no trainer ran."""
    marks = ("checkpoints", "epoch.json", "trained.jsonl")
    kept = {path.parent for name in marks for path in output_dir.glob(f"trainer/*/{name}")}
    for run_id in sorted(path.name for path in kept):
        if re.fullmatch(IDENTIFIER_PATTERN, run_id) and not control_files.run_directory(output_dir, run_id).exists():
            logger.info("the directory of run %s was deleted; its checkpoints are set aside", run_id)
            set_aside(output_dir, run_id)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's state after a step, in memory of its own: training may go on while it is written."""

    run_id: str
    step: int
    tensors: dict[str, Tensor]
    """The tensors on the CPU; the generators' state as well."""
    description: dict[str, Any]
    """The values for `state.json`."""
    others: OtherSlices | None = None
    """The slices of the other ranks, if the state is divided; they are being written."""
    keep_every: int | None = None
    """The checkpoints that stay besides the newest: of the steps that are its multiples."""


def take(run: Run) -> Snapshot:
    """Copies the state of the run after its last step to the CPU's memory, once.

    The other ranks copy their slices of a divided one meanwhile, and begin to write them.
    """
    others = None if run.torch.shards is None else run.torch.shards.write_others()
    tensors = shard_files.copied(run.torch.newest())
    description = {
        "format": FORMAT,
        "run_id": run.run_id,
        "progress": asdict(run.progress),
        "training": meaning(run),
    }
    if run.torch.shards is not None:
        description["shards"] = run.torch.shards.description
    return Snapshot(
        run.run_id, run.progress.step, tensors | _random_state(), description, others, run.config.training.keep_every
    )


def write(
    snapshot: Snapshot, output_dir: Path, keep: int, wait_for_broadcast: Callable[[], object] = lambda: None
) -> None:
    """Writes the checkpoint of a snapshot unless it exists, then removes all but the newest `keep` and those to keep.

    Before it is published, `wait_for_broadcast` returns once the broadcast of this step is flushed, since a resume uses it, and
    the slices of other ranks are waited for. Raises what that raises, and `OSError` (disk full, here or for another rank); the
    earlier checkpoints are then intact.
    """
    parent = checkpoints_directory(output_dir, snapshot.run_id)
    if snapshot.step not in published_steps(parent):
        with publish_directory(parent / f"step_{snapshot.step}") as directory:
            save_file(snapshot.tensors, directory / shard_files.STATE)
            if snapshot.others is not None:
                snapshot.others.wait()
                shard_files.take_over(output_dir, snapshot.run_id, snapshot.others.ranks, directory)
            (directory / "state.json").write_text(json.dumps(snapshot.description, indent=2) + "\n")
            wait_for_broadcast()
    prune_steps(parent, keep, snapshot.keep_every)


def flush_broadcast(broadcast: Path) -> None:
    """Flushes a broadcast, which may be removed meanwhile, since newer ones are published or the run is deleted."""
    try:
        if broadcast.is_dir():
            flush_directory(broadcast)
    except FileNotFoundError:
        logger.debug("%s was removed while it was flushed", broadcast)
        with suppress(FileNotFoundError):  # its removal must be as durable as it would have been
            flush_directory(broadcast.parent)


def meaning(run: Run) -> dict[str, Any]:
    """Returns what two runs must have in common, so that the tensors of one mean the same in the other; for JSON."""
    lora = run.config.training.lora
    return {
        "optimizer": run.config.training.optimizer,
        "lora": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha},
    }


def load(run: Run, output_dir: Path, step: int, *, random_state: bool) -> None:
    """Restores the run as it was after `step`, and with `random_state` this process's generators, too, which runs share.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another model, adapter, optimizer or format.
    """
    directory = checkpoints_directory(output_dir, run.run_id) / f"step_{step}"
    try:
        description = description_of(directory, run.run_id, step)
        progress = RunProgress(**description["progress"])
        _check_alpha(run, description)
        tensors = shard_files.read(
            directory, description.get("shards"), None if run.torch.shards is None else run.torch.shards.own
        )
        run.torch.optimizer.load_state(tensors)
        if random_state:
            _restore_random_state(tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        advice = ". If it is damaged, remove that directory to continue from the checkpoint before"
        raise CheckpointError(
            f"the checkpoint {directory} cannot be used: {error}{'' if isinstance(error, OtherFormatError) else advice}"
        ) from error
    run.progress = progress
    logger.info("run %s continues after step %d, from %s", run.run_id, step, directory)


def _check_alpha(run: Run, description: dict[str, Any]) -> None:
    """Raises `ValueError` if the tensors would fit, but mean another adapter: servers have the one with the former alpha."""
    lora = run.config.training.lora
    former = (description.get("training") or {}).get("lora")
    if lora is not None and former is not None and former["alpha"] != lora.alpha:
        raise ValueError(
            f"its adapter was trained with training.lora.alpha = {former['alpha']:g}, and run {run.run_id} has {lora.alpha:g}; "
            "put it back, or train another run"
        )


def _random_state() -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
