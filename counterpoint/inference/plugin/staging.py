"""Whole weights of what changed, made in shared memory while requests run, so that the engine's pause is not spent on it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import weight_files
from counterpoint.transport.files.own_directory import OwnDirectory
from counterpoint.transport.files.shared_memory import SHARED_MEMORY, lack_of_room

logger = logging.getLogger(__name__)

PREFIX = "counterpoint-loading-"


def stage(directory: Path) -> OwnDirectory | None:
    """Returns a directory with the whole weights of a delta; None if there is no room for them.

    Raises `ValueError` for a delta that does not fit its base, `OSError` if it cannot be read.
    """
    if refusal := lack_of_room(sum(path.stat().st_size for path in weight_files(directory))):
        logger.warning("what changed is applied while requests are paused: %s", refusal)
        return None
    own = OwnDirectory(SHARED_MEMORY, PREFIX)
    try:
        delta.write_whole(directory, own.path)
    except (OSError, ValueError) as error:
        own.remove()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # others have taken the room meanwhile
            logger.warning("what changed is applied while requests are paused: %s", error)
            return None
        raise
    return own
