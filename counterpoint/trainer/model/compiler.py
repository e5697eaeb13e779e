"""How this process uses torch's compiler: where it keeps graphs, what becomes of one that cannot be made, which come too late."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


class Compilations:
    """What torch's compiler does in this process. A row for which it works stands still for seconds."""

    def __init__(self) -> None:
        self.late = 0
        """How often it worked for a row, when the graphs of all rows should have been there."""
        self._due = 0
        self._watched = False

    def watch(self) -> None:
        """Counts from now on, and has torch make no graph that holds for short rows alone."""
        from torch._dynamo.callback import callback_handler  # only a process that compiles needs these packages
        from torch._inductor import config

        # Otherwise a kernel that adds up in both directions is for 5 * 2**20 elements and more, and each graph checks that.
        config.triton.mix_order_reduction_non_strict_mode = True
        if not self._watched:
            self._watched = True
            callback_handler.register_start_callback(self._begins)

    @contextmanager
    def due(self) -> Iterator[None]:
        """Has the graphs that are made inside, in any thread, be in time."""
        self._due += 1
        try:
            yield
        finally:
            self._due -= 1

    def _begins(self, compilation: Any) -> None:
        if self._due:
            return
        self.late += 1
        logger.warning(
            "torch compiles graph %s for a row, which stands still meanwhile; this is number %d since the start. All graphs "
            "should have been there: please report the model and the length of the row",
            compilation.compile_id,
            self.late,
        )


compilations = Compilations()
"""Those of this process, as torch's compiler is one for each process."""


@contextmanager
def failing_aloud() -> Iterator[None]:
    """Has a function that cannot be compiled raise inside. After that torch logs it, and calls the function as it is.

    A graph that is made for the row of a run, when the disk may be full, is not the fault of this run. It holds in this thread
    alone; a GPU's backward pass is in another one (`Fallback`).
    """
    from torch._dynamo import config

    config.suppress_errors = False
    try:
        with compilations.due():
            yield
    finally:
        config.suppress_errors = True


def reason_of(error: Exception) -> str:
    """Returns in one line why a graph cannot be made: the error of a backend, not the one of torch around it."""
    own = getattr(error, "inner_exception", error)
    return f"{type(own).__name__}: {own}".split("\n", 1)[0]


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
            reason = reason_of(error)
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
