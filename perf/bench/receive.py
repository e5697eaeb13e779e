"""Measures receiving: 64 responses of 8 MB at once through the inference client, beside a bare socket read of the same bytes.

The client runs on uvloop, as in the daemon, and a real answer of the binary route, routed experts included, comes from
another process over loopback. The bare read is the fastest that one thread of Python can do: non-blocking sockets and
`recv_into` arrays that exist, mapped, before the clock starts. The client uses memory again to which no caller refers any
more; the bare read into new arrays shows the time that the kernel takes to clear their pages.

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
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

from inference.base import SamplingParameters
from inference.config import PoolConfig
from inference.pool.pool import InferencePool
from job.replay.lag_trace import INTERVAL_SECONDS, LagTrace
from orchestrator.loop_health.gc_tuning import freeze_gc, infrequent_gc
from orchestrator.loop_health.lag import LagDistribution
from perf.bench.command import Size, show
from perf.bench.servers import RAW_PATH, load_server
from perf.figures import Case, Figure

RESPONSES = 64
LAYERS, TOP_K = 48, 8
PROMPT_TOKENS = 512
COMPLETION_TOKENS = (8 << 20) // (LAYERS * TOP_K) - PROMPT_TOKENS
"""The tokens of a completion; their routing, with the prompt's, is some 8 MB."""
IDLE_SECONDS = 2.0
PAUSE_SECONDS = 0.02


def measure(size: Size) -> list[Case]:
    """Measures the case `receive`, in some 15 s; 20 s in full; 5 s when quick."""
    with load_server(layers=LAYERS, top_k=TOP_K) as url, infrequent_gc():
        return [uvloop.run(_receive(url, rounds=size.pick(5, 15, 25)))]


async def _receive(url: str, rounds: int) -> Case:
    """Measures rounds of one and the other in turn, so that other processes slow both."""
    pool = InferencePool(PoolConfig(urls=[url]), "model")
    await pool.start()
    response_bytes = await _call(pool, 0)
    await _one_round(pool)  # which connects
    bare = _BareReader(url, response_bytes)
    bare.one_round()
    bare_seconds: list[float] = []
    new_seconds: list[float] = []
    longest_calls: list[float] = []
    busy: list[list[float]] = []
    freeze_gc()
    async with LagTrace() as trace:
        with trace.span("idle"):
            await asyncio.sleep(IDLE_SECONDS)
        for _ in range(rounds):
            with trace.span("receive"):
                busy.append(await _busy_seconds(_one_round(pool)))
            await asyncio.sleep(PAUSE_SECONDS)  # The sample that a span held up is taken after it.
            bare_seconds.append(bare.one_round())
            longest_calls.append(bare.longest_call)
            new_seconds.append(bare.one_round(into_new=True))
            await asyncio.sleep(PAUSE_SECONDS)
    bare.close()
    await pool.close()
    idle, *spans = trace.spans
    seconds = [span.seconds for span in spans]
    return _case(
        response_bytes,
        seconds,
        bare_seconds,
        new_seconds,
        trace.distribution(idle),
        trace.distribution(*spans),
        [LagDistribution.of(each, INTERVAL_SECONDS) for each in busy],
        longest_calls,
    )


async def _one_round(pool: InferencePool) -> None:
    await asyncio.gather(*(_call(pool, index) for index in range(RESPONSES)))


async def _call(pool: InferencePool, index: int) -> int:
    """Returns the bytes of one response, which is freed here: to free all at once would take 10 ms, which is not the client's."""
    prompt = np.zeros(PROMPT_TOKENS, dtype=np.int32)
    turn = await pool.generate(prompt, SamplingParameters(1.0, COMPLETION_TOKENS, ()), affinity=str(index))
    arrays = (turn.completion_ids, turn.log_probabilities, turn.routed_experts)
    return sum(array.nbytes for array in arrays if array is not None)


async def _busy_seconds(work: Coroutine[Any, Any, None]) -> list[float]:
    """Runs `work`; returns the CPU seconds of this thread between any two wakings, a millisecond or more apart."""
    task = asyncio.ensure_future(work)
    busy = []
    last = time.thread_time()
    while not task.done():
        await asyncio.sleep(INTERVAL_SECONDS)
        now = time.thread_time()
        busy.append(now - last)
        last = now
    await task
    return busy


class _BareReader:
    """As many connections, bare sockets without asyncio or an HTTP client."""

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

    def one_round(self, into_new: bool = False) -> float:
        """Returns the seconds from the requests to the last byte, read into existing arrays or into new ones."""
        filled = [0] * RESPONSES
        missing = RESPONSES * self._length
        self.longest_call = 0.0
        started = time.perf_counter()
        arrays = self._arrays
        if into_new:
            arrays = [np.empty(self._length, dtype=np.uint8).data for _ in self._connections]
        for connection in self._connections:
            connection.sendall(f"GET {RAW_PATH}/{self._length} HTTP/1.1\r\n\r\n".encode())
        while missing:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                began = time.thread_time()
                count = key.fileobj.recv_into(arrays[key.data][filled[key.data] :])
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


def _case(
    response_bytes: int,
    seconds: list[float],
    bare_seconds: list[float],
    new_seconds: list[float],
    idle: LagDistribution,
    lag: LagDistribution,
    busy: list[LagDistribution],
    longest_calls: list[float],
) -> Case:
    rate, bare_rate, new_rate = (
        RESPONSES * response_bytes / 1e6 / statistics.median(each) for each in (seconds, bare_seconds, new_seconds)
    )
    shares, shares_of_new = (
        tuple(other / through for other, through in zip(others, seconds, strict=True))
        for others in (bare_seconds, new_seconds)
    )
    longest = tuple(1e3 * each.max for each in busy)
    return Case(
        "receive",
        [
            Figure("responses at once", RESPONSES, ""),
            Figure("one response", response_bytes / 1e6, "MB"),
            Figure("rate through the client", rate, "MB/s"),
            Figure("bare socket read, into arrays that exist", bare_rate, "MB/s"),
            Figure("bare socket read, into new arrays", new_rate, "MB/s"),
            Figure(
                "share of the bare rate, median round", statistics.median(shares), "", 0.7, "at least", rounds=shares
            ),
            Figure("the same of that into new arrays", statistics.median(shares_of_new), ""),
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
            Figure("bare socket read: longest call", 1e3 * max(longest_calls), "ms"),
            Figure("computed between two wakings: max", max(longest), "ms", 5.0),
            Figure("the same, median round", statistics.median(longest), "ms", 3.0, rounds=longest),
        ],
    )


if __name__ == "__main__":
    show(measure)
