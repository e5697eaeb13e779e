"""The slices of a checkpoint that ranks other than 0 write, while training goes on.

At rank 0's command each of them copies its slice into memory, which is all that training waits for; a thread writes and flushes
the copy (`SliceWriter`). Rank 0 asks all of them together, between its other commands, until each slice is on the disk; only then
does its own thread publish the checkpoint (`OtherSlices`). A rank that is lost cannot answer, which ends the trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.runs import shard_files

logger = logging.getLogger(__name__)


class SlicesLost(OSError):
    """A slice that a rank cannot write; the message says which and why, alike on every rank."""


class SliceWriter:
    """Writes this rank's slices, one after the other; of each run the newest is known."""

    def __init__(self, output_dir: Path, rank: int) -> None:
        self._output_dir = output_dir
        self._rank = rank
        self._written: dict[str, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slices")

    def begin(self, run_id: str, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Copies what `state` returns, and begins to write it. What fails is this rank's `fault`."""
        try:
            own = shard_files.copied(state())
        except Exception as error:  # a lack of memory
            if is_fatal(error):
                raise
            self._written[run_id] = failed = Future[None]()
            failed.set_exception(error)
            return
        self._written[run_id] = self._thread.submit(shard_files.write_own, own, self._output_dir, run_id, self._rank)

    def is_writing(self, run_id: str) -> bool:
        """Returns whether the run's slice is not on the disk yet."""
        return run_id in self._written and not self._written[run_id].done()

    def fault(self, run_id: str) -> str | None:
        """Returns why the run's slice could not be written, once; None if it is on the disk, or this rank has none."""
        written = self._written.pop(run_id, None)
        error = None if written is None else written.exception()
        if error is None:
            return None
        logger.warning("the state of run %s cannot be written", run_id, exc_info=error)
        return f"rank {self._rank} cannot write its part of a checkpoint: {error}"


class OtherSlices:
    """What rank 0 knows of the slices of one checkpoint that the other ranks write."""

    def __init__(self, ranks: int, ask: Callable[[], Sequence[int]]) -> None:
        """One of `ranks` slices is rank 0's. `ask` returns the ranks that still write theirs, or raises `SlicesLost`."""
        self.ranks = ranks
        self.late: Sequence[int] = range(1, ranks)
        """The ranks whose slices were not on the disk when they were last asked."""
        self._ask = ask
        self._flushed: Future[None] = Future()

    def known(self) -> bool:
        """Asks the others, unless it is known that their slices are on the disk, or cannot be written; returns whether it is now.

        For the thread that sends commands. Raises `RuntimeError` if a rank is lost.
        """
        if not self._flushed.done():
            try:
                self.late = self._ask()
                if not self.late:
                    self._flushed.set_result(None)
            except SlicesLost as error:
                self._flushed.set_exception(error)
        return self._flushed.done()

    def wait(self) -> None:
        """Waits, in another thread, until they are on the disk.

        Raises `SlicesLost` if one is not, `CancelledError` if given up.
        """
        self._flushed.result()

    def give_up(self) -> None:
        """Ends `wait`: nobody will ask the others any more."""
        self._flushed.cancel()
