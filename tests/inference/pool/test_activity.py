"""What a server did is counted and timed: requests, loads, outages, restarts. Its spans are split at the end of a step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from counterpoint.inference.base import ServerFailure, ServerStatus
from counterpoint.inference.pool.activity import ServerActivity
from counterpoint.transport.records import Turn
from counterpoint.transport.telemetry.spans import Span
from tests.inference.pool.test_pool import generate, pool_of
from tests.support.fake_inference import FakeServer, weight_update

STATUS = ServerStatus("http://a", "serving", "", 3, 1, 8)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def times(spans: list[Span], name: str) -> list[tuple[float, float]]:
    return [(span.begin, span.end) for span in spans if span.name == name]


def described(activity: ServerActivity) -> dict[str, Any]:
    return activity.described(STATUS)


def test_a_server_is_busy_while_any_request_is_there() -> None:
    activity = ServerActivity("http://a", clock := Clock())
    first, second = ExitStack(), ExitStack()
    clock.now = 1.0
    first.enter_context(activity.request())
    clock.now = 2.0
    second.enter_context(activity.request())
    clock.now = 3.0
    first.close()
    clock.now = 4.0
    spans = activity.take_spans("one", 7)
    assert times(spans, "serve") == [(1.0, 4.0)], "split at the end of a step"
    assert {(span.role, span.run, span.step, span.attributes["server"]) for span in spans} == {
        ("inference", "one", 7, "http://a")
    }
    clock.now = 5.0
    second.close()
    clock.now = 9.0
    failed = ExitStack()
    failed.enter_context(activity.request())
    clock.now = 9.5
    assert not failed.__exit__(ServerFailure, ServerFailure(), None)
    assert times(activity.take_spans("one", 8), "serve") == [(4.0, 5.0), (9.0, 9.5)]
    assert activity.take_spans("one", 9) == []
    assert (described(activity)["requests"], described(activity)["failures"]) == (2, 1)


def test_outages_and_restarts_are_told_apart() -> None:
    activity = ServerActivity("http://a", clock := Clock())
    activity.went_out("it is not there yet", 0.0)
    clock.now = 2.0
    activity.serves("process 1")
    assert (described(activity)["outages"], described(activity)["restarts"]) == (0, 0), "it had not served before"
    clock.now = 5.0
    activity.went_out("connection refused", 4.5)
    activity.went_out("still refused", 4.5)
    clock.now = 6.0
    assert times(activity.take_spans("one", 1), "out") == [(0.0, 2.0), (5.0, 6.0)]
    clock.now = 7.0
    activity.serves("process 2")
    assert times(activity.take_spans("one", 2), "out") == [(6.0, 7.0)]
    activity.went_out("a slow check", 6.5)
    activity.serves("process 2")
    assert (described(activity)["outages"], described(activity)["restarts"]) == (2, 1)
    assert described(activity)["last_outage"] == {"time": 6.5, "reason": "a slow check"}


def test_cached_tokens_count_only_where_the_server_says_so() -> None:
    activity = ServerActivity("http://a", Clock())
    tokens = np.zeros(10, dtype=np.int32)
    for cached in (4, None):
        activity.generated(Turn(tokens, tokens[:2], np.zeros(2, dtype=np.float32), 0, "stop", cached_tokens=cached))
    assert [described(activity)[f"{name}_tokens"] for name in ("prompt", "cached", "cacheable", "completion")] == [
        20, 4, 10, 4,
    ]  # fmt: skip


async def test_a_pool_tells_what_its_servers_did() -> None:
    async with FakeServer() as one, FakeServer() as two, pool_of(one, two) as pool:
        await pool.update(weight_update(1))
        await generate(pool)
        spans = pool.take_spans("one", 1)
        fleet = pool.fleet()
    assert {span.attributes["server"] for span in spans if span.name == "load"} == {one.url, two.url}
    assert len([span for span in spans if span.name == "serve"]) == 1
    assert sum(server["requests"] for server in fleet["servers"]) == 1
    assert sum(server["completion_tokens"] for server in fleet["servers"]) > 0
    assert [(server["state"], server["version"]) for server in fleet["servers"]] == [("serving", 1)] * 2
    assert fleet["waiting"] == 0
    assert fleet["capacity"] > 0
