"""How this process uses torch's compiler: from where it takes what is compiled, and what becomes of what cannot be compiled."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def failing_aloud() -> Iterator[None]:
    """Has a function that cannot be compiled raise inside. After that torch logs it, and calls the function as it is.

    Some graphs are made for the rows of runs, when the disk may be full: that is not the fault of these runs. It holds in this
    thread alone; a GPU's backward pass is in another one (`Fallback`).
    """
    from torch._dynamo import config  # only a process that compiles needs this package

    config.suppress_errors = False
    try:
        yield
    finally:
        config.suppress_errors = True


class Fallback:
    """Calls a compiled function, and the plain one from the first graph on that cannot be made; in any thread."""

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any]) -> None:
        """Both return the same for the same arguments."""
        self._chosen = compiled
        self._plain = plain

    def __call__(self, *given: Any) -> Any:
        """Returns what they return."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._chosen(*given)
        except TorchDynamoException as error:  # before anything was computed
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            logger.warning("the output layer is computed without a graph that cannot be compiled: %s", reason)
            self._chosen = self._plain
        return self._plain(*given)


def keep_to_own_cache() -> None:
    """Has torch keep what it compiles where no other user of this machine may write, since it runs what it finds there again.

    By default that is a directory below `/tmp` whose name anyone can guess, and make first. One of this user or root stays.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        path = cache_dir()  # makes it
        found = [os.lstat(path), os.stat(path)]
    except OSError:  # compiling fails of it, and says so
        return
    if all(each.st_uid in (0, os.geteuid()) for each in found) and not found[1].st_mode & stat.S_IWOTH:
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = own = tempfile.mkdtemp(prefix="torchinductor_")
    logger.warning(
        "other users may write to %s, so torch compiles anew, into %s; remove the first, or set TORCHINDUCTOR_CACHE_DIR to a "
        "directory of your own",
        path,
        own,
    )
