"""A driven run whose journal fails says so to who waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from counterpoint.run.items import ItemHeader
from counterpoint.run.trained import TrainedRun
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun, RunLost
from counterpoint.transport.messages import Answered
from tests.support.polling import DEADLINE_SECONDS


class Link:
    """A link by which one answer comes."""

    def link(self) -> Link:
        return self

    async def start(self, hello: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def receive(self) -> Answered:
        return Answered(1, 0)


async def test_a_journal_that_fails_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(answered: Answered) -> None:
        raise OSError("the disk is full")

    journal = Journal(tmp_path / "items", "one", 2**20)
    monkeypatch.setattr(journal, "write_answer", full)
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, Link()), journal)
    await run.begin(ItemHeader(), None)
    await run.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(RunLost, match="full"):
            await run.answer_to(1)
    await run.close()
