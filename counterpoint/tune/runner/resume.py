"""Whether an experiment begins or goes on, from which copy, and the copy that is kept elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from counterpoint.transport.files.atomic import remove_directory, write_atomically
from counterpoint.tune.errors import TuneError
from counterpoint.tune.runner.experiment_server import TOKENS
from counterpoint.tune.runner.journal import LOCK_NAME, STATE_NAME, holds_experiment

Resume = bool | Literal["LOCAL", "REMOTE", "PROMPT", "ERRORED_ONLY", "AUTO"]

Sync = Callable[[str, str], None]
"""Makes the second directory like the first; either may be remote."""


@dataclass(frozen=True)
class SyncConfig:
    """Where the copy of an experiment is, and how it is made: arguments of `run`, as Ray Tune 1.x groups them."""

    upload_dir: str | None = None
    sync_to_cloud: Sync | None = None


class RemoteCopy:
    """The copy of an experiment's directory in another place, such as a share of several machines."""

    def __init__(self, directory: Path, remote: str, sync: Sync | None) -> None:
        self._directory, self._remote = directory, remote
        self._sync = sync or copy_experiment

    def send(self) -> None:
        """Brings the copy up to date. Raises `OSError`. Blocks."""
        self._sync(str(self._directory), self._remote)

    def fetch(self) -> None:
        """Takes the copy as the experiment. Raises `TuneError` if there is none."""
        self._sync(self._remote, str(self._directory))
        if not holds_experiment(self._directory):
            raise TuneError(f"resume = 'REMOTE': there is no experiment at {self._remote}")


def prepare(directory: Path | None, remote: str | None, sync: object, resume: Resume) -> RemoteCopy | None:
    """Checks that the experiment may begin or go on as asked, and fetches it if it is to go on from elsewhere.

    Raises `TuneError` if it cannot.
    """
    if resume not in (True, False, "LOCAL", "REMOTE", "PROMPT", "ERRORED_ONLY", "AUTO"):
        raise TuneError(
            f"resume = {resume!r}: expected True, False, 'LOCAL', 'REMOTE', 'PROMPT', 'ERRORED_ONLY' or 'AUTO'"
        )
    copy = _remote_copy(directory, remote, sync)
    if directory is None:
        if resume not in (False, "AUTO"):
            raise TuneError(f"resume = {resume!r}, but the runner has no local_checkpoint_dir")
        return copy
    found = holds_experiment(directory)
    if resume == "PROMPT":
        resume = found and _asked(directory)
        if found and not resume:
            raise TuneError(f"{directory} holds an experiment that is not to be resumed; choose another name")
    if resume == "REMOTE":
        if copy is None:
            raise TuneError("resume = 'REMOTE', but there is no remote_checkpoint_dir (sync_config.upload_dir)")
        copy.fetch()
    elif resume is False and found:
        raise TuneError(
            f"{directory} holds an experiment already: resume=True goes on with it; for a new one choose another name"
        )
    elif resume in (True, "LOCAL", "ERRORED_ONLY") and not found:
        raise TuneError(f"resume = {resume!r}: there is no experiment in {directory}; 'AUTO' begins one then")
    return copy


def copy_experiment(source: str, target: str) -> None:
    """Copies what is new of a directory that its runner may be writing; the state last, so that it names nothing missing.

    A trial's directory is copied in the same way.
    """
    begin, end = Path(source), Path(target)
    if not begin.is_dir():
        return
    state = {path.name: path.read_bytes() for path in sorted(begin.iterdir()) if STATE_NAME.fullmatch(path.name)}
    names = set()
    for path in sorted(begin.rglob("*")):
        name = path.relative_to(begin)
        names.add(str(name))
        if name.parts[0] == TOKENS:
            continue  # the tokens of its server are nobody's elsewhere
        if path.is_file() and str(name) not in state and path.name != LOCK_NAME and not path.name.endswith(".partial"):
            _copy(path, end / name)
    end.mkdir(parents=True, exist_ok=True)
    for file, content in sorted(
        state.items(), reverse=True
    ):  # of before: a snapshot before the journal that follows it
        write_atomically(end / file, content)
    for path in end.iterdir():
        if STATE_NAME.fullmatch(path.name) and path.name not in state:
            path.unlink()
    for path in (*end.glob("*/checkpoint_*"), *end.glob("checkpoint_*")):
        if str(path.relative_to(end)) not in names:
            remove_directory(path)


def _copy(path: Path, target: Path) -> None:
    try:
        there, here = target.stat() if target.exists() else None, path.stat()
        if there is None or (there.st_size, there.st_mtime_ns) != (here.st_size, here.st_mtime_ns):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    except FileNotFoundError:  # a checkpoint that was deleted meanwhile
        target.unlink(missing_ok=True)


def _remote_copy(directory: Path | None, remote: str | None, sync: object) -> RemoteCopy | None:
    if remote is None:
        return None
    if directory is None:
        raise TuneError("remote_checkpoint_dir needs local_checkpoint_dir, of which it is a copy")
    if sync is not None and not callable(sync):
        raise TuneError(f"sync_to_cloud = {sync!r}: expected a function of a source and a target, both directories")
    if "://" in remote and sync is None:
        raise TuneError(
            f"remote_checkpoint_dir = {remote!r}: a directory of a mounted file system is copied; for anything else give "
            "sync_to_cloud, a function of a source and a target"
        )
    return RemoteCopy(directory, remote, sync)


def _asked(directory: Path) -> bool:
    if not sys.stdin.isatty():
        raise TuneError(f"resume = 'PROMPT': {directory} holds an experiment, and there is no terminal on which to ask")
    return input(f"{directory} holds an experiment. Go on with it? [y/N] ").strip().lower() in ("y", "yes")
