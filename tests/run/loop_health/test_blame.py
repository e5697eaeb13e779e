"""The code that makes a loop late is found and named, whatever it does; on a busy machine not every time, but soon."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

import counterpoint.run.loop_health.blame
from counterpoint.run.loop_health.blame import LoopBlame, Slice, _slow_spot
from counterpoint.run.loop_health.blame_evidence import Evidence, Kind, shares
from counterpoint.run.loop_health.slow_spots import SlowSpot, culprits_first, merged, pool_name, slow_spots_of
from counterpoint.run.loop_health.stacks import NOWHERE, CodePlace, Stack, describe, place_of, stack_of
from counterpoint.run.loop_health.thread_clocks import Doing, ThreadClocks

THRESHOLD_SECONDS = 0.01
HELD_SECONDS = 0.04
DEADLINE_SECONDS = 60

NewLoop = Callable[[], asyncio.AbstractEventLoop]
both_loops = pytest.mark.parametrize(
    "new_event_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"]
)
NUMBERS = [1.5] * 1_000_000
TABLE = {str(index): [index] for index in range(20_000)}


def run_python() -> None:
    end = time.perf_counter() + HELD_SECONDS
    while time.perf_counter() < end:
        pass


def run_one_c_call() -> bytes:
    return orjson.dumps(NUMBERS)  # holds the GIL throughout


def wait_on_the_loop() -> None:
    time.sleep(HELD_SECONDS)


def call_a_library() -> str:
    return json.dumps(TABLE, indent=1)


async def a_task_that(block: Callable[[], object]) -> None:
    await asyncio.sleep(0)
    block()


def line_of(function: Callable[..., object], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


def first_slow_spot(new_event_loop: NewLoop, provoke: Callable[[], object], function: str, kind: Kind) -> SlowSpot:
    """Provokes it until it is seen. Now and then a moment goes to someone else who was on the machine just then."""

    async def provoke_until_seen() -> SlowSpot:
        others: set[str] = set()
        deadline = time.monotonic() + DEADLINE_SECONDS
        with LoopBlame(THRESHOLD_SECONDS) as blame:
            while time.monotonic() < deadline:
                await asyncio.sleep(THRESHOLD_SECONDS)
                result = provoke()
                if inspect.isawaitable(result):
                    await result
                await asyncio.sleep(2 * THRESHOLD_SECONDS)
                for slow_spot in blame.take().worst():
                    if slow_spot.place.function == function and slow_spot.kind is kind:
                        return slow_spot
                    others.add(str(slow_spot))
        raise AssertionError(f"not seen within {DEADLINE_SECONDS} s, but: {others}")

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(provoke_until_seen())


@both_loops
@pytest.mark.slow
def test_python_on_the_loop_is_named_with_its_task(new_event_loop: NewLoop) -> None:
    slow_spot = first_slow_spot(new_event_loop, lambda: a_task(run_python), "run_python", Kind.CALLBACK)
    assert slow_spot.place.file == "tests/run/loop_health/test_blame.py"
    assert line_of(run_python, "while") <= slow_spot.place.line <= line_of(run_python, "pass")
    assert slow_spot.callback == "a_task_that"
    assert slow_spot.count == 1
    assert slow_spot.worst == slow_spot.seconds > 0


def a_task(block: Callable[[], object]) -> asyncio.Task[None]:
    return asyncio.create_task(a_task_that(block))


@both_loops
@pytest.mark.slow
def test_a_c_call_that_holds_the_gil_is_named_by_its_line(new_event_loop: NewLoop) -> None:
    slow_spot = first_slow_spot(new_event_loop, run_one_c_call, "run_one_c_call", Kind.CALLBACK)
    assert slow_spot.place.line == line_of(run_one_c_call, "orjson.dumps")


@both_loops
@pytest.mark.slow
def test_a_wait_on_the_loop_is_told_from_work(new_event_loop: NewLoop) -> None:
    slow_spot = first_slow_spot(new_event_loop, wait_on_the_loop, "wait_on_the_loop", Kind.WAIT)
    assert slow_spot.place.line == line_of(wait_on_the_loop, "time.sleep")


@both_loops
@pytest.mark.slow
def test_another_thread_that_holds_the_gil_is_named(new_event_loop: NewLoop) -> None:
    def in_a_thread() -> None:
        threading.Thread(target=run_one_c_call, name="holder-12").start()

    slow_spot = first_slow_spot(new_event_loop, in_a_thread, "run_one_c_call", Kind.GIL)
    assert slow_spot.thread == "holder"
    assert slow_spot.place.line == line_of(run_one_c_call, "orjson.dumps")
    assert "thread 'holder' held the GIL in run_one_c_call" in str(slow_spot)


@pytest.mark.slow
def test_who_called_the_library_is_named_and_the_library_beside() -> None:
    slow_spot = first_slow_spot(uvloop.new_event_loop, call_a_library, "call_a_library", Kind.CALLBACK)
    assert "encode" in slow_spot.place.inside


@pytest.mark.slow
def test_without_proc_it_knows_less_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.run.loop_health.thread_clocks._ProcFile.read", lambda file: b"")
    first_slow_spot(uvloop.new_event_loop, run_one_c_call, "run_one_c_call", Kind.CALLBACK)
    first_slow_spot(uvloop.new_event_loop, wait_on_the_loop, "wait_on_the_loop", Kind.WAIT)
    monkeypatch.setattr("counterpoint.run.loop_health.thread_clocks._LINUX", False)
    first_slow_spot(uvloop.new_event_loop, wait_on_the_loop, "wait_on_the_loop", Kind.CALLBACK)


@pytest.mark.slow
async def test_a_place_is_logged_once_in_a_while_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    times = 0  # a moment whose clocks show work as well counts for that kind, too
    deadline = time.monotonic() + DEADLINE_SECONDS
    with LoopBlame(THRESHOLD_SECONDS) as blame:
        while times < 3 and time.monotonic() < deadline:
            await asyncio.sleep(THRESHOLD_SECONDS)
            wait_on_the_loop()
            await asyncio.sleep(2 * THRESHOLD_SECONDS)
            worst = blame.take().worst()
            times += sum(
                slow_spot.count
                for slow_spot in worst
                if slow_spot.place.function == "wait_on_the_loop" and slow_spot.kind is Kind.WAIT
            )
    said = [record.getMessage() for record in caplog.records if "waited in wait_on_the_loop" in record.getMessage()]
    assert times >= 3
    assert len(said) == 1
    assert "line: time.sleep(HELD_SECONDS)" in said[0]


@pytest.mark.slow
async def test_a_loop_that_does_not_come_back_is_reported_meanwhile(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterpoint.run.loop_health.blame, "_ANNOUNCED_AFTER_SECONDS", HELD_SECONDS)

    def reports() -> list[str]:
        return [text for record in caplog.records if "has not answered" in (text := record.getMessage())]

    def block_until_reported() -> str:
        caplog.clear()
        end = time.monotonic() + DEADLINE_SECONDS
        while not reports():
            assert time.monotonic() < end, "nothing was reported while the loop was blocked"
            time.sleep(0.001)
        return reports()[0]

    reported = ""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while "block_until_reported" not in reported:  # on a busy machine it may be that others had the CPU
        assert time.monotonic() < deadline, reported
        with LoopBlame(THRESHOLD_SECONDS):
            await asyncio.sleep(THRESHOLD_SECONDS)
            reported = block_until_reported()


async def test_an_empty_report_has_every_number() -> None:
    with LoopBlame(60.0) as blame:
        await asyncio.sleep(0)
        assert blame.take().metrics() == {
            "event_loop_late/n": 0,
            **{f"event_loop_late/{kind}": 0.0 for kind in Kind},
            "event_loop_blame": [],
        }


async def test_an_end_of_watching_does_not_look_healthy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(clocks: ThreadClocks, count: int) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(ThreadClocks, "watch", fail)
    with LoopBlame(THRESHOLD_SECONDS) as blame:
        blame._wake_watcher()
        # The loop must beat on: on a busy machine the watcher may have found it late, and waits for that.
        await asyncio.to_thread(blame._thread.join, DEADLINE_SECONDS)
        assert "event_loop_late/n" not in blame.take().metrics()
        assert blame.take().metrics() == {"event_loop_blame": []}
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "no longer watched" in record.getMessage()
    assert record.exc_info is not None


# --- the evidence ---

LATE = 0.1
CALM = Evidence(LATE, True, loop_cpu=0.0, loop_delay=0.0, others_cpu=0.0, overslept=0.0, doing=None)


def evidence(**fields: Any) -> Evidence:
    values = {name: getattr(CALM, name) for name in CALM.__dataclass_fields__}
    return Evidence(**(values | fields))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (evidence(loop_cpu=0.1, overslept=0.09, doing=Doing.WANTING_GIL), Kind.CALLBACK),
        (evidence(loop_cpu=0.3, in_callback=False), Kind.CALLBACK),
        (evidence(loop_delay=0.1, others_cpu=0.1, doing=Doing.WANTING_GIL), Kind.MACHINE),
        (evidence(others_cpu=0.2, overslept=0.09, doing=Doing.WANTING_GIL), Kind.GIL),
        (evidence(others_cpu=0.09, overslept=0.02, doing=Doing.WANTING_GIL), Kind.GIL),
        (evidence(others_cpu=0.09, overslept=0.09, in_callback=False, doing=Doing.BLOCKED), Kind.MACHINE),
        (evidence(others_cpu=0.2, overslept=0.09), Kind.GIL),
        (evidence(doing=Doing.BLOCKED), Kind.WAIT),
        (evidence(others_cpu=0.09, doing=Doing.BLOCKED), Kind.WAIT),
        (evidence(doing=Doing.RUNNING), Kind.MACHINE),
        (evidence(overslept=0.09, doing=Doing.WANTING_GIL), Kind.MACHINE),
        (evidence(others_cpu=0.09), Kind.WAIT),
        (evidence(in_callback=False), Kind.UNKNOWN),
        (evidence(loop_cpu=None, loop_delay=None), Kind.CALLBACK),
        (evidence(loop_cpu=None, loop_delay=None, in_callback=False), Kind.UNKNOWN),
    ],
)
def test_what_the_clocks_show(seen: Evidence, expected: Kind) -> None:
    assert shares(seen) == {expected: pytest.approx(LATE)}


def test_a_holder_of_the_gil_is_not_blamed_for_the_time_that_it_had_no_cpu() -> None:
    seen = evidence(others_cpu=0.03, overslept=0.1, doing=Doing.WANTING_GIL)
    assert shares(seen) == pytest.approx({Kind.GIL: 0.03, Kind.MACHINE: 0.07})


def test_a_moment_may_have_several_reasons() -> None:
    seen = evidence(loop_cpu=0.04, loop_delay=0.03, others_cpu=0.03, overslept=0.03, doing=Doing.WANTING_GIL)
    parts = {Kind.CALLBACK: 0.04, Kind.MACHINE: 0.03, Kind.GIL: 0.03}
    assert shares(seen) == pytest.approx(parts)


def test_a_callback_that_had_little_of_a_long_moment_is_named() -> None:
    seen = replace(evidence(loop_cpu=0.1, loop_delay=2.9, doing=Doing.RUNNING), late=3.0)
    assert shares(seen) == pytest.approx({Kind.CALLBACK: 0.1, Kind.MACHINE: 2.9})
    assert shares(replace(seen, in_callback=False)) == pytest.approx({Kind.MACHINE: 3.0})
    assert shares(replace(seen, loop_cpu=0.001)) == pytest.approx({Kind.MACHINE: 3.0})


seconds = st.floats(0, 1000)


@pytest.mark.slow
@given(
    late=st.floats(1e-3, 100),
    clocks=st.tuples(st.none() | seconds, st.none() | seconds, seconds, seconds),
    in_callback=st.booleans(),
    doing=st.none() | st.sampled_from(Doing),
)
def test_the_time_is_given_out_once(
    late: float,
    clocks: tuple[float | None, float | None, float, float],
    in_callback: bool,
    doing: Doing | None,
) -> None:
    parts = shares(Evidence(late, in_callback, *clocks, doing))
    assert sum(parts.values()) == pytest.approx(late)
    assert all(part > 0 for part in parts.values())
    if not in_callback:
        assert Kind.WAIT not in parts


# --- threads ---


def test_threads_are_seen_at_what_they_do() -> None:
    go_on, started = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go_on.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    assert thread.native_id is not None
    clocks = ThreadClocks(thread.native_id)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while clocks.doing() not in (None, Doing.BLOCKED) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert clocks.doing() in (None, Doing.BLOCKED)
    finally:
        go_on.set()
        thread.join()
    while clocks.read().loop_cpu is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # Python's thread ends a moment before the kernel's
    assert clocks.read().loop_cpu is None
    assert clocks.read().loop_delay is None
    clocks.close()


# --- places and records ---


def inner(*, depth: int = 0) -> Any:
    return inner(depth=depth - 1) if depth else stack_of(inspect.currentframe())


def test_the_place_is_the_innermost_that_is_not_a_librarys() -> None:
    stack = inner()
    assert place_of(stack) == CodePlace("inner", "tests/run/loop_health/test_blame.py", line_of(inner, "return inner"))
    place = place_of(((json.dumps.__code__, 0), *stack))
    assert (place.function, place.inside) == ("inner", "dumps")
    assert place_of(((json.dumps.__code__, 0),)).function == "dumps"
    assert place_of(()) == NOWHERE


def test_a_deep_stack_is_shown_by_its_ends() -> None:
    text = describe(inner(depth=50))
    assert text.startswith("inner (tests/run/loop_health/test_blame.py:")
    assert " < ... < " in text
    assert len(text.split(" < ")) < 12


def slow_spot(function: str, seconds: float, kind: Kind = Kind.CALLBACK) -> SlowSpot:
    return SlowSpot(kind, CodePlace(function, "file.py", 3), seconds=seconds)


OURS = CodePlace("Chat._render", "environments/chat.py", 7, ours=True)


def test_who_can_be_named_is_named_first_and_the_user_before_us() -> None:
    machine, ours = SlowSpot(Kind.MACHINE, NOWHERE, seconds=1.7), SlowSpot(Kind.CALLBACK, OURS, seconds=0.6)
    users, trifle = slow_spot("users", 0.5), slow_spot("trifle", 0.1)
    assert culprits_first([trifle, machine, ours, users]) == [users, ours, machine, trifle]


def test_the_log_names_every_part_of_a_moment_on_a_busy_machine(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the machine had most of it, and where that has been said just before."""
    blame = LoopBlame(THRESHOLD_SECONDS)
    machine = Slice(1.7, Kind.MACHINE)
    blame._log([SlowSpot(Kind.MACHINE, NOWHERE, seconds=1.7)], [machine], 1.7, "was late by")
    caplog.clear()
    parts = [machine, Slice(1.3, Kind.CALLBACK, stack_of(inspect.currentframe()), task="rollout 7-3")]
    blame._log([_slow_spot(part) for part in parts], parts, 3.0, "was late by")
    (said,) = [record.getMessage() for record in caplog.records]
    own = said.index("1.300 s: the loop ran test_the_log_names_every_part_of_a_moment_on_a_busy_machine")
    assert own < said.index("1.700 s: the machine gave the CPU to others") < said.index("task: rollout 7-3")
    assert said.startswith("the event loop was late by 3.000 s")


def test_nobody_is_told_to_move_our_own_code(tmp_path: Path) -> None:
    own, others = place_of(stack_of_source(counterpoint.run.loop_health.blame.__file__)), place_of(inner())
    assert (own.ours, others.ours) == (True, False)
    assert not place_of(stack_of_source(str(tmp_path / "environments" / "mine.py"))).ours
    for kind in Kind:
        assert "thread" not in SlowSpot(kind, own).advice
        assert "report it" in SlowSpot(kind, own).advice
    assert "thread" in SlowSpot(Kind.CALLBACK, others).advice
    for place in (own, others):
        spot = SlowSpot(Kind.CALLBACK, place, seconds=1.0)
        assert SlowSpot.of_json(orjson.loads(orjson.dumps(spot.as_json()))) == spot
    older = {name: value for name, value in SlowSpot(Kind.CALLBACK, own).as_json().items() if name != "ours"}
    assert not SlowSpot.of_json(older).place.ours


def stack_of_source(file: str) -> Stack:
    """The stack of a function of that file."""
    found: dict[str, Any] = {}
    exec(compile("def here(): return frame()", file, "exec"), {"frame": inspect.currentframe}, found)
    return ((found["here"].__code__, 0),)


def test_slow_spots_add_up_by_place() -> None:
    moments = [merged([slow_spot("a", 0.1), slow_spot("b", 0.3), slow_spot("a", 0.1)]), merged([slow_spot("a", 0.4)])]
    lines = [{"event_loop_late/n": 1, "event_loop_blame": [each.as_json() for each in moment]} for moment in moments]
    slow_spots = slow_spots_of([*orjson.loads(orjson.dumps(lines)), {"step": 7}])
    assert slow_spots.moments == 2
    worst, other = slow_spots.worst()
    assert (worst.place.function, worst.count, worst.worst) == ("a", 2, 0.4)
    assert worst.seconds == pytest.approx(0.6)
    assert (other.place.function, other.count) == ("b", 1)
    assert slow_spots.metrics()["event_loop_late/callback"] == pytest.approx(0.9)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_words(kind: Kind) -> None:
    assert str(slow_spot("a", 0.1, kind))
    assert "file" not in str(SlowSpot(kind, NOWHERE))


def test_the_threads_of_a_pool_are_one() -> None:
    assert [pool_name(name) for name in ("environment_17", "holder-2", "MainThread")] == [
        "environment", "holder", "MainThread",
    ]  # fmt: skip
