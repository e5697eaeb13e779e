"""What is deleted from the disk: weights whose name was taken from them, or whose time is over, once nothing needs them.

Weights are needed by a sampler whose session goes on, by another name of the same ones, and by a model that is to begin with
them. The samplers and losses of a session, and the journals and the trainer's checkpoints of its models, are deleted once it
has ended; that weights were deleted is known as long as the item that made them may come again. Everything blocks: call it in a
thread.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from counterpoint.service.tinker.store import ModelRecord, SavedRecord, Store, run_of
from counterpoint.transport.files.atomic import remove_directory

logger = logging.getLogger(__name__)

OF_A_SESSION = ("snapshot", "inflight")
"""The kinds of weights that samplers of a session alone have."""


def bytes_of(record: SavedRecord, output_dir: Path, run_id: str) -> int:
    """Returns the bytes of saved weights; 0 where they cannot be seen."""
    directories = [place] if (place := _state(record, output_dir, run_id)) else _published(record)
    try:
        return sum(path.stat().st_size for each in directories for path in each.rglob("*") if path.is_file())
    except OSError:
        return 0


def end_session(store: Store, model_ids: Iterable[str]) -> None:
    """Takes the names from the weights that samplers of a session alone have, for its models."""
    for model_id in model_ids:
        for kind in OF_A_SESSION:
            for record in store.all_saved(model_id, kind):
                store.delete(record)


def sweep(store: Store, output_dir: Path, is_live: Callable[[str], bool], is_saving: Callable[[str], bool]) -> int:
    """Deletes what has expired, and the bytes that nothing needs; returns how many weights were removed from the disk.

    `is_live` says whether a session goes on, `is_saving` whether a save of a model is under way. What cannot be removed now is
    tried again the next time; the log says so.
    """
    models = store.models()
    is_over = _ends_of(store)
    _end_records(store, models, is_over)
    _end_checkpoints(output_dir, [model for model in models if is_over(model.model_id)])
    there = []
    for model in models:
        for record in _gone(store, model, is_over):
            if _exists(record, output_dir, model.run_id):
                there.append((model, record))
            else:
                _forget(store, model, record)
    if not there:
        return 0
    directories, states = _needed(store, output_dir, models, is_live, is_over)
    removed = 0
    for model, record in there:
        state = _state(record, output_dir, model.run_id)
        if (
            (model.run_id, record.step) in states or is_saving(model.model_id)
            if state
            else record.directory in directories
        ):
            continue
        try:
            for each in [state] if state else _published(record):
                remove_directory(each)
            if not state:
                Path(record.directory).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is deleted, and still on the disk: %s", record.path, error)
        else:
            removed += 1
            logger.info("%s was removed from the disk", record.path)
    return removed


def _ends_of(store: Store) -> Callable[[str], bool]:
    """Returns what says, of the session of any id, whether it has ended."""

    @cache
    def has_ended(session_id: str) -> bool:
        session = store.session(session_id)
        return session is None or session.finished

    return lambda any_id: has_ended(any_id.partition(":")[0])


def _end_records(store: Store, models: list[ModelRecord], is_over: Callable[[str], bool]) -> None:
    """Removes what ends with a session, of those that have ended."""
    below = store.of_sessions()
    for model in models:
        for run_id in {run_of(model.model_id), model.run_id}:
            if (items := store.run_directory(run_id) / "items").exists():
                below.setdefault(model.model_id.partition(":")[0], []).append(items)
    for path in (path for session_id, paths in below.items() if is_over(session_id) for path in paths):
        _end(path)


def _end_checkpoints(output_dir: Path, ended: Iterable[ModelRecord]) -> None:
    """Removes the checkpoints with which the runs of ended models would go on; saved states are none of them.

    A run that still leaves its slot at the trainer writes another one, which the next call removes.
    """
    for run_id in {each for model in ended for each in (run_of(model.model_id), model.run_id)}:
        for kept in ("checkpoints", "copies"):
            # Also one without its marker: its removal was cut short.
            for directory in (output_dir / "trainer" / run_id / kept).glob("step_*"):
                _end(directory)


def _end(path: Path) -> None:
    """Removes a file or a directory of a session that has ended; the next sweep tries again what cannot be removed now."""
    try:
        if path.is_dir():
            remove_directory(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is of a session that has ended, and still on the disk: %s", path, error)


def _forget(store: Store, model: ModelRecord, record: SavedRecord) -> None:
    """Forgets weights that are gone from the disk, unless a model that is opened again may make them anew."""
    if not (store.run_directory(model.run_id) / "items" / f"item_{record.number}").exists():
        store.forget(record)


def bytes_held(store: Store, output_dir: Path) -> Counter[str]:
    """Returns the bytes of records and saved weights on the disk by owner, also of those that are deleted and still needed."""
    found = store.bytes_of_records()
    for model in store.models():
        records = [*store.all_saved(model.model_id, "*"), *store.deleted(run_of(model.model_id))]
        places = {each.directory or each.step: each for each in records if _exists(each, output_dir, model.run_id)}
        found[model.owner] += sum(each.size or 0 for each in places.values())
    return found


def saved_sizes(store: Store) -> list[tuple[ModelRecord, bool, int]]:
    """Returns the model of each save, whether it is a state, and its bytes."""
    return [
        (model, not each.directory, each.size)
        for model in store.models()
        for each in store.all_saved(model.model_id, "*")
        if each.size
    ]


def _needed(
    store: Store,
    output_dir: Path,
    models: list[ModelRecord],
    is_live: Callable[[str], bool],
    is_over: Callable[[str], bool],
) -> tuple[set[str], set[tuple[str, int]]]:
    """Returns the directories of published weights, and the states by run and step, that are to stay."""
    named = [(model, record) for model in models for record in store.all_saved(model.model_id, "*")]
    directories = {record.directory for _, record in named if record.directory}
    directories |= {each.directory for each in store.samplers() if is_live(each.sampler_id.partition(":")[0])}
    states = {(model.run_id, record.step) for model, record in named if not record.directory}
    # A state that was saved before any update is the one that its model began with.
    begun = [model for model, record in named if not (record.directory or record.step)]
    waiting = [model for model in models if not (is_over(model.model_id) or _has_begun(model, output_dir))]
    return directories, states | {(model.start_run, model.start_step) for model in [*begun, *waiting]}


def _gone(store: Store, model: ModelRecord, is_over: Callable[[str], bool]) -> list[SavedRecord]:
    for record in store.all_saved(model.model_id, "*"):
        if record.kind in OF_A_SESSION and is_over(model.model_id):
            store.delete(record)
        elif record.has_expired:
            logger.info("%s has expired", record.path)
            store.delete(record)
    return store.deleted(run_of(model.model_id))


def _state(record: SavedRecord, output_dir: Path, run_id: str) -> Path | None:
    """Returns the directory of a saved state of its own: at step 0 there is none."""
    if record.directory or not record.step:
        return None
    return output_dir / "trainer" / run_id / "saved" / f"step_{record.step}"


def _published(record: SavedRecord) -> list[Path]:
    """Returns the directories of published weights, whose name is a link beside them."""
    if not record.directory:
        return []
    link = Path(record.directory)
    name = re.compile(rf"\.{re.escape(link.name)}\.[0-9]+")
    return [each for each in link.parent.glob(f".{link.name}.*") if name.fullmatch(each.name)]


def _exists(record: SavedRecord, output_dir: Path, run_id: str) -> bool:
    place = _state(record, output_dir, run_id)
    return place.exists() if place else any(True for _ in _published(record))


def _has_begun(model: ModelRecord, output_dir: Path) -> bool:
    """Whether a model's run has taken over the state that it begins with."""
    own = output_dir / "trainer" / model.run_id
    return (own / "copies" / "step_0").exists() or any(own.glob("checkpoints/step_*"))
