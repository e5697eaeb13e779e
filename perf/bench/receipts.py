"""Measures the step boundary with the run's receipts, as it is, and without, in turns.

Without them no turn, record or batch is hashed, and no receipt is written.

    python -m perf.bench.receipts [--quick | --full]
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from counterpoint.job.replay.boundary import Recording
from counterpoint.job.replay.replay import BOUNDARY, Replay, Settings, on_daemons_loop, replay
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.receipts.chain import ReceiptChain
from counterpoint.orchestrator.rollouts.dump import open_dump, write_dump
from counterpoint.transport.records import Rollout
from perf.bench.command import Size, show
from perf.figures import Case, Figure


def measure(size: Size) -> list[Case]:
    """Measures the case `receipts`."""
    shape = Shape(size.pick(8, 32, 64), 32, 16_384, even=True)
    settings = Settings(baseline_seconds=size.pick(0.5, 1.0, 2.0))
    without: list[Replay] = []
    ours: list[Replay] = []
    lengths: list[int] = []
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        write_dump(Path(directory) / "dump", header_of(shape), synthetic_rollouts(shape))
        dump = open_dump(Path(directory) / "dump")
        dump.populate()
        recording = Recording(dump.header, dump.rollouts())
        for number in range(2 * size.pick(3, 12, 16)):
            has_receipts = number % 4 in (1, 2)
            with _counted(lengths) if has_receipts else _no_receipts():
                (ours if has_receipts else without).append(on_daemons_loop(partial(replay, recording, settings)))
    return [_case(without, ours, max(lengths), shape.rollouts)]


@contextmanager
def _no_receipts() -> Iterator[None]:
    """Has a boundary inside hash nothing and write no receipt."""

    def unhashed(rollout: Rollout) -> Iterator[dict[str, Any]]:
        return ({} for _ in rollout.turns)

    hashlib = SimpleNamespace(sha256=lambda _: SimpleNamespace(digest=bytes))
    with (
        patch("counterpoint.orchestrator.step.records.turn_hashes", unhashed),
        patch("counterpoint.orchestrator.step.records.hashlib", hashlib),
        patch("counterpoint.orchestrator.step.boundary.records_of", lambda _: {}),
        patch.object(ReceiptChain, "receipt", lambda *_: None),
    ):
        yield


@contextmanager
def _counted(lengths: list[int]) -> Iterator[None]:
    """Notes the length of each receipt that is written inside."""
    append = ReceiptChain.append

    def counted(chain: ReceiptChain, receipt: bytes, *, durable: bool) -> None:
        lengths.append(len(receipt))
        append(chain, receipt, durable=durable)

    with patch.object(ReceiptChain, "append", counted):
        yield


def _case(without: list[Replay], ours: list[Replay], length: int, rollouts: int) -> Case:
    bare, seconds = (median(each.row(BOUNDARY).seconds for each in found) for found in (without, ours))
    figures = [
        Figure("wall without receipts, median round", bare, "s"),
        Figure("with them over that", seconds / bare, "x", 1.1),
        Figure("a receipt, bytes a rollout", length / rollouts, "B"),
    ]
    for name, found in (("without", without), ("with", ours)):
        lag = 1e3 * min(each.row(BOUNDARY).lag.max for each in found)
        figures.append(Figure(f"lag's maximum {name} them, best round", lag, "ms"))
    return Case("step boundary, receipts", figures)


if __name__ == "__main__":
    show(measure)
