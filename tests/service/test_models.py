"""A model's requests: none of an update is lost unnoticed, and a name keeps its newest weights."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from counterpoint.run.items import AdamW, ItemHeader, encode_item
from counterpoint.service.config import ServiceConfig
from counterpoint.service.journal import Journal
from counterpoint.service.records.ledger import Used, day_now
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import LossRecord, ModelRecord, SavedRecord
from counterpoint.service.tinker import models
from counterpoint.service.tinker.context import ServiceContext
from counterpoint.service.tinker.futures import FutureResult, TooMany
from counterpoint.service.tinker.models import ClientModel, Request
from counterpoint.service.tinker.proto import MESSAGES
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.transport.messages import SECONDS, Answered, Ask
from counterpoint.transport.room import Room
from tests.support.polling import DEADLINE_SECONDS, until


class Run:
    """A run whose first item cannot be journalled."""

    has_failed = False
    updates = 0

    def __init__(self) -> None:
        self.headers: list[ItemHeader] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def begin(self, header: ItemHeader, batch: object, note: bytes) -> int:
        self.headers.append(header)
        if len(self.headers) == 1:
            raise OSError("the disk is full")
        return len(self.headers)

    async def answer_to(self, number: int) -> Answered:
        return Answered(number, number, metrics={SECONDS: 0.5})


def model_of(directory: Path, run: Run, room: int = 2**30) -> ClientModel:
    config = ServiceConfig(output_dir=directory, model="m", max_tokens=10, max_pending=10)
    context = ServiceContext(config, RecordStore(directory), cast(Any, None), 10, {})
    context.room = Room(room)
    record, journal = (
        ModelRecord("s1:train:0", "s1_train_0", "", 1, []),
        Journal(directory / "items", "s1_train_0", 1000),
    )
    return ClientModel(record, cast(Any, run), journal, context)


class Journalling(Run):
    """A run whose items are journalled, and not answered."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self.may_begin = asyncio.Event()

    async def begin(self, header: ItemHeader, batch: object, note: bytes) -> int:
        await self.may_begin.wait()
        self.headers.append(header)
        self._journal.write_item(Ask(len(self.headers), encode_item(header), None), note)
        return len(self.headers)

    async def answer_to(self, number: int) -> Answered:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_request_is_in_the_journal_before_its_client_is_told_that_it_was_taken(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "items", "s1_train_0", 1000)
    run = Journalling(journal)
    model = model_of(tmp_path, run)
    await model.start()
    assert await model.offer(Request("optim_step", 2, b"second")) == "s1:train:0:2"
    assert journal.early() == [2]
    told = asyncio.create_task(model.offer(Request("optim_step", 1, b"first")))
    again = asyncio.create_task(model.offer(Request("optim_step", 1, b"first")))
    done, _ = await asyncio.wait([told, again], timeout=0.05)
    assert not done
    run.may_begin.set()
    assert await told == await again == "s1:train:0:1"
    await until(lambda: journal.early() == [], "the second item")
    assert journal.items() == [1, 2]
    await model.close()
    model._futures.close()


async def test_a_request_that_came_early_is_taken_up_after_a_kill(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "items", "s1_train_0", 1000)
    killed = model_of(tmp_path, Journalling(journal))
    await killed.start()
    for number in (2, 3):
        await killed.offer(Request("optim_step", number, b"early"))
    run = Journalling(journal)
    run.may_begin.set()
    model = model_of(tmp_path, run)
    await model.start()
    assert model._futures.knows("s1:train:0:3")
    await model.offer(Request("optim_step", 1, b"first"))
    await until(lambda: journal.items() == [1, 2, 3] and not journal.early(), "all items")
    for each in (killed, model):
        await each.close()
        each._futures.close()


async def test_an_early_request_that_is_written_after_its_item_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, may_end = Journal(tmp_path / "items", "s1_train_0", 1000), threading.Event()
    run = Journalling(journal)
    run.may_begin.set()
    model = model_of(tmp_path, run)
    written = model._journal.write_early

    def slow(number: int, note: bytes) -> None:
        may_end.wait(DEADLINE_SECONDS)
        written(number, note)
        done.append(number)

    done: list[int] = []
    monkeypatch.setattr(model._journal, "write_early", slow)
    await model.start()
    told = asyncio.create_task(model.offer(Request("optim_step", 2, b"second")))
    await asyncio.sleep(0)
    await model.offer(Request("optim_step", 1, b"first"))
    assert await told == "s1:train:0:2"
    may_end.set()
    await until(lambda: done == [2] and journal.early() == [], "no early request")
    await model.close()
    model._futures.close()


async def test_the_request_for_which_others_wait_is_taken_however_many_wait(tmp_path: Path) -> None:
    model = model_of(tmp_path, Run(), 200)
    await model.start()
    for number in range(2, 12):  # as many as may be pending
        await model.offer(Request("optim_step", number, b"x" * 9))
    for body in (b"", b"x" * 20):
        with pytest.raises(TooMany):
            await model.offer(Request("optim_step", 12, body))
    assert await model.offer(Request("optim_step", 1, b"x" * 20)) == "s1:train:0:1"
    await until(lambda: not model._futures.pending, "the results of all")
    assert model._context.room.of("") == 0, "all room is given back"
    await model.close()
    model._futures.close()


async def test_an_early_request_that_cannot_be_written_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    model = model_of(tmp_path, Run())
    await model.start()
    with monkeypatch.context() as patch:
        patch.setattr(model._journal, "write_early", full)
        with pytest.raises(OSError, match="full"):
            await model.offer(Request("optim_step", 2, b""))
    assert not model._futures.knows("s1:train:0:2")
    await model.offer(Request("optim_step", 2, b""))
    assert model._journal.early() == [2]
    await model.close()
    model._futures.close()


async def test_an_update_knows_of_a_contribution_that_was_not_journalled(tmp_path: Path) -> None:
    run = Run()
    model = model_of(tmp_path, run)
    await model.start()
    step = msgspec.json.encode({"model_id": "s1:train:0", "seq_id": 2, "adam_params": {}})
    await model.offer(Request("forward_backward", 1, b""))
    for number in (2, 3):
        await model.offer(Request("optim_step", number, step))
    await until(lambda: len(run.headers) == 3, "three items")
    await model.close()
    model._futures.close()
    assert [header.spoils for header in run.headers[1:]] == [True, False]


async def test_a_forward_pass_that_is_refused_spoils_no_update(tmp_path: Path) -> None:
    run = Run()
    run.headers.append(ItemHeader())  # so that none fails
    model = model_of(tmp_path, run)
    await model.start()
    for number, only in ((1, True), (2, False)):
        message = MESSAGES["ForwardBackwardRequest"](loss_fn="nothing", forward_only=only)
        await model.offer(Request("forward_backward", number, message.SerializeToString()))
    await until(lambda: len(run.headers) == 3, "two items")
    await model.close()
    model._futures.close()
    assert [header.spoils for header in run.headers[1:]] == [False, True]


@pytest.mark.parametrize(("given_clip", "clip"), [(0.0, math.inf), (0.25, 0.25)])
async def test_the_values_of_an_update_are_those_of_its_request(tmp_path: Path, given_clip: float, clip: float) -> None:
    """All different, so that none stands for another; a clip of 0 means none."""
    run = Run()
    run.headers.append(ItemHeader())  # so that none fails
    model = model_of(tmp_path, run)
    await model.start()
    asked = {"beta1": 0.5, "beta2": 0.75, "eps": 1e-3, "weight_decay": 0.125, "learning_rate": 0.0625}
    body = {"model_id": "s1:train:0", "seq_id": 1, "adam_params": asked | {"grad_clip_norm": given_clip}}
    await model.offer(Request("optim_step", 1, msgspec.json.encode(body)))
    await until(lambda: len(run.headers) == 2, "the item")
    await model.close()
    model._futures.close()
    assert run.headers[1].values == AdamW(0.0625, betas=(0.5, 0.75), eps=1e-3, decay=0.125, clip=clip)


@pytest.mark.parametrize("only", [True, False])
async def test_the_ledger_tells_a_forward_pass_from_training(tmp_path: Path, only: bool) -> None:
    run = Run()
    run.headers.append(ItemHeader())  # so that none fails
    model = model_of(tmp_path, run)
    await model.start()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5, 6], "weights": [0.0, 1.0, 1.0, 1.0, 1.0]},
    )
    asked = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id="s1:train:0", seq_id=1)
    message = MESSAGES["ForwardBackwardRequest"].FromString(
        forward_backward_request_to_proto(request).SerializeToString()
    )
    message.forward_only = only
    await model.offer(Request("forward_backward", 1, message.SerializeToString()))
    await until(lambda: "s1:train:0:1" in model._futures._held, "the result")
    await model.close()
    model._futures.close()
    used = Used(forward=5, seconds=0.5) if only else Used(trained=5, seconds=0.5)
    assert RecordStore(tmp_path).ledger.days()[day_now()] == {"": used}


@pytest.mark.parametrize("loss_id", ["s1:loss:0", "s2:loss:0", "s1:loss:1", "", "s1:../../models", "s1_loss_0"])
async def test_a_traced_loss_is_its_sessions_alone(tmp_path: Path, loss_id: str) -> None:
    model = model_of(tmp_path, Run())
    for each in ("s1:loss:0", "s2:loss:0"):
        model._context.store.write(LossRecord(each, msgspec.Raw(b'{"of":"%b"}' % each.encode())))
    message = MESSAGES["ForwardBackwardRequest"](loss_fn="custom")
    message.loss_fn_config_v2.add(key="loss_id").value.text = loss_id
    if loss_id == "s1:loss:0":
        assert model._traced(message) == b'{"of":"s1:loss:0"}'
    else:
        with pytest.raises(BadRequest, match="no loss"):
            model._traced(message)
    model._futures.close()


async def test_a_request_that_the_service_fails_at_is_answered_and_holds_up_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    run = Run()
    run.headers.append(ItemHeader())  # so that none fails
    model = model_of(tmp_path, run)
    monkeypatch.setattr(model, "_forward_backward", faulty)
    await model.start()
    step = msgspec.json.encode({"model_id": "s1:train:0", "seq_id": 2, "adam_params": {}})
    name = await model.offer(Request("forward_backward", 1, b""))
    await model.offer(Request("optim_step", 2, step))
    found = await model._futures.fetch(name, DEADLINE_SECONDS)
    await until(lambda: len(run.headers) == 3, "two items")
    await model.close()
    model._futures.close()
    assert found is not None
    assert b"a fault of ours" in found.body
    assert [(each.spoils, each.updates) for each in run.headers[1:]] == [(True, False), (False, True)]


async def test_a_request_that_is_read_again_does_not_replace_later_weights(tmp_path: Path) -> None:
    model = model_of(tmp_path, Run())
    records = [SavedRecord("s1:train:0", "weights", "newest", number, number) for number in (1, 2)]
    for record in (*records, records[0]):
        await model._keep(record, overwrite=True)
    model._futures.close()
    assert model._context.store.saved(records[0].path) == msgspec.structs.replace(records[1], size=0)


async def test_a_model_that_is_closed_leaves_no_request_pending(tmp_path: Path) -> None:
    model = model_of(tmp_path, Run())
    await model.start()
    name = await model.offer(Request("optim_step", 2, b""))
    assert model._futures.knows(name)
    await model.close()
    assert not model._futures.knows(name)
    model._futures.close()


async def test_a_model_that_is_opened_again_loads_no_adapter(tmp_path: Path) -> None:
    run = Run()
    model = model_of(tmp_path, run)
    body = msgspec.json.encode({"model_id": "s1:train:0", "seq_id": 1, "sampling_session_seq_id": 3})
    note = msgspec.msgpack.encode(Request("save_weights_for_sampler", 1, body))
    model._journal.write_item(Ask(1, encode_item(ItemHeader(publication="s1")), None), note)
    model._context.store.write(SavedRecord("s1:train:0", "snapshot", "s1", 1, 1, "published/s1"))
    await model.start()  # there are no servers here
    found = await model._futures.fetch("s1:train:0:1", DEADLINE_SECONDS)
    await model.close()
    model._futures.close()
    assert found is not None
    assert msgspec.json.decode(found.body)["sampling_session_id"] == "s1:sample:3"


async def test_the_ledger_counts_an_item_once_however_often_its_model_is_opened(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "items", "s1_train_0", 1000)
    note = msgspec.msgpack.encode(Request("optim_step", 1, b'{"model_id": "", "seq_id": 1, "adam_params": {}}'))
    journal.write_item(Ask(1, encode_item(ItemHeader(updates=True)), None), note)
    for _ in range(2):
        model = model_of(tmp_path, Run())
        await model.start()
        await until(lambda: "s1:train:0:1" in model._futures._held, "the result")  # noqa: B023
        await model.close()
        model._futures.close()
    assert RecordStore(tmp_path).ledger.days()[day_now()] == {"": Used(seconds=0.5)}


async def test_a_failure_without_an_item_is_told_again_after_a_new_start_and_the_next_goes_on(tmp_path: Path) -> None:
    message = MESSAGES["ForwardBackwardRequest"](model_id="s1:train:0", seq_id=1)
    first = model_of(tmp_path, Run())
    await first.start()
    await first.offer(Request("forward_backward", 1, message.SerializeToString()))
    await until(lambda: "s1:train:0:1" in first._futures._held, "the failure")
    told = await first._futures.fetch("s1:train:0:1", 0)
    await first.close()
    first._futures.close()

    run = Run()
    run.headers.append(ItemHeader())  # the first may be journalled here
    second = model_of(tmp_path, run)
    await second.start()
    assert await second._futures.fetch("s1:train:0:1", 0) == told
    await second.offer(Request("optim_step", 2, b'{"model_id": "", "seq_id": 2, "adam_params": {}}'))
    await until(lambda: len(run.headers) == 2, "the update")
    assert run.headers[1].spoils, "the update would lack what has failed"
    await second.close()
    second._futures.close()


async def test_a_request_that_has_waited_too_long_fails_after_a_new_start_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MISSING_SECONDS", 0.0)
    told: list[FutureResult | None] = []
    for _ in range(2):
        model = model_of(tmp_path, Run())
        await model.start()
        if not told:
            await model.offer(Request("optim_step", 2, b"second"))
            await model.fail_overdue()
        told.append(await model._futures.fetch("s1:train:0:2", 0))
        assert not model._sequence.knows(2)
        await model.close()
        model._futures.close()
    assert told[0] == told[1] is not None
