"""Measures receiving: 64 responses of 8 MB at once through the inference client, beside a bare socket read of the same bytes.

The client runs on uvloop, as in the daemon, and a real answer of the binary route, routed experts included, comes from
another process over loopback. The bare read is the fastest that one thread of Python can do: non-blocking sockets and
`recv_into` arrays that exist, mapped, before the clock starts. The client uses memory again to which no caller refers any
more.

A callback of uvloop cannot be timed from outside. An upper bound is the CPU time of its thread between two wakings of a coroutine
that sleeps for a millisecond at a time: one callback or a hundred. Unlike the lag, it leaves out the time for which other
processes had the core. The longest of the median round is bound as well: on a virtual machine a single call of the bare read,
for half a megabyte, takes 6 to 33 ms of CPU in one round of sixty; the longest of this run's is shown.

    python -m perf.bench.receive [--quick | --full]
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.job.replay.lag_trace import INTERVAL_SECONDS, LagTrace
from counterpoint.run.loop_health.gc_tuning import freeze_gc, infrequent_gc
from counterpoint.run.loop_health.lag import LagDistribution
from perf.bench.command import Size, show
from perf.bench.servers import RAW_PATH, load_server
from perf.figures import Case, Figure
from perf.stalls import Stalls, recorded_stalls

RESPONSES = 64
LAYERS, TOP_K = 48, 8
PROMPT_TOKENS = 512
COMPLETION_TOKENS = (8 << 20) // (LAYERS * TOP_K) - PROMPT_TOKENS
"""The tokens of a completion; their routing, with the prompt's, is some 8 MB."""
IDLE_SECONDS = 2.0
PAUSE_SECONDS = 0.02


def measure(size: Size) -> list[Case]:
    """Measures the case `receive`, in some 15 s; 20 s in full; 5 s when quick."""
    with load_server(layers=LAYERS, top_k=TOP_K) as url, infrequent_gc(), recorded_stalls() as stalls:
        measured = uvloop.run(_receive(url, rounds=size.pick(5, 15, 25)))
    return [_case(measured).beside(_case(measured.less(stalls)), stalls)]


@dataclass(frozen=True, slots=True)
class Waking:
    """The time between two wakings of a coroutine that sleeps a millisecond at a time, in seconds of `time.perf_counter`."""

    begin: float
    end: float
    busy: float
    """CPU seconds of the loop's thread."""

    def less(self, stalls: Stalls) -> Waking:
        """Returns it with what it was busy less the time in which the machine stood still."""
        return replace(self, busy=max(0.0, self.busy - stalls.within(self.begin, self.end)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds of the client and of bare reads."""

    response_bytes: int
    trace: LagTrace
    """Its first span is idle, the others are rounds of the client."""
    wakings: Sequence[Sequence[Waking]]
    """Those of each round of the client."""
    bare_seconds: Sequence[float]
    """The duration of each bare round."""
    longest_calls: Sequence[float]
    """CPU seconds of the longest call of each bare round."""

    def less(self, stalls: Stalls) -> Measured:
        """Returns the same with lag and wakings less the times in which the machine stood still."""
        wakings = [[waking.less(stalls) for waking in each] for each in self.wakings]
        return replace(self, trace=self.trace.less(stalls.within), wakings=wakings)


async def _receive(url: str, rounds: int) -> Measured:
    """Measures rounds of one and the other in turn, so that other processes slow both."""
    pool = InferencePool(PoolConfig(urls=[url])).model("model")
    await pool.start()
    response_bytes = await _call(pool, 0)
    await _one_round(pool)  # which connects
    bare = _BareReader(url, response_bytes)
    bare.one_round()
    bare_seconds: list[float] = []
    longest_calls: list[float] = []
    wakings: list[list[Waking]] = []
    freeze_gc()
    async with LagTrace() as trace:
        with trace.span("idle"):
            await asyncio.sleep(IDLE_SECONDS)
        for _ in range(rounds):
            with trace.span("receive"):
                wakings.append(await _wakings(_one_round(pool)))
            await asyncio.sleep(PAUSE_SECONDS)  # The sample that a span held up is taken after it.
            bare_seconds.append(bare.one_round())
            longest_calls.append(bare.longest_call)
            await asyncio.sleep(PAUSE_SECONDS)
    bare.close()
    await pool.release()
    return Measured(response_bytes, trace, wakings, bare_seconds, longest_calls)


async def _one_round(pool: Served) -> None:
    await asyncio.gather(*(_call(pool, index) for index in range(RESPONSES)))


async def _call(pool: Served, index: int) -> int:
    """Returns the bytes of one response, which is freed here: to free all at once would take 10 ms, which is not the client's."""
    prompt = np.zeros(PROMPT_TOKENS, dtype=np.int32)
    turn = await pool.generate(
        prompt, SamplingParameters(temperature=1.0, max_tokens=COMPLETION_TOKENS), affinity=str(index)
    )
    arrays = (turn.completion_ids, turn.log_probabilities, turn.routed_experts)
    return sum(array.nbytes for array in arrays if array is not None)


async def _wakings(work: Coroutine[Any, Any, None]) -> list[Waking]:
    """Runs `work` beside a coroutine that wakes every millisecond or later; returns its wakings."""
    task = asyncio.ensure_future(work)
    wakings = []
    begin, before = time.perf_counter(), time.thread_time()
    while not task.done():
        await asyncio.sleep(INTERVAL_SECONDS)
        end, after = time.perf_counter(), time.thread_time()
        wakings.append(Waking(begin, end, after - before))
        begin, before = end, after
    await task
    return wakings


class _BareReader:
    """Reads as many connections by bare sockets, without asyncio or an HTTP client."""

    def __init__(self, url: str, length: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._length = length
        self._connections = [socket.create_connection((parts.hostname, parts.port or 80)) for _ in range(RESPONSES)]
        self._arrays = [np.zeros(length, dtype=np.uint8).data for _ in self._connections]
        self._selector = selectors.DefaultSelector()
        for index, connection in enumerate(self._connections):
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, index)
        self.longest_call = 0.0
        """CPU seconds of the longest call of the last round that read."""

    def one_round(self) -> float:
        """Returns the seconds from the requests to the last byte, read into arrays that exist."""
        filled = [0] * RESPONSES
        missing = RESPONSES * self._length
        self.longest_call = 0.0
        started = time.perf_counter()
        for connection in self._connections:
            connection.sendall(f"GET {RAW_PATH}/{self._length} HTTP/1.1\r\n\r\n".encode())
        while missing:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                began = time.thread_time()
                count = key.fileobj.recv_into(self._arrays[key.data][filled[key.data] :])
                self.longest_call = max(self.longest_call, time.thread_time() - began)
                assert count, "the server closed a connection"
                filled[key.data] += count
                missing -= count
        return time.perf_counter() - started

    def close(self) -> None:
        """Closes all connections."""
        self._selector.close()
        for connection in self._connections:
            connection.close()


def _case(measured: Measured) -> Case:
    idle_span, *spans = measured.trace.spans
    idle, lag = measured.trace.distribution(idle_span), measured.trace.distribution(*spans)
    seconds = [span.seconds for span in spans]
    rate, bare_rate = (
        RESPONSES * measured.response_bytes / 1e6 / statistics.median(each) for each in (seconds, measured.bare_seconds)
    )
    shares = tuple(other / through for other, through in zip(measured.bare_seconds, seconds, strict=True))
    busy = [LagDistribution.of((waking.busy for waking in each), INTERVAL_SECONDS) for each in measured.wakings]
    longest = tuple(1e3 * each.max for each in busy)
    return Case(
        "receive",
        [
            Figure("responses at once", RESPONSES, ""),
            Figure("one response", measured.response_bytes / 1e6, "MB"),
            Figure("rate through the client", rate, "MB/s"),
            Figure("bare socket read, into arrays that exist", bare_rate, "MB/s"),
            Figure(
                "share of the bare rate, median round", statistics.median(shares), "", 0.7, "at least", rounds=shares
            ),
            Figure("lag, idle: p99", 1e3 * idle.p99, "ms"),
            Figure("lag, idle: max", 1e3 * idle.max, "ms"),
            Figure("lag, receiving: p99", 1e3 * lag.p99, "ms"),
            Figure("lag, receiving: max", 1e3 * lag.max, "ms"),
            Figure("lag, receiving: max over a round", lag.max / statistics.median(seconds), "x", 0.3),
            Figure(
                "computed between two wakings: p99, median round",
                1e3 * statistics.median(each.p99 for each in busy),
                "ms",
            ),
            Figure("bare socket read: longest call", 1e3 * max(measured.longest_calls), "ms"),
            Figure("computed between two wakings: max", max(longest), "ms", 5.0),
            Figure("the same, median round", statistics.median(longest), "ms", 3.0, rounds=longest),
        ],
    )


if __name__ == "__main__":
    show(measure)
