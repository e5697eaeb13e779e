"""Deletes weights from the disk that have lost their name, or have expired, once nothing needs them.

Weights are needed by a sampler of a session that goes on, by another name of the same ones, and by a model that will begin with
them. The samplers and losses of a session, and the journals and the trainer's checkpoints of its models, are deleted once it
has ended. The record of deleted weights stays as long as the item that made them may come again. Models that have ended cost a
sweep nothing: it looks at each after ever longer times. Everything blocks: call it in a thread.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from counterpoint.run.trainer_files import checkpoints_directory, saved_directory
from counterpoint.service.records.store import GOES_ON, OF_A_SESSION, RecordStore
from counterpoint.service.records.structs import ModelRecord, SavedRecord, run_of
from counterpoint.transport.files.atomic import remove_directory

logger = logging.getLogger(__name__)

LOOKED_AT_ONCE = 200
"""Models of ended sessions that one sweep looks at, in the order in which they were due."""

LOOK_SECONDS, LONGEST_LOOK = 60.0, 86_400.0
"""The time until the next look at an ended model, doubled each time, and the longest such time."""


def bytes_of(record: SavedRecord, output_dir: Path, run_id: str) -> int:
    """Returns the bytes of saved weights, or 0 if they cannot be seen."""
    directories = [place] if (place := _state(record, output_dir, run_id)) else _published(record)
    try:
        return sum(path.stat().st_size for each in directories for path in each.rglob("*") if path.is_file())
    except OSError:
        return 0


def sweep(
    store: RecordStore, output_dir: Path, is_live: Callable[[str], bool], is_saving: Callable[[str], bool]
) -> int:
    """Deletes expired weights, and bytes that nothing needs. Returns the number of weights removed from the disk.

    `is_live` returns whether a session goes on, `is_saving` whether a save of a model is in progress. Logs failed removals, and
    later sweeps try them again.
    """
    _end_names(store)
    _end_directories(store, output_dir)
    removed = 0
    for record in store.deleted():
        model = store.model(record.model_id)
        if model is None or not _exists(record, output_dir, model.run_id):
            _forget(store, record, model)
        elif not _is_needed(store, output_dir, model, record, is_live, is_saving):
            removed += _removed(store, output_dir, model, record)
    return removed


def _end_names(store: RecordStore) -> None:
    """Takes their names from weights after their time or session, and forgets samplers and losses of ended sessions."""
    for record in store.all(SavedRecord, "NOT deleted AND expires <= ?", time.time()):
        logger.info("%s has expired", record.path)
        store.delete(record)
    of_sessions = f"kind IN {OF_A_SESSION} AND NOT deleted"
    store.change(f"UPDATE saved SET deleted = 1 WHERE {of_sessions} AND NOT {GOES_ON}")
    for table in ("samplers", "losses"):
        store.change(f"DELETE FROM {table} WHERE NOT {GOES_ON}")


def _end_directories(store: RecordStore, output_dir: Path) -> None:
    """Removes the journals of models of ended sessions, and the checkpoints with which their runs would go on.

    Saved states are none of these. A run that still leaves its slot at the trainer writes another checkpoint, which a later
    look removes.
    """
    now, looked = time.time(), []
    query = (
        f"SELECT model_id, run_id, looks FROM models WHERE next_look <= ? AND NOT {GOES_ON} ORDER BY next_look LIMIT ?"
    )
    for model_id, run_id, looks in store.database.rows(query, now, LOOKED_AT_ONCE):
        for each in {run_of(model_id), run_id}:
            _end(store.run_directory(each) / "items")
            for kept in ("checkpoints", "copies"):
                # Also one without its marker: its removal was cut short.
                for directory in (output_dir / "trainer" / each / kept).glob("step_*"):
                    _end(directory)
        looked.append((looks + 1, now + min(LONGEST_LOOK, LOOK_SECONDS * 2.0 ** min(looks, 20)), model_id))
    if looked:
        statement = "UPDATE models SET looks = ?, next_look = ? WHERE model_id = ?"
        store.database.write(lambda connection: connection.executemany(statement, looked), durable=False)


def _end(path: Path) -> None:
    """Removes a directory of a session that has ended. A later sweep tries again after a failure."""
    try:
        if path.exists():
            remove_directory(path)
    except OSError as error:
        logger.warning("%s is of a session that has ended, and still on the disk: %s", path, error)


def _forget(store: RecordStore, record: SavedRecord, model: ModelRecord | None) -> None:
    """Forgets weights that are gone from the disk, unless a model that is opened again may make them anew."""
    if model is None or not (store.run_directory(model.run_id) / "items" / f"item_{record.number}").exists():
        store.forget(record)
    elif record.size:
        store.note_gone(record)


def _removed(store: RecordStore, output_dir: Path, model: ModelRecord, record: SavedRecord) -> bool:
    """Removes weights from the disk. Returns False if that fails."""
    state = _state(record, output_dir, model.run_id)
    try:
        for each in [state] if state else _published(record):
            remove_directory(each)
        if not state:
            Path(record.directory).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is deleted, and still on the disk: %s", record.path, error)
        return False
    logger.info("%s was removed from the disk", record.path)
    store.note_gone(record)
    return True


def _is_needed(
    store: RecordStore,
    output_dir: Path,
    model: ModelRecord,
    record: SavedRecord,
    is_live: Callable[[str], bool],
    is_saving: Callable[[str], bool],
) -> bool:
    """Whether anything needs the bytes of deleted weights on the disk."""
    rows = store.database.rows
    if record.directory:
        users = rows("SELECT session_id FROM samplers WHERE directory = ?", record.directory)
        has_name = rows("SELECT 1 FROM saved WHERE NOT deleted AND directory = ? LIMIT 1", record.directory)
        return bool(has_name) or any(is_live(session_id) for [session_id] in users)
    named = "SELECT 1 FROM saved WHERE NOT deleted AND directory = '' AND step = ? AND model_id"
    if is_saving(model.model_id) or rows(
        f"{named} IN (SELECT model_id FROM models WHERE run_id = ?) LIMIT 1", record.step, model.run_id
    ):
        return True
    for other in store.all(ModelRecord, "start_run = ? AND start_step = ?", model.run_id, record.step):
        goes_on = (session := store.session(other.model_id.partition(":")[0])) is not None and not session.finished
        # A state that was saved before any update is the one that its model began with.
        if (goes_on and not _has_begun(other, output_dir)) or rows(f"{named} = ? LIMIT 1", 0, other.model_id):
            return True
    return False


def _state(record: SavedRecord, output_dir: Path, run_id: str) -> Path | None:
    """Returns the directory of a saved state, or None at step 0, which has none."""
    if record.directory or not record.step:
        return None
    return saved_directory(output_dir, run_id) / f"step_{record.step}"


def _published(record: SavedRecord) -> list[Path]:
    """Returns the directories of published weights. Their name is a link beside them."""
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
    return (own / "copies" / "step_0").exists() or any(checkpoints_directory(output_dir, model.run_id).glob("step_*"))
