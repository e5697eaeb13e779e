"""Receipts of a driven run: each answered item has one, whatever is killed, and what was altered is named."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from counterpoint.cli.main import main
from counterpoint.run.items import ItemHeader
from counterpoint.run.receipts import head_of
from counterpoint.run.trained import TrainedRun
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.messages import Answered, Ask, Ready
from counterpoint.verify.report import BROKEN_CHAIN, DAMAGED, SOUND
from counterpoint.verify.run import verify
from tests.support.polling import DEADLINE_SECONDS

ITEMS = 6
"""The number of items: every second one updates, the fourth fails, and the fifth publishes."""


class Trainer:
    """A trainer that answers each item as soon as it is sent."""

    def __init__(self, published: Path, done: int) -> None:
        self._published = published
        self._told: asyncio.Queue[object] = asyncio.Queue()
        self._told.put_nowait(Ready(done + 1, 100, 1))

    def link(self) -> Trainer:
        return self

    async def start(self, hello: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def receive(self) -> object:
        return await self._told.get()

    async def send(self, ask: Ask) -> None:
        updates = (0, 0, 1, 1, 1, 1, 2)[ask.number]
        fault, text = ("asker", "no") if ask.number == 4 else ("", str(self._published) if ask.number == 5 else "")
        self._told.put_nowait(Answered(ask.number, updates, cast(Any, fault), text, {"loss": ask.number / 3}))


def journal_of(job: Path) -> Journal:
    return Journal(job / "loops/one", "one", 2**20)


async def drive(job: Path, items: int) -> None:
    """Asks for so many items more, in a process of its own, so to say."""
    journal = journal_of(job)
    done = len(journal.answers())
    run = DrivenRun(TrainedRun(run_id="one"), job, cast(Any, Trainer(job / "run_one/published/last", done)), journal)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await run.start()
        for _ in range(items):
            await run.answer_to(await run.begin(ItemHeader()))
        await run.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with a run of two processes."""
    directory = tmp_path / "job"
    with publish_directory(directory / "run_one/published/.last.1") as place:
        (place / "probe.json").write_text('{"digests": {"float32": {"": "1f"}}}')
    (directory / "run_one/published/last").symlink_to(".last.1")
    asyncio.run(drive(directory, 4))
    asyncio.run(drive(directory, ITEMS - 4))
    with publish_directory(directory / "trainer/one/checkpoints/step_1") as place:
        (place / "state.json").write_text('{"progress": {"step": 1, "item": 2, "batch": "x"}}')
    return directory


def test_an_undisturbed_run_is_sound(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(job / "run_one")
    assert report.code == SOUND, report.text()
    assert not report.unchecked
    assert (report.steps, report.checked["items and answers"]) == (ITEMS, 2 * ITEMS)
    assert (report.checked["publications"], report.checked["checkpoints of the trainer"]) == (1, 1)
    assert main(["verify", str(job), "--head", report.head]) == SOUND
    assert "run one, 6 items: sound" in capsys.readouterr().out


def test_a_kill_between_answer_and_receipt_loses_none(job: Path) -> None:
    path = job / "run_one/receipts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    assert verify(job / "run_one").code == SOUND
    asyncio.run(drive(job, 0))
    assert path.read_bytes().splitlines(keepends=True) == lines


def test_a_publication_whose_item_has_no_receipt_yet_is_no_damage(job: Path) -> None:
    with publish_directory(job / "run_one/published/.last.2") as place:
        (place / "probe.json").write_text('{"digests": {"float32": {"": "2f"}}}')
    assert verify(job / "run_one").code == DAMAGED, "all items have receipts"
    journal_of(job).write_item(Ask(ITEMS + 1, b"", None), b"")
    report = verify(job / "run_one")
    assert report.code == SOUND, report.text()
    assert report.unchecked["publications, maybe of an item without a receipt"] == 1


def test_items_that_left_the_journal_are_counted(job: Path) -> None:
    head = verify(job / "run_one").head
    for number in range(1, 4):
        journal_of(job).item_path(number).unlink()
        journal_of(job).answer_path(number).unlink()
    report = verify(job / "run_one", head)
    assert (report.code, report.unchecked["items and answers that were removed since"]) == (SOUND, 6)


def test_a_run_that_is_older_than_receipts_has_them_of_the_journal_on(job: Path) -> None:
    (job / "run_one/receipts.jsonl").unlink()
    journal_of(job).answer_path(1).unlink()
    asyncio.run(drive(job, 0))
    report = verify(job / "run_one")
    assert (report.code, report.steps) == (SOUND, ITEMS - 1)
    assert any("before 2" in each for each in report.unchecked)


def altered(job: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes the receipts, and chains them anew."""
    path = job / "run_one/receipts.jsonl"
    values = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    change(values)
    lines, previous = [], ""
    for each in values:
        lines.append(orjson.dumps(each | {"previous": previous}))
        previous = head_of(lines[-1])
    path.write_bytes(b"".join(line + b"\n" for line in lines))


FORGERIES: dict[str, tuple[Callable[[Path], object], int]] = {
    "an item": (lambda job: journal_of(job).write_item(Ask(3, b"other", None), b""), DAMAGED),
    "an answer": (lambda job: journal_of(job).write_answer(Answered(3, 1, metrics={"loss": 0.5})), DAMAGED),
    "two items exchanged": (
        lambda job: shutil.copy(journal_of(job).answer_path(1), journal_of(job).answer_path(3)),
        DAMAGED,
    ),
    "weights": (
        lambda job: (job / "run_one/published/.last.1/probe.json").write_text('{"digests": {"float32": {"": "2f"}}}'),
        DAMAGED,
    ),
    "a checkpoint of another item": (
        lambda job: (job / "trainer/one/checkpoints/step_1/state.json").write_text(
            '{"progress": {"step": 1, "item": 1}}'
        ),
        DAMAGED,
    ),
    "an update more": (lambda job: altered(job, lambda values: values[2].update(updates=3)), DAMAGED),
    "an item left out": (lambda job: altered(job, lambda values: values.pop(2)), BROKEN_CHAIN),
    "an item twice": (lambda job: altered(job, lambda values: values.insert(2, values[2])), BROKEN_CHAIN),
    "two receipts exchanged": (lambda job: altered(job, lambda values: values.insert(2, values.pop(3))), BROKEN_CHAIN),
    "the end": (lambda job: altered(job, lambda values: values.__delitem__(slice(-2, None))), BROKEN_CHAIN),
    "no number": (lambda job: altered(job, lambda values: values[2].update(item="x")), BROKEN_CHAIN),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_named(job: Path, name: str) -> None:
    forge, code = FORGERIES[name]
    forge(job)
    assert verify(job / "run_one").code == code


def test_a_receipt_that_was_altered_alone_breaks_the_chain(job: Path) -> None:
    path = job / "run_one/receipts.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"item":3', b'"item":3 '))
    assert verify(job / "run_one").code == BROKEN_CHAIN
