"""Full weights of published versions in this machine's shared memory, for `broadcast = "memory"` of `[trainer]`.

    /dev/shm/counterpoint-weights-XXXXXXXX/         of one trainer, mode 0700; it goes with the trainer
        run_<id>/step_N/model.safetensors           or delta.safetensors and base/
    run_<id>/broadcast/step_N/model.safetensors     a link to that file

All else of a broadcast is on the disk, where its readers look for it. They follow the links. With the checkpoint of a version its
weights are copied to the disk, in place of the links; versions without that are gone with the trainer.
"""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

from counterpoint.transport.files.atomic import remove_directory
from counterpoint.transport.files.own_directory import OwnDirectory, remove_left
from counterpoint.transport.files.shared_memory import SHARED_MEMORY, lack_of_room

logger = logging.getLogger(__name__)

PREFIX = "counterpoint-weights-"

_WEIGHTS = "*.safetensors"

_HEADER_BYTES = 1 << 20
"""More than the headers of the files take."""

_BYTES_A_COPY = 1 << 24


class SharedMemory:
    """The weights of the newest versions of one run."""

    def __init__(self) -> None:
        """Makes the directory. Raises `OSError`."""
        self._own = OwnDirectory(SHARED_MEMORY, PREFIX, keep_left=True)
        self._published: set[Path] = set()
        self._lacked_room = False
        self._lock = threading.Lock()
        """Held while the files of a published version are replaced or removed."""

    def where(self, published: Path) -> Path | None:
        """Returns the directory of the weights of a version that is published at `published`; None if they are not here."""
        return self._place(published) if published in self._published else None

    def make(self, published: Path, nbytes: int) -> Path | None:
        """Makes the directory for weights of `nbytes`, to be published at `published`.

        Returns None, and logs why, if there is no room. Raises `OSError`.
        """
        if refusal := lack_of_room(nbytes + _HEADER_BYTES):
            if not self._lacked_room:
                logger.warning("weights are published on the disk while they do not fit shared memory: %s", refusal)
            self._lacked_room = True
            return None
        self._lacked_room = False
        place = self._place(published)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        self._published.add(published)
        return place

    def link(self, published: Path, directory: Path) -> None:
        """Puts links to the weights into `directory`, which becomes `published`, and moves all other files there."""
        place = self._place(published)
        for file in sorted(place.rglob("*")):
            target = directory / file.relative_to(place)
            if file.is_dir():
                target.mkdir()
            elif file.match(_WEIGHTS):
                target.symlink_to(file)
            else:
                shutil.move(file, target)

    def make_durable(self, published: Path) -> None:
        """Puts copies of the weights in place of the links, if there are any; their directory is not flushed.

        It may be called in another thread than the rest. Raises `OSError` (disk full).
        """
        place = self._place(published)
        for file in sorted(place.rglob(_WEIGHTS)):
            link = published / file.relative_to(place)
            partial = link.with_name(f".{link.name}.partial")
            with self._lock:
                if not link.is_symlink():  # it was copied before, or removed
                    continue
                partial.unlink(missing_ok=True)
                source, target = file.open("rb"), partial.open("xb")
            with source, target:
                shutil.copyfileobj(source, target, _BYTES_A_COPY)
            with self._lock:
                if link.is_symlink():
                    partial.replace(link)

    def remove(self, published: Path) -> None:
        """Removes a version here and where it is published. Raises `OSError`."""
        with self._lock:
            remove_directory(published)
            self.discard(published)

    def discard(self, published: Path) -> None:
        """Removes the weights of a version that is not published after all, or no longer."""
        self._published.discard(published)
        shutil.rmtree(self._place(published), ignore_errors=True)

    def clear(self) -> None:
        """Removes all versions that are here alone; of the others their copies on the disk stay."""
        for published in sorted(self._published):
            try:
                if has_links(published):
                    remove_directory(published)
            except OSError as error:
                logger.warning("%s, whose weights were in shared memory, cannot be removed: %s", published, error)
            self.discard(published)

    def close(self) -> None:
        """Does as `clear`, and removes the directory."""
        self.clear()
        self._own.remove()

    def _place(self, published: Path) -> Path:
        return self._own.path / published.parents[1].name / published.name


def remove_left_weights() -> None:
    """Removes what killed trainers of this user left in shared memory.

    Not before a run may go on without it: a trainer that lacks the run's checkpoints has no other copy of its newest weights.
    """
    remove_left(SHARED_MEMORY, PREFIX)


def has_links(published: Path) -> bool:
    """Whether weights of a version are in the shared memory of a trainer, and go with it."""
    return any(file.is_symlink() for file in published.rglob(_WEIGHTS))


def has_lost_weights(published: Path) -> bool:
    """Whether weights of a version were in the shared memory of a trainer that has ended."""
    return any(file.is_symlink() and not file.exists() for file in published.rglob(_WEIGHTS))
