"""Calls in the daemon's own threads: when their task continues, and what a cancelled one leaves."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import uvloop

from counterpoint.run.loop_health import threads
from counterpoint.run.loop_health.threads import (
    advantage_in_thread,
    give_environments_threads,
    in_thread,
    run_cpu_bound,
)

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Callable[..., None]:
    def run(coroutine: object) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
            made.run(coroutine)  # type: ignore[arg-type]

    return run


def test_a_task_continues_in_the_iteration_that_notices_the_end(runner: Callable[..., None]) -> None:
    order: list[str] = []

    async def called() -> None:
        await run_cpu_bound(order.append, "computed")
        order.append("continued")

    async def work() -> None:
        task = asyncio.create_task(called())
        await asyncio.sleep(0)  # it has called
        threads._computer.submit(order.append, "idle").result(60)  # the thread has reported the end of the call
        await asyncio.sleep(0)
        order.append("next task")
        await task

    runner(work())
    assert order == ["computed", "idle", "continued", "next task"]


def test_a_call_returns_or_raises_what_its_function_does(runner: Callable[..., None]) -> None:
    name = contextvars.ContextVar("name", default="")

    def fail(error: BaseException) -> None:
        raise error

    async def work() -> None:
        name.set("of the caller")
        assert await in_thread(name.get) == "of the caller"
        raised = {ValueError("bad"): ValueError, SystemExit(3): SystemExit, StopIteration(): RuntimeError}
        for error, kind in raised.items():
            with pytest.raises(kind):
                await in_thread(fail, error)
        assert name.get() == "of the caller"

    runner(work())


def test_what_a_call_returned_or_raised_is_freed_with_its_last_reference(runner: Callable[..., None]) -> None:
    class Made(Exception):
        pass

    def fail() -> None:
        raise Made

    async def work() -> None:
        gc.disable()
        try:
            returned = weakref.ref(await in_thread(Made))
            try:
                await in_thread(fail)
            except Made as error:
                raised = weakref.ref(error)
            async with asyncio.timeout(60):  # the pool's thread lets go of its call a moment later
                while returned() is not None or raised() is not None:  # noqa: ASYNC110 - nobody announces it
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()

    runner(work())


def test_a_thread_that_is_held_up_after_its_work_refers_to_no_argument(
    runner: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    ended = threads._End._ended

    def ended_and_held_up(self: threads._End, work: object) -> None:
        ended(self, work)  # type: ignore[arg-type]
        assert release.wait(60)

    monkeypatch.setattr(threads._End, "_ended", ended_and_held_up)

    class Rollout:
        pass

    async def work() -> None:
        rollout = Rollout()
        freed = weakref.ref(rollout)
        call = in_thread(repr, rollout)
        del rollout
        try:
            await call
            assert freed() is None
        finally:
            release.set()

    runner(work())


def test_calls_of_environments_that_hang_take_no_thread_from_others(runner: Callable[..., None]) -> None:
    async def work() -> None:
        executor = give_environments_threads(2)
        released = threading.Event()
        hanging = [asyncio.create_task(asyncio.to_thread(released.wait)) for _ in range(5)]
        try:
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(str, 1) == "1"
                assert await advantage_in_thread(str, 2) == "2"
        finally:
            released.set()
        assert await asyncio.gather(*hanging) == [True] * 5
        executor.shutdown()

    runner(work())


def test_a_cancelled_call_ends_at_once_and_its_function_goes_on(runner: Callable[..., None]) -> None:
    release, ended = threading.Event(), threading.Event()

    def function() -> None:
        assert release.wait(60)
        ended.set()

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await in_thread(function)
        assert not ended.is_set()
        release.set()
        await in_thread(ended.wait, 60)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    runner(work())


def test_a_call_that_is_cancelled_before_it_begins_is_not_made(runner: Callable[..., None]) -> None:
    release = threading.Event()
    made: list[int] = []

    async def work() -> None:
        before = asyncio.create_task(run_cpu_bound(release.wait, 60))
        queued = asyncio.create_task(run_cpu_bound(made.append, 1))
        await asyncio.sleep(0)
        queued.cancel()
        await asyncio.wait({queued})
        assert queued.cancelled()
        release.set()
        await before
        await run_cpu_bound(made.append, 2)

    runner(work())
    assert made == [2]


def test_calls_that_end_while_their_tasks_are_cancelled_harm_no_loop(runner: Callable[..., None]) -> None:
    generator = random.Random(0)

    def rest(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    async def work() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        for _ in range(20):
            waits = [generator.choice([0.0, 0.0001, 0.001]) for _ in range(20)]
            tasks = [asyncio.create_task(in_thread(rest, seconds)) for seconds in waits]
            await asyncio.sleep(generator.uniform(0, 0.001))
            for task in tasks[::2]:
                task.cancel()
            for task, seconds in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                assert task.cancelled() or task.result() == seconds
            assert not any(task.cancelled() for task in tasks[1::2])
        assert not errors

    runner(work())


@pytest.mark.parametrize("factory", LOOPS.values(), ids=LOOPS)
def test_a_call_that_outlives_its_loop_ends_quietly(
    factory: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    began, release = threading.Event(), threading.Event()

    def function() -> None:
        began.set()
        assert release.wait(60)

    async def until_begun() -> None:
        while not began.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)

    loop = factory()
    task = loop.create_task(run_cpu_bound(function))
    loop.run_until_complete(until_begun())
    loop.close()
    release.set()
    threads._computer.submit(lambda: None).result(60)  # the thread has reported the end of the call
    assert not caplog.records
    del task
