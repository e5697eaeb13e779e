"""Calls to processes that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.server import call_address
from counterpoint.cluster.errors import ActorDied, ActorRestarting, CallTimeout
from counterpoint.cluster.member import Stage
from tests.cluster.calls.process import callee_process, member, until_no_thread_is_left
from tests.support.freezing import freeze
from tests.support.polling import wait_until

pytestmark = pytest.mark.slow

DEADLINE = 60.0

PATIENT, IMPATIENT = 30.0, 1.0
"""Seconds between heartbeats: so long that a busy machine is not taken for silence, or short enough to wait for."""


@pytest.fixture
def caller(request: pytest.FixtureRequest) -> Iterator[Caller]:
    with Caller(heartbeat_seconds=getattr(request, "param", PATIENT)) as caller:
        yield caller
    until_no_thread_is_left()


def answers(group: RoleGroup, rank: int = 0) -> bool:
    """Whether a call gets through; on a busy machine an impatient caller may lose its connection for a moment."""
    try:
        return bool(group.call("echo", 1, rank=rank).result(DEADLINE) == [1])
    except (ActorDied, ActorRestarting):
        return False


@pytest.fixture
def address(tmp_path: Path) -> str:
    return call_address(tmp_path, "callee-0")


def test_a_killed_process_ends_its_calls_and_the_next_incarnation_answers(caller: Caller, address: str) -> None:
    group = RoleGroup("callee", caller)
    with callee_process(address) as process:
        caller.update([member(address)])
        assert group.call("echo", 1).result(DEADLINE) == [1]
        call = group.call("wait")
        assert group.call("nap", 0.0).result(DEADLINE), "so the call before it has arrived"
        process.kill()
        with pytest.raises(ActorDied, match=r"callee-0 \(incarnation 1\) died or is silent"):
            call.result(DEADLINE)
        process.wait()
        with pytest.raises(ActorRestarting, match="the method was not sent"):
            group.call("echo", 2).result(DEADLINE)
    caller.update([member("", incarnation=2, stage=Stage.INIT)])
    with pytest.raises(CallTimeout, match=r"callee-0 \(INIT\)"):
        group.wait_until_callable(0.01)
    with callee_process(address, incarnation=2):
        caller.update([member(address, incarnation=2)])
        group.wait_until_callable(DEADLINE)
        assert group.call("identity").result(DEADLINE)[:2] == ["callee-0", 2]


def test_idempotent_calls_outlive_their_worker(caller: Caller, address: str) -> None:
    group = RoleGroup("callee", caller)
    with callee_process(address) as process:
        caller.update([member(address)])
        assert group.call("echo", 1).result(DEADLINE) == [1]
        in_flight = group.call("nap_again", 60.0)
        process.kill()
        process.wait()
    unsent = group.call_rank0("identity")
    with callee_process(address, incarnation=2):
        caller.update([member(address, incarnation=2)])
        assert unsent.result(DEADLINE)[:2] == ["callee-0", 2]
        assert not in_flight.done(), "it runs again"
        caller.update([])
        with pytest.raises(ActorDied, match="takes no calls any more"):
            in_flight.result(DEADLINE)


@pytest.mark.parametrize("caller", [IMPATIENT], indirect=True)
def test_an_idempotent_call_to_any_worker_goes_to_another(caller: Caller, tmp_path: Path) -> None:
    first, second = (call_address(tmp_path, f"callee-{rank}") for rank in range(2))
    group = RoleGroup("callee", caller)
    with callee_process(first) as doomed, callee_process(second, "callee-1"):
        caller.update([member(first), member(second, "callee-1")])
        for rank in range(2):
            wait_until(lambda rank=rank: answers(group, rank), "an answer")  # type: ignore[misc]
        freeze(doomed.pid)
        calls = [group.call("identity") for _ in range(4)]
        assert {call.result(DEADLINE)[0] for call in calls} == {"callee-1"}


@pytest.mark.parametrize("caller", [IMPATIENT], indirect=True)
def test_silence_ends_a_call_and_the_worker_that_goes_on_is_called_again(caller: Caller, address: str) -> None:
    group = RoleGroup("callee", caller)
    with callee_process(address) as process:
        caller.update([member(address)])
        wait_until(lambda: answers(group), "an answer")
        freeze(process.pid)
        with pytest.raises((ActorDied, ActorRestarting), match="callee-0"):
            group.call("echo", 2).result(DEADLINE)
        repeated = group.call("identity")
        os.kill(process.pid, signal.SIGCONT)
        assert repeated.result(DEADLINE) == ["callee-0", 1, process.pid]


@pytest.mark.parametrize("caller", [IMPATIENT], indirect=True)
def test_a_worker_that_cannot_be_reached_at_first_is_an_error_within_two_heartbeats(
    caller: Caller, address: str
) -> None:
    caller.update([member(address)])  # nothing listens there
    group = RoleGroup("callee", caller)
    with pytest.raises(ActorRestarting, match="does not answer"):
        group.call("echo").result(DEADLINE)
    with callee_process(address):
        wait_until(lambda: answers(group), "an answer")


async def test_awaiting_a_worker_that_dies_raises(caller: Caller, address: str) -> None:
    group = RoleGroup("callee", caller)
    with callee_process(address) as process:
        caller.update([member(address)])
        async with asyncio.timeout(DEADLINE):
            await group.call("nap", 0.0)
            calls = [group.call("nap", 60.0), group.call("wait")]
            await group.call("nap", 0.0)
            process.kill()
            for call in calls:
                with pytest.raises(ActorDied):
                    await call
