"""The orchestrator's checkpoint of a step: its commit. State after the step, rollouts that wait, and the step's metrics.

`checkpoints/step_N/` holds `orchestrator.msgpack` (small and plain), `waiting-<k>.bin`, which it names, with the rollouts that
wait, `metrics.json`, and `receipt.json`, the step's receipt. At a commit few rollouts wait: those discarded since the step was
put together. Ready groups are not written, as each commit would write them, as much as a batch each time. They start again after
a kill. A shutdown rewrites the newest step's state, with rollouts discarded since and the ready groups: first a new `waiting`
file, then `orchestrator.msgpack` in one rename.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import orjson

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator import metrics
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.receipts.chain import RECEIPT_FILE
from counterpoint.orchestrator.rollouts.rollout_file import read_rollouts, write_rollouts
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.run.config import RunConfig
from counterpoint.run.trained import LoraConfig
from counterpoint.transport.configuration.toml_file import without_places
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.files.atomic import (
    flush,
    prune_steps,
    publish_directory,
    published_steps,
    write_atomically,
)
from counterpoint.transport.files.format_number import OtherFormatError, check_format
from counterpoint.transport.files.links import link_file
from counterpoint.transport.records import Rollout
from counterpoint.transport.unpacked import long_integer, read_long_integer

logger = logging.getLogger(__name__)

FORMAT = 2
"""The format of a checkpoint and of all else in the run's directory that a resume reads, such as `batch.bin`. In the first one a
`batch.bin` had no index."""
_OLDEST_FORMAT = 1

_STATE = "orchestrator.msgpack"
_WEIGHTS = "training.lora"
"""The key that a resume must not change: which weights are trained."""


@dataclass(frozen=True, slots=True)
class StepCheckpoint:
    """The state for a resume. Values are plain (msgpack). Nothing changes the rollouts."""

    step: int
    identity: dict[str, Any]
    """Values that a resume must not change, see `identity_of`."""
    scheduler: dict[str, Any]
    counts: dict[str, int]
    """Counts for the next step's metrics."""
    waiting: list[Rollout]
    """Rollouts of finalized groups that no step has counted: discarded ones and, at a shutdown, those ready to ship."""
    line: MetricsLine | None = None
    """The step's metrics, or None at step 0 and in a state written at shutdown."""
    begun: Sequence[tuple[str, int]] = ()
    """Environment and example of each group that began since the last receipt."""
    receipt: bytes | None = None
    """The step's receipt, or None where `line` is None."""


def identity_of(config: RunConfig) -> dict[str, Any]:
    """Returns the values that a resume must not change: those that decide the order of examples, and the trained weights."""
    environments = [
        environment.model_dump(mode="json", include={"name", "kind", "args", "ratio"}) | _curriculum(environment)
        for environment in config.environments
    ]
    return {"seed": config.seed, "environments": environments, _WEIGHTS: _adapter(config.training.lora)}


def _adapter(lora: LoraConfig | None) -> dict[str, Any]:
    """Returns the shape of the trained adapter, or nothing without one."""
    return {} if lora is None else {"rank": lora.rank, "target_modules": sorted(set(lora.target_modules))}


def _curriculum(environment: EnvironmentConfig) -> dict[str, Any]:
    """Returns nothing without a curriculum, as runs of before there was one have nothing."""
    return {} if environment.curriculum is None else {"curriculum": environment.curriculum.model_dump(mode="json")}


def write_checkpoint(run_dir: Path, checkpoint: StepCheckpoint, keep: int, every: int | None = None) -> None:
    """Writes the checkpoint, then removes all but the newest `keep` and the multiples of `every`.

    Blocks: call it in a thread. Raises `OSError`.
    """
    directory = run_dir / "checkpoints" / f"step_{checkpoint.step}"
    if (directory / "STABLE").exists():
        _rewrite_state(directory, checkpoint)
    else:
        with publish_directory(directory) as partial:
            write_rollouts(partial / "waiting-0.bin", checkpoint.waiting)
            (partial / _STATE).write_bytes(_state(checkpoint, "waiting-0.bin"))
            if checkpoint.line is not None:
                (partial / "metrics.json").write_bytes(orjson.dumps(checkpoint.line))
            if checkpoint.receipt is not None:
                (partial / RECEIPT_FILE).write_bytes(checkpoint.receipt)
    prune_steps(directory.parent, keep, every)


def take_over(source: Path, config: RunConfig) -> None:
    """Publishes `source`, a checkpoint of another run, as one of the run of `config`, by links: without the other's receipt.

    Raises `CheckpointError` if it cannot be read, and `OSError`.
    """
    state = _read_state(source)
    with publish_directory(config.run_dir / "checkpoints" / source.name) as partial:
        for path in (source / Path(state["waiting"]).name, *source.glob("metrics.json")):
            link_file(path, partial / path.name)
        identity = {**state, "identity": identity_of(config)}
        (partial / _STATE).write_bytes(msgpack.packb(identity, default=long_integer))


def load_newest(config: RunConfig) -> StepCheckpoint | None:
    """Loads the newest checkpoint, or None without any.

    Raises `ConfigurationError` if seed or environments differ from it, or a later one was lost, `CheckpointError` if it cannot
    be read.
    """
    directory = _newest(config)
    _refuse_lost(config.run_dir, directory)
    if directory is None:
        return None
    state = _read_state(directory)
    try:
        waiting = read_rollouts(directory / Path(state["waiting"]).name)
        begun = [(str(environment), int(example)) for environment, example in state.get("begun", ())]
        checkpoint = StepCheckpoint(
            state["step"], state["identity"], state["scheduler"], state["counts"], waiting, begun=begun
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {directory / _STATE} cannot be read: {error!r}") from error
    _check_identity(config, checkpoint.identity, directory)
    return checkpoint


def check_resumable(config: RunConfig) -> None:
    """Raises as `load_newest` does, of the checkpoint alone: a quick check before a run is started."""
    directory = _newest(config)
    if directory is not None:
        _check_identity(config, _read_state(directory)["identity"], directory)


def _newest(config: RunConfig) -> Path | None:
    steps = published_steps(config.run_dir / "checkpoints")
    return config.run_dir / "checkpoints" / f"step_{steps[-1]}" if steps else None


def _refuse_lost(run_dir: Path, found: Path | None) -> None:
    """Raises `ConfigurationError` if the run's records show that a later step was committed than that of `found`."""
    newest = 0 if found is None else int(found.name.removeprefix("step_"))
    # A step's records are written before its commit, those of the next one and its metrics line after it.
    recorded = max(published_steps(run_dir / "rollouts"), default=0) - 1
    committed = max(metrics.newest_step(run_dir / "metrics.jsonl"), recorded)
    if committed > newest:
        there = "no checkpoint is" if found is None else f"none after step {newest} is"
        raise ConfigurationError(
            f"{run_dir} has records of step {committed} as committed, and {there} in {run_dir / 'checkpoints'}: later ones were "
            f"lost. Nothing was removed. Restore them from a copy. To go on after step {newest} all the same, move metrics.jsonl "
            "and the later rollouts/step_N elsewhere; the trainer must not be further, either. Or start anew with --fresh"
        )


def _read_state(directory: Path) -> dict[str, Any]:
    path = directory / _STATE
    try:
        state: dict[str, Any] = msgpack.unpackb(path.read_bytes(), strict_map_key=False, ext_hook=read_long_integer)
        check_format(state["format"], FORMAT, _OLDEST_FORMAT)
        state["identity"].items()
    except (OSError, KeyError, TypeError, AttributeError, ValueError, msgpack.UnpackException) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {_in_words(error)}") from error
    return state


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, OtherFormatError) else repr(error)


def committed_lines(run_dir: Path) -> list[MetricsLine]:
    """Returns the newest checkpoints' metrics lines, in the order of steps, which have no gap. Raises `OSError`."""
    return metrics.newest_committed(run_dir, "metrics.json")


def _state(checkpoint: StepCheckpoint, waiting_file: str) -> bytes:
    packed: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "step": checkpoint.step,
            "identity": checkpoint.identity,
            "scheduler": checkpoint.scheduler,
            "counts": checkpoint.counts,
            "waiting": waiting_file,
            "begun": list(checkpoint.begun),
        },
        default=long_integer,
    )
    return packed


def _rewrite_state(directory: Path, checkpoint: StepCheckpoint) -> None:
    old = sorted(directory.glob("waiting-*.bin"))
    number = 1 + max((int(file.stem.removeprefix("waiting-")) for file in old), default=-1)
    name = f"waiting-{number}.bin"
    write_rollouts(directory / name, checkpoint.waiting)
    flush(directory / name)
    write_atomically(directory / _STATE, _state(checkpoint, name))
    for file in old:
        file.unlink()


def _check_identity(config: RunConfig, identity: dict[str, Any], directory: Path) -> None:
    for key, now in identity_of(config).items():
        before = identity.get(key)
        if without_places(before) == without_places(now):
            continue
        if key == _WEIGHTS and before is None:  # as in checkpoints of before it was recorded
            continue
        why = "its checkpoints hold other weights" if key == _WEIGHTS else "the order of examples depends on it"
        raise ConfigurationError(
            f"{key} = {_shown(now)} differs from {_shown(before)} in {directory}: {why}, so the run cannot be resumed with it. "
            f"Restore {key}, or start another run"
        )


def _shown(value: object) -> str:
    return "nothing (all weights are trained)" if value == {} else repr(value)
