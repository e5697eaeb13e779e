"""Calls over real sockets between a caller and servers in this process: results, errors, deadlines, groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.cluster.calls.call import Call
from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.server import CallServer, call_address
from counterpoint.cluster.errors import (
    ActorBusy,
    ActorDied,
    ActorRestarting,
    CallError,
    CallTimeout,
    NoSuchActor,
    RemoteError,
)
from counterpoint.cluster.member import Stage
from tests.cluster.calls.process import Callee, member, until_no_thread_is_left
from tests.support.polling import wait_until

DEADLINE = 60.0


class Fleet:
    """Three workers of the role `callee`, and a caller that knows them."""

    def __init__(self, directory: Path) -> None:
        self.callees = [Callee(f"callee-{rank}") for rank in range(3)]
        self.servers = [
            CallServer(callee, callee.name, 1, call_address(directory, callee.name)) for callee in self.callees
        ]
        self.members = [
            member(server.start(), callee.name) for server, callee in zip(self.servers, self.callees, strict=True)
        ]
        self.caller = Caller(heartbeat_seconds=30.0)
        self.caller.update(self.members)
        self.group: RoleGroup = RoleGroup("callee", self.caller)

    def close(self) -> None:
        for callee in self.callees:
            callee.open.set()
        self.caller.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()
    until_no_thread_is_left()


def test_a_call_returns_what_the_method_returned(fleet: Fleet) -> None:
    array = np.arange(100_000).reshape(100, 1000)
    answer = fleet.group.call("echo", {"a": (array,)}, None, key=b"x" * 5000).result(DEADLINE)
    assert np.array_equal(answer[0]["a"][0], array)
    assert answer[1:] == [None, {"key": b"x" * 5000}]


async def test_a_call_can_be_awaited_and_async_methods_run_side_by_side(fleet: Fleet) -> None:
    async with asyncio.timeout(DEADLINE):
        assert await fleet.group.call("echo", 1) == [1]
        naps = [fleet.group.call_rank0("nap", 0.05) for _ in range(20)]
        assert await asyncio.gather(*naps) == ["rested"] * 20
        assert await fleet.group.call_all("echo", 2) == [[2]] * 3


def test_calls_without_a_rank_go_round(fleet: Fleet) -> None:
    names = [fleet.group.call("identity").result(DEADLINE)[0] for _ in range(6)]
    assert sorted(names) == sorted(callee.name for callee in fleet.callees * 2)
    assert fleet.group.call("identity", rank=2).result(DEADLINE)[0] == "callee-2"
    assert [name for name, *_ in fleet.group.call_all("identity").result()] == ["callee-0", "callee-1", "callee-2"]
    assert len(fleet.group) == 3


def test_calls_made_before_the_connections_stand_go_round(tmp_path: Path) -> None:
    for _ in range(5):  # which connection stands first is up to the machine
        fleet = Fleet(tmp_path)
        try:
            calls = [fleet.group.call("identity") for _ in range(9)]
            names = [call.result(DEADLINE)[0] for call in calls]
            assert sorted(names) == sorted(callee.name for callee in fleet.callees * 3)
        finally:
            fleet.close()


def test_calls_to_one_worker_run_in_order(fleet: Fleet) -> None:
    calls = [fleet.group.call_rank0("echo", index) for index in range(500)]
    assert [call.result(DEADLINE) for call in calls] == [[index] for index in range(500)]
    assert fleet.callees[0].ran == [(index,) for index in range(500)]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10]),
        ([1], [2]),
        (np.arange(7), np.arange(7) * 2),
    ],
    ids=["list", "one", "array"],
)
def test_a_batch_is_split_and_joined_in_order(fleet: Fleet, items: Any, expected: Any) -> None:
    answer = fleet.group.call_batch("double", items).result()
    assert type(answer) is type(expected)
    assert np.array_equal(answer, expected)
    taken = sorted(count for callee in fleet.callees for count in callee.ran)
    assert sum(taken) == len(items)
    assert taken[-1] - taken[0] <= 1
    assert fleet.group.call_batch("double", [1, 2], factor=3).result() == [3, 6]


def test_what_a_method_raises_is_raised_at_the_caller(fleet: Fleet) -> None:
    with pytest.raises(RemoteError, match=r"callee-0 \(incarnation 1\) raised LookupError: 'nothing'") as raised:
        fleet.group.call_rank0("fail", "'nothing'").result(DEADLINE)
    assert raised.value.remote_type == "LookupError"
    assert "in fail" in raised.value.remote_traceback
    assert "server.py" not in raised.value.remote_traceback
    with pytest.raises(RemoteError) as long:
        fleet.group.call_rank0("fail", "x" * 1_000_000).result(DEADLINE)
    assert len(str(long.value)) < 3000
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        fleet.group.call_rank0("leave").result(DEADLINE)
    with pytest.raises(RemoteError, match=r"result\['module'\]\[0\]: a module cannot be sent"):
        fleet.group.call_rank0("unsendable").result(DEADLINE)
    with pytest.raises(RemoteError, match="TypeError"):
        fleet.group.call_rank0("fail").result(DEADLINE)
    assert fleet.group.call_rank0("echo", 1).result(DEADLINE) == [1], "the worker goes on"


@pytest.mark.parametrize("method", ["unmarked", "__init__", "nothing", "ran"])
def test_only_marked_methods_can_be_called(fleet: Fleet, method: str) -> None:
    with pytest.raises(RemoteError, match=r"marked are: double, echo, .*wait") as raised:
        fleet.group.call(method).result(DEADLINE)
    assert raised.value.remote_type == "AttributeError"


def test_an_argument_that_cannot_travel_is_named_at_once(fleet: Fleet) -> None:
    with pytest.raises(TypeError, match=r"args\[0\]\['config'\]: a module cannot be sent"):
        fleet.group.call("echo", {"config": threading})
    with pytest.raises(TypeError, match=r"kwargs\['x'\]"):
        fleet.group.call_all("echo", x=object())


def test_a_deadline_ends_a_call_and_what_waits_behind_it_never_runs(fleet: Fleet) -> None:
    blocking = fleet.group.call_rank0("wait")
    wait_until(lambda: fleet.callees[0].ran == ["wait"], "the call that blocks, whose thread may start late")

    def said_of_a_late_call() -> str:
        with pytest.raises(CallTimeout) as raised:
            fleet.group.call_rank0("echo", "late", timeout=0.01).result(DEADLINE)
        assert isinstance(raised.value, TimeoutError)
        return str(raised.value)

    # A busy machine may not even send one in its time.
    wait_until(lambda: "callee-0.echo: no answer within 0.01 s" in said_of_a_late_call(), "a late call that was sent")
    assert fleet.group.call_rank0("nap", 0.0).result(DEADLINE), "so the late call has arrived"
    time.sleep(0.02)  # and its deadline has passed there, too
    fleet.callees[0].open.set()
    assert blocking.result(DEADLINE)
    assert fleet.group.call_rank0("echo", "next").result(DEADLINE) == ["next"]
    assert fleet.callees[0].ran == ["wait", "nap", ("next",)]
    with pytest.raises(CallTimeout):
        fleet.group.call_rank0("nap", 60.0, timeout=0.01).result(DEADLINE)


def test_the_first_failure_of_several_calls_is_raised_at_once(fleet: Fleet) -> None:
    calls = fleet.group.call_all("wait_unless", "callee-1")
    with pytest.raises(RemoteError, match="callee-1"):
        calls.result()
    assert [call.done() for call in calls.each] == [False, True, False]
    for callee in fleet.callees:
        callee.open.set()
    assert [call.exception(DEADLINE) is None for call in calls.each] == [True, False, True]


def test_a_batch_that_does_not_fit_is_an_error(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        fleet.group.call_batch("double", [1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match=r"args\[0\] is a str"):
        fleet.group.call_batch("double", "ab")
    with pytest.raises(ValueError, match="empty"):
        fleet.group.call_batch("double", [])
    with pytest.raises(ValueError, match="result is a bool"):
        fleet.group.call_batch("is_list", [0]).result()


def test_a_cancelled_call_disturbs_nobody(fleet: Fleet) -> None:
    call = fleet.group.call_rank0("wait")
    assert call.cancel()
    fleet.callees[0].open.set()
    assert fleet.group.call_rank0("echo", 1).result(DEADLINE) == [1]


def test_a_role_without_workers_is_an_error(fleet: Fleet) -> None:
    nobody = RoleGroup("nobody", fleet.caller)
    with Caller() as early:
        unknown = RoleGroup("callee", early)
        for group, error in ((nobody, NoSuchActor), (unknown, ActorRestarting)):
            for calls in (group.call("echo"), group.call_rank0("echo"), group.call_all("echo")):
                with pytest.raises(error, match="the method was not sent"):
                    calls.result()
    with pytest.raises(CallTimeout, match="no worker of the role is known"):
        nobody.wait_until_callable(0.01)


def test_workers_that_start_leave_or_finish_are_told_apart(fleet: Fleet) -> None:
    starting, finished, running = fleet.members
    fleet.caller.update(
        [
            member("", starting.worker, 2, Stage.INIT),
            member("", finished.worker, 1, Stage.FINISH),
            running,
        ]
    )
    with pytest.raises(ActorRestarting, match=r"callee-0 \(incarnation 2\) takes no calls now: it is INIT"):
        fleet.group.call("echo", rank=0).result(DEADLINE)
    with pytest.raises(ActorDied, match="callee-1"):
        fleet.group.call("echo", rank=1).result(DEADLINE)
    assert {fleet.group.call("identity").result(DEADLINE)[0] for _ in range(5)} == {running.worker}
    with pytest.raises(CallTimeout, match=r"no calls: callee-0 \(INIT\)$"):
        fleet.group.wait_until_callable(0.01)
    assert [found.worker for found in fleet.group.members()] == [starting.worker, running.worker]
    fleet.caller.update([running])
    with pytest.raises(ActorDied, match="callee-0"):
        fleet.group.call("echo", rank=0).result(DEADLINE)


def test_a_call_in_flight_fails_when_its_worker_is_replaced(fleet: Fleet) -> None:
    calls = fleet.group.call_all("wait")
    wait_until(lambda: all(callee.ran for callee in fleet.callees), "the calls to run")
    fleet.caller.update([member("", "callee-0", 2, Stage.INIT), *fleet.members[1:]])
    with pytest.raises(ActorDied, match=r"callee-0 \(incarnation 1\).*nobody knows whether the method ran"):
        calls.result()
    fleet.caller.update(fleet.members)  # stale: it names the older incarnation
    with pytest.raises(ActorRestarting):
        fleet.group.call("echo", rank=0).result(DEADLINE)


def test_another_incarnation_at_the_address_refuses(fleet: Fleet) -> None:
    first = fleet.members[0]
    fleet.caller.update([member(first.address, first.worker, 7), *fleet.members[1:]])
    with pytest.raises(ActorRestarting, match="incarnation 1 of callee-0 answers"):
        fleet.group.call("echo", rank=0).result(DEADLINE)
    assert not fleet.callees[0].ran


def test_closing_ends_what_is_in_flight(fleet: Fleet) -> None:
    call = fleet.group.call_rank0("wait")
    fleet.caller.close()
    with pytest.raises(CallError, match="closed"):
        call.result(DEADLINE)
    with pytest.raises(CallError, match="closed"):
        fleet.group.call("echo")


def test_a_server_that_closes_ends_the_calls_to_it(fleet: Fleet) -> None:
    nap = fleet.group.call_rank0("nap", 60.0)
    wait_until(lambda: bool(fleet.callees[0].ran), "the call to run")
    fleet.servers[0].close()
    with pytest.raises(ActorDied):
        nap.result(DEADLINE)


@pytest.mark.parametrize("method", ["echo", "identity"])
def test_a_rank_or_a_role_that_the_job_does_not_have_is_said_at_once(fleet: Fleet, method: str) -> None:
    with pytest.raises(NoSuchActor, match=r"callee-99.*callee-0, callee-1, callee-2"):
        fleet.group.call(method, rank=99).result(DEADLINE)
    with pytest.raises(NoSuchActor, match=r"role caller.*callee"):
        RoleGroup("caller", fleet.caller).call(method).result(DEADLINE)


@pytest.mark.slow
def test_a_method_that_hangs_is_named_and_costs_no_other_caller_its_deadline(fleet: Fleet) -> None:
    hung = _one_that_hangs(fleet)
    behind = fleet.group.call_rank0("echo", 1, timeout=DEADLINE)
    with pytest.raises(CallTimeout):
        hung.result(DEADLINE)
    for call in (behind, fleet.group.call("identity", rank=0, timeout=DEADLINE)):
        with pytest.raises(
            ActorBusy, match=r"callee-0 \(incarnation 1\) is busy: `wait` still runs.*process\.py|threading\.py"
        ):
            call.result(DEADLINE)
    assert fleet.group.call_rank0("nap", 0.0).result(DEADLINE) == "rested", "async methods have a thread of their own"
    names = {fleet.group.call("identity").result(DEADLINE)[0] for _ in range(6)}
    assert names == {"callee-1", "callee-2"}, "a call that any worker may take goes to another"
    fleet.callees[0].open.set()
    wait_until(lambda: _answers(fleet), "the method's end")
    assert "identity" not in fleet.callees[0].ran[:-1], "what was refused did not run"


def _one_that_hangs(fleet: Fleet) -> Call[Any]:
    """A call whose method has begun; where the machine was busy, its deadline passed before, and the next one is tried."""
    while True:
        call = fleet.group.call_rank0("wait", timeout=0.2)
        wait_until(lambda: bool(fleet.callees[0].ran) or call.done(), "the method's beginning")  # noqa: B023
        if fleet.callees[0].ran:
            return call


def _answers(fleet: Fleet) -> bool:
    try:
        return bool(fleet.group.call("identity", rank=0).result(DEADLINE))
    except ActorBusy:
        return False
