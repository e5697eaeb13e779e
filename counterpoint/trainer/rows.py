"""Trains rows so that an exception caused by one run's samples fails only that run's step.

A row that raises may leave a part of its gradients behind. So its steps begin anew on this rank: their gradients and sums are
cleared, and their earlier rows are trained again. The row itself is tried again in smaller pieces until the failing run is
found: in pieces of half its tokens after a lack of memory, otherwise run by run. A step gets a fault if a single sample does not
fit into memory or a row of its own samples raises; `counterpoint/trainer/work/step.py` sends it to all ranks when the step is
finished. Each rank does this alone, unless ranks compute together: then they train their pieces side by side
(`counterpoint/trainer/model/passes.py`), and a failure on one makes all of them begin anew. Where ranks divide experts, a lack of
memory on one makes all try smaller pieces, and then one rank after the other: the sample that does not fit while no other rank
has one is to blame, whoever lacks memory, unless that rank lacks it without any sample, too, which ends the trainer.
Ranks that share rows take each failure of one of them for their own, so they always have the same pieces.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import cuda

from counterpoint.trainer.faults import is_fatal, is_out_of_memory
from counterpoint.trainer.model.deterministic import advice_on
from counterpoint.trainer.model.passes import PassDiscarded, Passes
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.work.contribution import Contribution

logger = logging.getLogger(__name__)

StepRow = Sequence[tuple[Contribution, Sequence[int]]]
"""One micro-batch: samples of open steps, each of another run."""


_OWNER = "a rank that computes experts of its tokens lacks memory"


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    out_of_memory: bool


class RankRows:
    """The rows of one rank."""

    def __init__(self, max_tokens: int, passes: Passes | None = None, ranks: Ranks | None = None) -> None:
        """Starts with rows of at most `max_tokens` tokens. `passes`: of ranks that compute together; `ranks` are these."""
        self._passes = passes
        self._ranks = ranks if ranks is not None and ranks.context is not None else None
        """Those that share this rank's rows."""
        self._place = ranks.row if ranks is not None else 0
        self._in_turn = False
        """Whether only one of the rows that ranks hold is trained at a time."""
        self.max_tokens = self._most = max_tokens
        """Most tokens of one row; halved after a lack of memory. A longer sample is tried alone."""
        self._fitted = 0
        """Tokens of the longest row that was trained."""

    def train(self, row: StepRow, train_row: Callable[[StepRow], None], summed: Collection[Contribution] = ()) -> None:
        """Trains a row by `train_row`, in one or more pieces, without the steps that have a fault.

        Args:
            row: the samples of this rank.
            train_row: trains a piece.
            summed: the open steps whose gradients are added over the ranks in every pass.

        Raises an error that is fatal (`counterpoint/trainer/faults.py`).
        """
        waiting = deque(self._pieces(row))
        self._in_turn = False
        while (piece := _next(waiting)) or self._passes is not None:
            holders = self._passes.holders(bool(piece)) if self._passes is not None else [self._place]
            if not holders:
                break
            if self._in_turn:
                holders = holders[:1]
                if piece and self._place not in holders:
                    waiting.appendleft(piece)
                    piece = []
            failure, discarded = self._attempt(piece, train_row)
            if not discarded:
                for step, samples in piece:
                    step.trained_rows.append(samples)
                self._fitted = max(
                    self._fitted, sum(step.length(sample) for step, samples in piece for sample in samples)
                )
                continue
            spoilt = dict.fromkeys([*(step for step, _ in piece), *summed])
            again = [part for step in spoilt for part in step.begin_anew()]
            waiting.extendleft(reversed(self._instead(piece, failure, len(holders))))
            waiting.extend(smaller for part in again for smaller in self._pieces([part]))

    def _attempt(self, piece: StepRow, train_row: Callable[[StepRow], None]) -> tuple[_Failure | None, bool]:
        """Trains a piece; returns the failure on this rank, if any, and whether the piece has failed on any rank."""
        if self._passes is not None:
            self._passes.begin()
        failure = _attempt(piece, train_row)
        if self._passes is None:
            return failure, failure is not None
        discarded = self._passes.end(failure is not None, failure is not None and failure.out_of_memory)
        if discarded and failure is None:
            for step, _ in piece:
                step.fault = None  # of a loss that was given wrong numbers
        if self._ranks is not None and piece:
            failure = _of_all(self._ranks, piece, failure)
        return failure, discarded

    def _instead(self, piece: StepRow, failure: _Failure | None, tried: int) -> list[StepRow]:
        """Returns what to try after a piece was discarded, beside which others were `tried`; all ranks call it."""
        passes = self._passes
        if passes is not None and passes.shares_experts and passes.lacked_memory:
            # What did not fit may be tokens of any rank, so all try less before a single sample is to blame.
            several = sum(len(samples) for _, samples in piece) > 1
            if passes.holders(several):
                failure = _Failure(_OWNER, out_of_memory=True) if several else None
            elif tried > 1:
                self._in_turn, failure = True, None
            else:
                passes.check_memory()
                if piece:
                    failure = failure or _Failure(_OWNER, out_of_memory=True)
        return self._smaller(piece, failure) if failure else [piece] if piece else []

    def _smaller(self, piece: StepRow, failure: _Failure) -> list[StepRow]:
        """Returns the pieces to try instead of a failed one; none if the failing run is found, whose step then gets a fault."""
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
        if failure.out_of_memory:  # only the row of this sample is known not to fit, and others have
            self.max_tokens = max(self.max_tokens, min(max(lengths[0] - 1, self._fitted), self._most))
        what = f"a sample of {lengths[0]} tokens does not fit into memory:" if failure.out_of_memory else "a row raised"
        step.fault = f"training step {step.batch.step}: {what} {failure.reason}"
        return []

    def _pieces(self, row: StepRow) -> list[StepRow]:
        """Splits the row, in its order, into pieces of at most `max_tokens` tokens, or of one sample."""
        pieces: list[dict[Contribution, list[int]]] = []
        room = 0
        for step, samples in row:
            for sample in samples:
                if not pieces or step.length(sample) > room:
                    pieces.append({})
                    room = self.max_tokens
                pieces[-1].setdefault(step, []).append(sample)
                room -= step.length(sample)
        return [list(piece.items()) for piece in pieces]


def _next(waiting: deque[StepRow]) -> StepRow:
    """Takes the next piece, without the steps that have a fault; empty if there is none."""
    while waiting:
        if piece := [(step, samples) for step, samples in waiting.popleft() if step.fault is None]:
            return piece
    return []


def _of_all(ranks: Ranks, piece: StepRow, own: _Failure | None) -> _Failure | None:
    """Returns the failure of any rank that shares a piece, and gives its steps the faults that they have on any of them."""
    lacks_memory = own is not None and own.out_of_memory
    flags = torch.tensor([own is not None, lacks_memory, *(step.fault is not None for step, _ in piece)]).int()
    ranks.agree_on_row(flags)
    failed, lacked_memory, *faulty = map(bool, flags.tolist())
    for (step, _), has_fault in zip(piece, faulty, strict=True):
        if has_fault:
            step.fault = ranks.faults(step.fault, of_row=True)[0]
    if not failed:
        return None
    # What others raise beside a lack of memory may come of its zeros.
    reason = own.reason if own is not None and lacks_memory == lacked_memory else None
    return _Failure(ranks.faults(reason, of_row=True)[0], lacked_memory)


def _attempt(piece: StepRow, train_row: Callable[[StepRow], None]) -> _Failure | None:
    """Trains a piece; returns the failure, if any. The exception and the memory of its frames are released before."""
    try:
        train_row(piece)
    except PassDiscarded:  # `Passes.end` says so, too
        return None
    except Exception as error:  # any error of a model or an operator's loss
        if is_fatal(error):
            raise
        out_of_memory = is_out_of_memory(error)
        names = ", ".join(step.run.run_id for step, _ in piece)
        logger.warning("a row of run %s failed", names, exc_info=not out_of_memory)
        failure = _Failure(f"{type(error).__name__}: {error}{advice_on(error)}", out_of_memory)
    else:
        return None
    if failure.out_of_memory and cuda.is_available():
        cuda.empty_cache()
    return failure
