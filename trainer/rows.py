"""Trains rows so that an exception caused by one run's samples fails only that run's step.

A row that raises may leave a part of its gradients behind. So the steps in it begin anew on this rank: their gradients and
sums are cleared, and their earlier rows are trained again. The row itself is tried again in smaller pieces, until the run that
fails is found: in pieces of half its tokens after a lack of memory, otherwise run by run. A step gets a fault if a single sample
does not fit into memory or a row of its own samples raises; `trainer/step.py` tells all ranks of it when the step is finished.
Each rank does this by itself: no collective call lies between two rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import cuda

from trainer.faults import is_fatal, is_out_of_memory
from trainer.step import OpenStep

logger = logging.getLogger(__name__)

StepRow = Sequence[tuple[OpenStep, Sequence[int]]]
"""One micro-batch: samples of open steps, each of another run."""


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    out_of_memory: bool


class Rows:
    """The rows of one rank."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = self._most = max_tokens
        """Most tokens of one row; halved if memory does not suffice. A longer sample is tried alone."""

    def train(self, row: StepRow, train_row: Callable[[StepRow], None]) -> None:
        """Trains a row by `train_row`, in one or more pieces; steps with a fault are left out.

        Raises `torch.AcceleratorError`, after which this process can no longer use the accelerator.
        """
        waiting = deque(self._pieces(row))
        while waiting:
            piece = [(step, samples) for step, samples in waiting.popleft() if step.fault is None]
            if not piece:
                continue
            failure = _attempt(piece, train_row)
            if failure is None:
                for step, samples in piece:
                    step.trained_rows.append(samples)
                continue
            again = [(step, samples) for step, _ in piece for samples in step.begin_anew()]
            waiting.extendleft(reversed(self._smaller(piece, failure)))
            waiting.extend(smaller for part in again for smaller in self._pieces([part]))

    def _smaller(self, piece: StepRow, failure: _Failure) -> list[StepRow]:
        """The pieces to try instead of one that failed; none if the run that fails is found, whose step then gets a fault."""
        lengths = [step.length(sample) for step, samples in piece for sample in samples]
        if failure.out_of_memory and len(lengths) > 1:
            self.max_tokens = min(self.max_tokens, sum(lengths) // 2)
            logger.warning(
                "a row of %d tokens does not fit into memory: rows have at most %d from now on; lower the trainer's max_tokens",
                sum(lengths), self.max_tokens,
            )  # fmt: skip
            return self._pieces(piece)
        if len(piece) > 1:
            return [[part] for part in piece]
        ((step, _),) = piece
        if failure.out_of_memory:  # no row but this sample's has been shown not to fit
            self.max_tokens = max(self.max_tokens, min(lengths[0] - 1, self._most))
        what = f"a sample of {lengths[0]} tokens does not fit into memory:" if failure.out_of_memory else "a row raised"
        step.fault = f"training step {step.batch.step}: {what} {failure.reason}"
        return []

    def _pieces(self, row: StepRow) -> list[StepRow]:
        """The row in its order, in pieces of at most `max_tokens`, or of one sample."""
        pieces: list[dict[OpenStep, list[int]]] = []
        room = 0
        for step, samples in row:
            for sample in samples:
                if not pieces or step.length(sample) > room:
                    pieces.append({})
                    room = self.max_tokens
                pieces[-1].setdefault(step, []).append(sample)
                room -= step.length(sample)
        return [list(piece.items()) for piece in pieces]


def _attempt(piece: StepRow, train_row: Callable[[StepRow], None]) -> _Failure | None:
    """Trains a piece. The exception is released before this returns, and with it the memory that its frames held."""
    try:
        train_row(piece)
    except Exception as error:  # whatever a model, or an operator's loss, may raise
        if is_fatal(error):
            raise
        out_of_memory = is_out_of_memory(error)
        names = ", ".join(step.run.run_id for step, _ in piece)
        logger.warning("a row of run %s failed", names, exc_info=not out_of_memory)
        failure = _Failure(f"{type(error).__name__}: {error}", out_of_memory)
    else:
        return None
    if failure.out_of_memory and cuda.is_available():
        cuda.empty_cache()
    return failure
