"""A driven run that cannot go on says so to who waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from counterpoint.run.items import ItemHeader, encode_item
from counterpoint.run.trained import TrainedRun
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun, RunLost
from counterpoint.transport.messages import Answered, Ask
from tests.support.polling import DEADLINE_SECONDS


class Link:
    """A link by which one answer comes, again and again."""

    def __init__(self, answered: Answered) -> None:
        self._answered = answered

    def link(self) -> Link:
        return self

    async def start(self, hello: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def receive(self) -> Answered:
        await asyncio.sleep(0)
        return self._answered


@pytest.mark.parametrize("anew", [Answered(1, 3, "trainer", "out of memory"), Answered(1, 4)])
async def test_an_item_that_is_made_anew_otherwise_than_its_client_was_told_loses_the_run(
    anew: Answered, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "items", "one", 2**20)
    journal.write_item(Ask(1, encode_item(ItemHeader(updates=True)), None), b"")
    journal.write_answer(Answered(1, 3))
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, Link(anew)), journal)
    await run.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(RunLost, match="step 3"):
            await run.answer_to(await run.begin(ItemHeader()))
    await run.close()


async def test_a_journal_that_fails_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(answered: Answered) -> None:
        raise OSError("the disk is full")

    journal = Journal(tmp_path / "items", "one", 2**20)
    monkeypatch.setattr(journal, "write_answer", full)
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, Link(Answered(1, 0))), journal)
    await run.begin(ItemHeader(), None)
    await run.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(RunLost, match="full"):
            await run.answer_to(1)
    await run.close()
