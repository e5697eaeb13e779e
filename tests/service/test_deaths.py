"""A task of the service that dies, of whatever, answers what waits for it, and is begun anew: each is killed in turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import orjson
import pytest

from counterpoint.inference.base import InferenceError
from counterpoint.run.items import RESULTS, ItemHeader, decode_item
from counterpoint.service import daemon
from counterpoint.service.keys import digest
from counterpoint.service.samplers import Samplers
from counterpoint.service.tasks import Tasks
from counterpoint.service.tinker.futures import FutureResult, answer
from counterpoint.service.tinker.models import ClientModel, Request
from counterpoint.service.tinker.proto import INT32, MESSAGES
from counterpoint.service.tinker.service import Service
from counterpoint.transport.messages import Answered, Ask, Evicted, Ready
from tests.service.serving import KEYS, serving
from tests.service.test_models import Run, model_of
from tests.service.test_rest import a_model
from tests.support.polling import DEADLINE_SECONDS, until


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.service.tasks.AGAIN_SECONDS", 0.0)


STEP = msgspec.json.encode({"model_id": "s1:train:0", "seq_id": 1, "adam_params": {}})


def tasks_of(tasks: Tasks, name: str) -> list[asyncio.Task[None]]:
    """The tasks of an owner whose work has this name."""
    return [each for each in tasks._tasks if each.get_coro().__name__ == name]  # type: ignore[union-attr]


@asynccontextmanager
async def a_running_model(directory: Path, run: Run) -> AsyncIterator[ClientModel]:
    model = model_of(directory, run)
    await model.start()
    yield model
    await model.close()
    model._futures.close()


async def told(model: ClientModel, seq_id: int) -> dict[str, Any]:
    found = await model._futures.fetch(f"s1:train:0:{seq_id}", DEADLINE_SECONDS)
    assert found is not None
    return dict(orjson.loads(found.body))


class Slow(Run):
    """A run that journals its first item, or answers it, when it may, and the others at once."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.headers.append(None)  # type: ignore[arg-type]  # so that none fails
        self._place = place
        self.may = asyncio.Event()
        self.reached: list[str] = []

    async def _pass(self, place: str) -> None:
        self.reached.append(place)
        if place == self._place:
            await self.may.wait()

    async def begin(self, header: Any, batch: object, note: bytes) -> int:
        await self._pass("begin")
        return await super().begin(header, batch, note)

    async def answer_to(self, number: int) -> Any:
        await self._pass("answer")
        return await super().answer_to(number)


async def test_the_worker_of_a_model_that_is_killed_answers_its_request_and_goes_on(tmp_path: Path) -> None:
    run = Slow("begin")
    async with a_running_model(tmp_path, run) as model:
        asked = [asyncio.create_task(model.offer(Request("optim_step", number, STEP))) for number in (1, 2)]
        await until(lambda: run.reached == ["begin"], "the worker has the first request")
        run.may.set()
        for task in tasks_of(model._tasks, "_work"):
            task.cancel()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.gather(*asked)
            assert (await told(model, 1))["category"] == "server"
            assert "error" not in await told(model, 2)


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyError("a fault"), MemoryError()])
async def test_the_worker_of_a_model_that_fails_answers_its_request_and_goes_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Run):
        async def begin(self, header: Any, batch: object, note: bytes) -> int:
            self.headers.append(header)
            if len(self.headers) == 1:
                raise error
            return len(self.headers)

    async with a_running_model(tmp_path, Failing()) as model, asyncio.timeout(DEADLINE_SECONDS):
        for number in (1, 2):
            await model.offer(Request("optim_step", number, STEP))
        assert (await told(model, 1))["category"] == "server"
        assert "error" not in await told(model, 2)


async def test_who_waits_for_an_answer_of_the_trainer_is_killed_and_waits_again(tmp_path: Path) -> None:
    run = Slow("answer")
    async with a_running_model(tmp_path, run) as model, asyncio.timeout(DEADLINE_SECONDS):
        await model.offer(Request("optim_step", 1, STEP))
        await until(lambda: run.reached[-1:] == ["answer"], "it waits")
        run.may.set()
        for task in tasks_of(model._tasks, "_finish"):
            task.cancel()
        assert "error" not in await told(model, 1)


async def test_who_writes_an_early_request_is_killed_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_running_model(tmp_path, Run()) as model, asyncio.timeout(DEADLINE_SECONDS):
        write, may_write = model._journal.write_early, threading.Event()

        def slowly(number: int, note: bytes) -> None:
            assert may_write.wait(DEADLINE_SECONDS)
            write(number, note)

        monkeypatch.setattr(model._journal, "write_early", slowly)
        offered = asyncio.create_task(model.offer(Request("optim_step", 2, STEP)))
        await until(lambda: bool(tasks_of(model._tasks, "_write_early")), "it is about to be written")
        tasks_of(model._tasks, "_write_early")[0].cancel()
        may_write.set()
        await offered
        assert model._journal.early() == [2]


async def test_a_full_disk_holds_up_no_later_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is to be spilled, which raises: the model's worker goes on all the same."""

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("counterpoint.service.tinker.futures._write", full)
    async with a_running_model(tmp_path, Run()) as model, asyncio.timeout(DEADLINE_SECONDS):
        model._futures._memory_bytes = 1
        for number in (1, 2, 3):
            await model._futures.complete(f"older {number}", FutureResult(b"xx"))
            request = Request("optim_step", number, STEP)
            model._futures.begin(model.request_id(number), is_due=True)
            model._take(request)
            await told(model, number)


@pytest.mark.parametrize("name", ["_watch", "_sweep_at_times"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_the_services_own_tasks_are_begun_anew(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.service.tinker.service.WATCH_SECONDS", 0.001)
    monkeypatch.setattr("counterpoint.service.tinker.service.SWEEP_SECONDS", 0.001)
    looks: list[str] = []

    async def looked(self: Service) -> None:
        looks.append(name)
        if how == "failed" and len(looks) == 1:
            raise RuntimeError("a fault of ours")

    async with serving(tmp_path) as (_, service), asyncio.timeout(DEADLINE_SECONDS):
        model = model_of(tmp_path / "model", Run())
        if name == "_watch":
            monkeypatch.setattr(model, "fail_overdue", lambda: looked(service))
            service._models["s1:train:0"] = model
        else:
            monkeypatch.setattr(Service, "sweep", looked)
        await service.start()
        await until(lambda: len(looks) >= 2, "further looks")
        first = tasks_of(service.tasks, name)[0]
        first.cancel()
        await until(lambda: first.done() and bool(tasks_of(service.tasks, name)), "it is begun anew")
        count = len(looks)
        await until(lambda: len(looks) > count, "further looks")
        model._futures.close()


async def test_work_that_is_killed_is_answered(tmp_path: Path) -> None:
    async def never() -> FutureResult:
        await asyncio.Event().wait()
        return answer()

    async with serving(tmp_path) as (_, service), asyncio.timeout(DEADLINE_SECONDS):
        task = service.results.begin("s1:sample:0:1", "", never)
        assert task is not None
        await asyncio.sleep(0)
        task.cancel()
        found = await service.results.of("").fetch("s1:sample:0:1", DEADLINE_SECONDS)
        assert found is not None
        assert orjson.loads(found.body)["category"] == "server"


async def test_work_that_ends_with_the_service_is_told_to_nobody(tmp_path: Path) -> None:
    async def never() -> FutureResult:
        await asyncio.Event().wait()
        return answer()

    async with serving(tmp_path) as (_, service):
        service.results.begin("s1:sample:0:1", "", never)
        await asyncio.sleep(0)
        await service.tasks.cancel()
        assert service.results.of("").pending == 1, "it is asked for again after the start"


async def test_a_model_whose_run_has_failed_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.service.tinker.service.WATCH_SECONDS", 0.001)
    async with serving(tmp_path) as (_, service), asyncio.timeout(DEADLINE_SECONDS):
        record = a_model(service.store, 1, digest(KEYS[0]).hex())
        await service.start()
        await until(lambda: record.model_id in service._models, "the model")
        former = service._models[record.model_id]
        for task in former.run._tasks:
            task.cancel()
        await until(
            lambda: (
                service._models.get(record.model_id) not in (None, former)
                and not service._models[record.model_id].run.has_failed
            ),
            "another one in its place",
        )


COLUMNS: dict[str, Any] = dict.fromkeys(RESULTS, np.zeros(3, np.float32))


class Trainer:
    """A trainer that carries out each item once, and answers when it may; a run that comes again is answered again."""

    def __init__(self) -> None:
        self.carried_out: list[int] = []
        self.headers: dict[int, ItemHeader] = {}
        self.may_answer = asyncio.Event()
        self.evicts = False

    def link(self) -> Any:
        return _Link(self)


class _Link:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._numbers: asyncio.Queue[int] = asyncio.Queue()
        self._is_new = True

    async def start(self, _: object) -> None:
        for number in self._trainer.carried_out:
            self._numbers.put_nowait(number)

    async def close(self) -> None:
        pass

    def durable_up_to(self, _: int) -> None:
        pass

    async def receive(self) -> object:
        if self._is_new:
            self._is_new = False
            return Ready(len(self._trainer.carried_out) + 1, 8, 1)
        number = await self._numbers.get()
        await self._trainer.may_answer.wait()
        return Evicted("an operator") if self._trainer.evicts else Answered(number, 0, columns=COLUMNS)

    async def send(self, ask: Ask) -> None:
        if not self._trainer.evicts:
            self._trainer.carried_out.append(ask.number)
        self._trainer.headers[ask.number] = decode_item(ask.header)
        self._numbers.put_nowait(ask.number)


def contribution(model_id: str) -> Request:
    message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(8)
    target = datum.loss_fn_inputs.add(key="target_tokens").value
    target.dense, target.dtype = bytes(8), INT32
    target.shape.append(2)
    return Request("forward_backward", 1, message.SerializeToString())


async def told_by(service: Service, model_id: str, seq_id: int) -> FutureResult:
    """What a client is told that asks again and again, as the SDK does."""
    while True:
        found = await service.retrieve(f"{model_id}:{seq_id}", digest(KEYS[0]).hex(), 1.0)
        if found is not None:
            return found


@pytest.mark.parametrize("work", ["sender", "receiver"])
async def test_a_contribution_that_counts_is_not_told_as_failed(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client would send it again, and the next update would have its gradient twice."""
    monkeypatch.setattr("counterpoint.service.tinker.service.WATCH_SECONDS", 0.001)
    trainer = Trainer()
    async with serving(tmp_path) as (_, service), asyncio.timeout(DEADLINE_SECONDS):
        service._connection = cast(Any, trainer)
        record = a_model(service.store, 1, digest(KEYS[0]).hex())
        await service.start()
        model = service._models[record.model_id]
        await model.offer(contribution(record.model_id))
        await until(lambda: trainer.carried_out == [1], "the trainer has the gradient")
        next(each for each in model.run._tasks if work in each.get_name()).cancel()
        await until(lambda: service._models.get(record.model_id) not in (None, model), "another one in its place")
        trainer.may_answer.set()
        assert (await told_by(service, record.model_id, 1)).is_protobuf, "it has not failed"
        await service.offer("optim_step", record.model_id, 2, STEP, record.owner)
        assert "error" not in orjson.loads((await told_by(service, record.model_id, 2)).body)
    assert trainer.carried_out == list(range(1, len(trainer.headers) + 1)), "each once"
    assert [number for number, each in trainer.headers.items() if each.objective] == [1]
    assert sum(each.updates for each in trainer.headers.values()) == 1
    assert not any(each.spoils for each in trainer.headers.values())


async def test_a_contribution_that_was_told_as_failed_does_not_count_later(tmp_path: Path) -> None:
    """An operator lets a run in again that was sent away: what its client was told must stay true."""
    trainer = Trainer()
    trainer.evicts = True
    async with serving(tmp_path) as (_, service), asyncio.timeout(DEADLINE_SECONDS):
        service._connection = cast(Any, trainer)
        record = a_model(service.store, 1, digest(KEYS[0]).hex())
        await service.start()
        await service._models[record.model_id].offer(contribution(record.model_id))
        trainer.may_answer.set()
        assert b"operator" in (await told_by(service, record.model_id, 1)).body
        trainer.evicts = False
        await service._shut(record.model_id)
        await service.model(record.model_id, record.owner)
        await until(lambda: trainer.carried_out == [1], "the run goes on")
        assert b"operator" in (await told_by(service, record.model_id, 1)).body
    assert trainer.headers[1] == ItemHeader(spoils=True)


async def test_the_load_of_an_adapter_that_is_killed_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    class Served:
        async def release(self) -> None:
            released.append(self)

    class Pool:
        def model(self, *_: object, **__: object) -> Served:
            return Served()

    released: list[Served] = []
    monkeypatch.setattr("counterpoint.service.samplers._load", never)
    samplers = Samplers(Pool(), "m", None, 2, None)  # type: ignore[arg-type]
    using = asyncio.create_task(samplers.load("a", tmp_path))
    await until(lambda: bool(samplers._loaded), "the load")
    next(iter(samplers._loaded.values())).ready.cancel()
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(InferenceError):
            await using
    assert not samplers._loaded
    assert len(released) == 1


async def test_what_measures_the_loop_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []

    def lines(status: object, directory: Path) -> None:
        written.append(status)
        if len(written) == 1:
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(daemon, "HEALTH_SECONDS", 0.001)
    monkeypatch.setattr(daemon, "write_status", lines)
    async with serving(tmp_path) as (_, service), daemon._measured(tmp_path / "health.jsonl", service):
        await until(lambda: len(written) >= 3, "further lines")


async def test_a_task_that_returns_or_whose_owner_ends_is_not_begun_anew() -> None:
    begun: list[int] = []

    def work(waiting: Callable[[], Any]) -> Callable[[], Any]:
        async def run() -> None:
            begun.append(1)
            await waiting()

        return run

    tasks = Tasks("a test")
    tasks.keep(work(lambda: asyncio.sleep(0)))
    tasks.keep(work(asyncio.Event().wait))
    await asyncio.sleep(0.01)
    await tasks.cancel()
    await asyncio.sleep(0.01)
    assert len(begun) == 2
