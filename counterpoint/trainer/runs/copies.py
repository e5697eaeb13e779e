"""Copies of a run's state into another run: what is taken, when, and the journal that makes each happen exactly once.

A copy takes the place of one update. The receiver's version K is the state of the source after its durable step M: the adapter,
the optimizer's moments and, if asked for, the position in the learning-rate schedule, element for element. The batch of step K is
received, committed and counted as ever, and not trained on, since the weights that generated it are gone. So steps and
versions stay one sequence, and a batch of step K + 1 that the receiver's old weights generated has a staleness of 2 or more.

1. *Accept*: the source's checkpoint is linked to `trainer/<receiver>/copies/step_K/`, with `copy.json`, and published in one
   rename, for the next step K that is not open. From then on the copy will happen, whatever becomes of the source. K is above
   every version that was ever published: after a kill, steps are trained again from batches that later versions generated.
2. *Apply*: when the batch of step K is due, all ranks load the linked state; weights and metrics line follow as after an update.
3. *Seal*: the checkpoint of step K is written at once, then the answer to the request.
4. *Forget*: the directory goes once no kept checkpoint is older than K.

A kill before 1 leaves the request; a kill after 1 leaves an older checkpoint and the journal, so step K is the same copy again. A
refused request changes nothing. With `training.start_from` the receiver's version 0 is the copy, and no batch is spent.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from counterpoint.run.trained import StartFrom
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.runs import checkpoint, shard_files
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.taken_over import MAX_BYTES, description_of, durable_directories, linked
from counterpoint.transport.files.atomic import published_steps, remove_directory, write_atomically
from counterpoint.transport.files.format_number import check_format
from counterpoint.transport.files.untrusted import open_regular, read_json

logger = logging.getLogger(__name__)

FORMAT = 1

_STATE, _COPY = shard_files.STATE, "copy.json"


class CopyRefused(ValueError):
    """A copy that cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was accepted."""

    step: int
    """The receiver's version that is the copy."""
    source: str
    source_step: int
    schedule: bool
    """Whether the position in the learning-rate schedule is taken over."""
    request_id: str | None
    """None: it is the receiver's start."""
    optimizer: bool = True
    """Whether the optimizer's state is taken over."""


def copies_directory(output_dir: Path, run_id: str) -> Path:
    """Returns the directory of the copies that a run has accepted."""
    return output_dir / "trainer" / run_id / "copies"


def accept(output_dir: Path, receiver: str, copy: Copy, run: Run | None) -> None:
    """Journals a copy, whose `source_step` is durable; from now on it will happen at its step.

    `run` is the receiver, which the source must fit; None if it is not made yet, and `read` finds out. Raises `CopyRefused`, with
    nothing journalled.
    """
    try:
        source = _durable_directory(output_dir, copy)
        position = _check_fits(source, copy, run)
        if run is not None:
            _check_schedule(copy, position, run)
        with linked(source, copies_directory(output_dir, receiver) / f"step_{copy.step}") as directory:
            (directory / _COPY).write_text(json.dumps({"format": FORMAT, **asdict(copy)}) + "\n")
    except FileNotFoundError as error:
        raise CopyRefused(f"step {copy.source_step} of run {copy.source} is no longer durable: {error}") from error
    except (ValueError, SafetensorError) as error:
        raise CopyRefused(f"step {copy.source_step} of run {copy.source} cannot be copied: {error}") from error


def newest_durable(output_dir: Path, run_id: str) -> int:
    """Returns the newest step of a run that can be copied. Raises `CopyRefused` if there is none."""
    steps = durable_directories(output_dir, run_id)
    if not steps:
        raise CopyRefused(f"run {run_id!r} has no durable step in this job; it is copied after its first checkpoint")
    return max(steps)


def accepted(output_dir: Path, run_id: str, step: int) -> Copy | None:
    """Returns the copy that takes the place of a run's `step`; None if there is none. Raises `CopyRefused` for a damaged one."""
    directory = copies_directory(output_dir, run_id) / f"step_{step}"
    if not (directory / "STABLE").exists():
        return None
    try:
        description = read_json(directory / _COPY, MAX_BYTES)
        check_format(description.pop("format"), FORMAT)
        copy = Copy(**description)
        if copy.step != step:
            raise ValueError(f"it is of step {copy.step}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CopyRefused(f"the journal of a copy, {directory}, cannot be used: {error}") from error
    return copy


def all_accepted(output_dir: Path, run_id: str) -> list[Copy]:
    """Returns the copies that a run has accepted and that are not forgotten, by step, without damaged ones."""
    found: list[Copy] = []
    for step in accepted_steps(output_dir, run_id):
        try:
            copy = accepted(output_dir, run_id, step)
        except CopyRefused as error:
            logger.debug("run %s: %s", run_id, error)
        else:
            found += [copy] if copy is not None else []
    return found


def accepted_steps(output_dir: Path, run_id: str) -> list[int]:
    """Returns the steps of the copies that a run has accepted and that are not forgotten, ascending, damaged ones included."""
    return published_steps(copies_directory(output_dir, run_id))


@dataclass(frozen=True, slots=True)
class CopiedState:
    """What a copy puts into its receiver."""

    copy: Copy
    tensors: dict[str, Tensor]
    position: int
    """The source's, in the learning-rate schedule."""


def read(run: Run, output_dir: Path, step: int) -> CopiedState:
    """Reads the copy of `step`, and checks that it fits the run, which does not change. Raises `CopyRefused`."""
    copy = accepted(output_dir, run.run_id, step)
    if copy is None:
        raise CopyRefused(f"run {run.run_id} has accepted no copy for step {step}")
    directory = copies_directory(output_dir, run.run_id) / f"step_{step}"
    try:
        position = _check_fits(directory, copy, run)
        # A later one was checked when it was accepted, and is carried out although `steps` may be less now.
        if step == 0:
            _check_schedule(copy, position, run)
        tensors = load_file(directory / _STATE)
        if not copy.optimizer:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("master.")}
    except Exception as error:  # a lack of memory, or any error of damaged files; the other ranks wait for the answer
        if is_fatal(error):
            raise
        said = str(error) if isinstance(error, OSError | ValueError) else repr(error)
        raise CopyRefused(
            f"the copy of step {copy.source_step} of run {copy.source} cannot be used: {said}; its files are in {directory}"
        ) from error
    return CopiedState(copy, tensors, position)


def put(run: Run, state: CopiedState) -> None:
    """Puts a copy into the run, whose progress is then of its step; on every rank, once all of them have read it.

    Raises `CopyRefused`, as for a lack of memory; `run.torch.intact` is False then.
    """
    copy = state.copy
    try:
        run.torch.optimizer.load_state(state.tensors)
    except Exception as error:
        run.torch.intact = False
        raise CopyRefused(f"the copy of step {copy.source_step} of run {copy.source} failed: {error!r}") from error
    if copy.schedule:
        run.progress.schedule_offset = ahead = state.position - copy.step
        if ahead > 0 and run.config.training.lr_schedule != "constant":
            logger.warning(
                "run %s takes over position %d of the learning-rate schedule at step %d: the last %d of its %d steps have the "
                "learning rate 0; raise steps by %d, or copy without schedule",
                run.run_id, state.position, copy.step, min(ahead, run.config.last_step - copy.step), run.config.last_step, ahead,
            )  # fmt: skip
    run.progress.step = copy.step


def note_published(output_dir: Path, run_id: str, version: int) -> None:
    """Notes that inference may have generated with this version, which will be trained again. Raises `OSError`."""
    path = _published_path(output_dir, run_id)
    if version > published_before(output_dir, run_id):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"version": version}).encode())


def published_before(output_dir: Path, run_id: str) -> int:
    """Returns the highest version that was noted; 0 if there is none."""
    try:
        return int(read_json(_published_path(output_dir, run_id), MAX_BYTES)["version"])
    except FileNotFoundError:
        return 0


def _published_path(output_dir: Path, run_id: str) -> Path:
    return output_dir / "trainer" / run_id / "published.json"


def forget(output_dir: Path, run_id: str, step: int) -> None:
    """Removes the journal of a copy that no kept checkpoint is older than. Raises `OSError`."""
    remove_directory(copies_directory(output_dir, run_id) / f"step_{step}")


def start(output_dir: Path, run_id: str, origin: StartFrom) -> None:
    """Accepts the copy that a run without a checkpoint starts from, unless it was accepted before. Raises `CopyRefused`."""
    with suppress(CopyRefused):  # a damaged one is made anew
        former = accepted(output_dir, run_id, 0)
        asked = origin.run, origin.schedule, origin.optimizer, origin.step or (former and former.source_step)
        if former and (former.source, former.schedule, former.optimizer, former.source_step) == asked:
            return
    forget(output_dir, run_id, 0)
    step = origin.step or newest_durable(output_dir, origin.run)
    accept(output_dir, run_id, Copy(0, origin.run, step, origin.schedule, None, origin.optimizer), None)


def _durable_directory(output_dir: Path, copy: Copy) -> Path:
    """Returns the checkpoint to copy. Raises `ValueError` if there is none, or if it is outside the job's directory."""
    durable = durable_directories(output_dir, copy.source)
    if (found := durable.get(copy.source_step)) is None:
        raise ValueError(f"it is not durable; the durable steps of run {copy.source} are {[*durable] or 'none'}")
    if found.resolve() != (output_dir / "trainer").resolve() / found.relative_to(output_dir / "trainer"):
        raise ValueError(f"{found} leads to {found.resolve()}, which is not this run's")
    return found


def _check_fits(directory: Path, copy: Copy, run: Run | None) -> int:
    """Returns the source's position in its schedule. Raises `ValueError` unless the checkpoint is its, and fits the run."""
    description = description_of(directory, copy.source, copy.source_step)
    open_regular(directory / _STATE).close()  # safetensors would wait for a FIFO
    position: int = copy.source_step + description["progress"].get("schedule_offset", 0)
    if run is None:
        return position
    if run.config.training.lora is None:
        raise ValueError(f"run {run.run_id} trains all weights; only a run with [training.lora] takes a copy")
    own, theirs = checkpoint.meaning(run), description.get("training")
    if theirs != own:
        raise ValueError(f"it was trained with {_words(theirs)}, and run {run.run_id} with {_words(own)}")
    with safe_open(directory / _STATE, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a mapping
    run.torch.optimizer.check_state(shapes)
    return position


def _check_schedule(copy: Copy, position: int, run: Run) -> None:
    """Raises `ValueError` if no update after the copy would learn."""
    decay, steps = run.config.training.lr_schedule, run.config.last_step
    if copy.schedule and decay != "constant" and position >= steps:
        raise ValueError(
            f"its position in the learning-rate schedule is {position}, and run {run.run_id} ends its own (lr_schedule = "
            f"{decay!r}) at steps = {steps}: every update would have the learning rate 0; raise steps, or copy it without "
            "schedule"
        )


def _words(training: Any) -> str:
    if not isinstance(training, dict):
        return "an unknown adapter, since another version of counterpoint wrote the checkpoint"
    lora = training.get("lora")
    kind = (
        f"an adapter of rank {lora.get('rank')} and alpha {lora.get('alpha')}"
        if isinstance(lora, dict)
        else "all weights"
    )
    return f"{training.get('optimizer')} and {kind}"
