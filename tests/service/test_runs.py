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
from counterpoint.service.runs import KEPT_ANSWERS, DrivenRun, RunFailed, RunLost
from counterpoint.transport.messages import Acknowledged, Answered, Ask, Ready, Rejected
from tests.support.polling import DEADLINE_SECONDS, until


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


class Recording:
    """A trainer that says what a test puts in, and notes what it is sent."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[object] = asyncio.Queue()
        self.sent: list[Ask] = []

    def link(self) -> Recording:
        return self

    async def start(self, hello: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def receive(self) -> object:
        return await self.told.get()

    async def send(self, message: Ask) -> None:
        self.sent.append(message)

    def durable_up_to(self, step: int) -> None:
        pass


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
    again = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, Link(Answered(2, 4))), journal)
    await again.start()
    with pytest.raises(RunLost, match="step 3"):
        await again.begin(ItemHeader())
    await again.close()


async def test_an_answer_waits_until_the_journal_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room again the client has the answer of the trainer: it is carried out, and must not be told as failed."""
    monkeypatch.setattr("counterpoint.service.runs.AGAIN_SECONDS", 0.0)
    journal = Journal(tmp_path / "items", "one", 2**20)
    write, is_full = journal.write_answer, [True]

    def full(answered: Answered) -> None:
        if is_full[0]:
            raise OSError("the disk is full")
        write(answered)

    monkeypatch.setattr(journal, "write_answer", full)
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, Link(Answered(1, 3))), journal)
    await run.begin(ItemHeader(), None)
    await run.start()
    waiting = asyncio.create_task(run.answer_to(1))
    await until(lambda: "full" in run.reason, "the reason for which it waits")
    assert not waiting.done()
    is_full[0] = False
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await waiting).step == 3
    await run.close()


@pytest.mark.parametrize("work", ["sender", "receiver"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_task_that_dies_ends_the_waiting_and_the_run_may_be_opened_anew(
    work: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        raise TypeError("a fault of ours")

    trainer = Refusing()
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, trainer), Journal(tmp_path / "items", "one", 2**20))
    if how == "failed":
        monkeypatch.setattr(trainer if work == "sender" else run, "send" if work == "sender" else "_carry_out", dies)
    await run.start()
    await run.begin(ItemHeader(), None)
    waiting = asyncio.create_task(run.answer_to(1))
    await asyncio.sleep(0)
    if how == "cancelled":
        next(each for each in run._tasks if work in each.get_name()).cancel()
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(RunFailed):
            await waiting
    assert run.has_failed
    await run.close()


async def test_items_are_in_memory_only_while_they_are_about_to_be_sent(tmp_path: Path) -> None:
    trainer = Refusing()
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, trainer), Journal(tmp_path / "items", "one", 2**20))
    for _ in range(3):
        await run.begin(ItemHeader(updates=True))
    assert set(run._kept.values()) == {None}, "no trainer takes items yet"
    await run.start()
    await until(lambda: len(trainer.sent) >= 3, "the items")
    await until(lambda: set(run._kept.values()) <= {None} or run._refused != {}, "none is kept")
    assert [run._kept[number] for number in (2, 3)] == [None, None]
    await run.close()


@pytest.mark.slow  # some hundred files
async def test_an_update_of_more_items_than_answers_are_kept_is_whole_after_a_loss(tmp_path: Path) -> None:
    """None of its contributions is covered by a checkpoint of the update before, so the trainer may ask for each again."""
    journal = Journal(tmp_path / "items", "one", 2**20)
    own = range(2, KEPT_ANSWERS + 50)
    journal.write_item(Ask(1, encode_item(ItemHeader(updates=True)), None), b"")
    journal.write_answer(Answered(1, 1))
    for number in own:
        journal.write_item(Ask(number, encode_item(ItemHeader(spoils=True)), None), b"")
        journal.write_answer(Answered(number, 0))
    journal.write_item(Ask(own.stop, encode_item(ItemHeader(updates=True)), None), b"")
    trainer = Recording()
    run = DrivenRun(TrainedRun(run_id="one"), tmp_path, cast(Any, trainer), journal)
    await run.start()
    for message in (Ready(2, 2 * KEPT_ANSWERS, 1), Acknowledged(1, 1), Ready(2, 2 * KEPT_ANSWERS, 2)):
        trainer.told.put_nowait(message)
    await until(lambda: run._session == 2 or run.has_failed, "the trainer's loss")
    assert journal.items()[-len(own) - 1 :] == [*own, own.stop]
    await until(lambda: [each.number for each in trainer.sent if each.session == 2] == [*own, own.stop], "every item")
    for number in (*own, own.stop):
        trainer.told.put_nowait(Answered(number, 2 if number == own.stop else 0))
    trainer.told.put_nowait(Acknowledged(2, 2))
    assert (await run.answer_to(own.stop)).step == 2
    await until(lambda: journal.items()[0] > 1, "what a checkpoint covers is forgotten")
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
