"""A driven run that cannot go on says so to who waits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from counterpoint.run.items import ItemHeader, decode_item, encode_item
from counterpoint.run.trained import TrainedRun
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun, RunLost
from counterpoint.transport.messages import Answered, Ask, Ready, Rejected
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


async def test_whoever_gives_up_an_item_waits_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, begun, may_end = Journal(tmp_path / "items", "one", 2**20), threading.Event(), threading.Event()
    write = journal.write_item

    def slowly(ask: Ask, note: bytes) -> None:
        begun.set()
        assert may_end.wait(DEADLINE_SECONDS)
        write(ask, note)

    monkeypatch.setattr(journal, "write_item", slowly)
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, Link(Answered(1, 0))), journal)
    beginning = asyncio.create_task(run.begin(ItemHeader(), None))
    assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)
    beginning.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not beginning.done()
    may_end.set()
    await asyncio.wait([beginning])
    assert journal.items() == [1]


class Refusing:
    """A trainer that cannot read the first item as it is sent first, and carries out the others."""

    def __init__(self) -> None:
        self.sent: list[Ask] = []
        self._arriving: asyncio.Queue[object] = asyncio.Queue()
        self._arriving.put_nowait(Ready(1, 8, 5))

    def link(self) -> Refusing:
        return self

    async def start(self, hello: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def receive(self) -> object:
        return await self._arriving.get()

    async def send(self, ask: Ask) -> None:
        self.sent.append(ask)
        if len(self.sent) == 1:
            self._arriving.put_nowait(Rejected(1, "it is too long", 5))
        elif ask.number == 1:
            for number in (1, 2):
                self._arriving.put_nowait(Answered(number, 0))


async def test_an_item_that_the_trainer_cannot_read_is_answered_and_holds_up_no_later_one(tmp_path: Path) -> None:
    trainer, journal = Refusing(), Journal(tmp_path / "items", "one", 2**20)
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, trainer), journal)
    await run.start()
    numbers = [await run.begin(ItemHeader(updates=True), None, b"a note") for _ in range(2)]
    async with asyncio.timeout(DEADLINE_SECONDS):
        first, second = [await run.answer_to(number) for number in numbers]
    await run.close()
    assert (first.fault, second.fault) == ("trainer", "")
    assert "too long" in first.text
    assert [decode_item(each.header).updates for each in trainer.sent if each.number == 1] == [True, False]
    assert journal.read_item(1)[1] == b"a note"
