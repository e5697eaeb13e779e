"""Measures calls from one worker's process to another's, beside those of an actor of Ray and a bare ZMQ echo, in one run.

    python -m perf.bench.cluster.calls [--quick | --full]

Rounds of each alternate, so that all meet the same machine. Without Ray (the extra `ray`) its rows are left out, and a line
says so.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import zmq

from cluster.calls.caller import Caller
from cluster.calls.group import RoleGroup
from cluster.calls.remote import remote
from cluster.calls.server import CallServer
from cluster.calls.server_socket import call_address
from cluster.member import Member, Stage
from perf.bench.command import Size, show
from perf.figures import Case, Figure

ROUNDS = 5
BULK_BYTES = 8 * 2**20
_WAIT_SECONDS = 120.0


class Echo:
    """The callee."""

    @remote
    def echo(self, value: object) -> object:
        """Returns what it is given."""
        return value


class Ours:
    """Calls through a `RoleGroup`."""

    def __init__(self, group: RoleGroup) -> None:
        self._group = group

    def latency(self, count: int, value: object = 1) -> list[float]:
        """Returns the seconds of each of so many calls, one after the other."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._group.call("echo", value).result()
            seconds.append(time.perf_counter() - began)
        return seconds

    async def awaited(self, count: int) -> list[float]:
        """Returns likewise those of awaited calls."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            await self._group.call("echo", 1)
            seconds.append(time.perf_counter() - began)
        return seconds

    def rate(self, count: int) -> float:
        """Returns the seconds of so many calls that are made before the first answer is taken."""
        began = time.perf_counter()
        for call in [self._group.call("echo", index) for index in range(count)]:
            call.result()
        return time.perf_counter() - began


class Rays:
    """Calls to an actor of Ray, by the process of `ray_calls.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, line: str = "") -> object:
        """Returns the answer to a line; without one, what the process says first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def measure(size: Size) -> list[Case]:
    """Measures the case `cluster-calls`, in some 20 s, 10 s of which Ray takes to start."""
    calls, bulk, rate = size.pick((100, 4, 500), (600, 10, 2000), (3000, 40, 4000))
    ours: dict[str, list[float]] = {"latency": [], "awaited": [], "bulk": [], "rate": [], "bare": []}
    rays: dict[str, list[float]] = {"latency": [], "bulk": [], "rate": []}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-bench-")))
        echo, bare = Ours(stack.enter_context(_group(directory))), stack.enter_context(_bare_zmq(directory))
        ray = stack.enter_context(_ray())
        array = np.zeros(BULK_BYTES, np.uint8)
        for index in range(ROUNDS + 1):
            found = {
                "latency": echo.latency(calls),
                "awaited": asyncio.run(echo.awaited(calls)),
                "bulk": echo.latency(bulk, array),
                "rate": [rate / echo.rate(rate)],
                "bare": _bare_latency(bare, calls),
            }
            if ray is not None:
                for name, line in (("latency", f"latency {calls}"), ("bulk", f"bulk {bulk} {BULK_BYTES}")):
                    answer = ray.ask(line)
                    assert isinstance(answer, list)
                    rays[name] += answer if index else []
                seconds = ray.ask(f"rate {rate}")
                assert isinstance(seconds, float)
                rays["rate"] += [rate / seconds] if index else []
            for name, values in found.items():
                ours[name] += values if index else []  # the first round warms up
    return [Case("cluster-calls", _figures(ours, rays if ray is not None else None))]


def _figures(ours: dict[str, list[float]], rays: dict[str, list[float]] | None) -> list[Figure]:
    latency, bare = statistics.median(ours["latency"]), statistics.median(ours["bare"])
    bulk, rate = statistics.median(ours["bulk"]), statistics.median(ours["rate"])
    figures = [
        Figure("a call, p50", 1e6 * latency, "us"),
        Figure("a call, p99", 1e6 * float(np.quantile(ours["latency"], 0.99)), "us"),
        Figure("an awaited call, p50", 1e6 * statistics.median(ours["awaited"]), "us"),
        Figure("a call with 8 MB there and back, p50", 1e3 * bulk, "ms"),
        Figure("calls at once", rate, "/s"),
        Figure("a bare ZMQ echo, p50", 1e6 * bare, "us"),
        Figure("a call over a bare ZMQ echo, p50", latency / bare, "x", 10.0),
    ]
    if rays is None:
        return figures
    ray_latency, ray_bulk = statistics.median(rays["latency"]), statistics.median(rays["bulk"])
    ray_rate = statistics.median(rays["rate"])
    return [
        *figures,
        Figure("a Ray actor's call, p50", 1e6 * ray_latency, "us"),
        Figure("a Ray actor's call, p99", 1e6 * float(np.quantile(rays["latency"], 0.99)), "us"),
        Figure("a Ray actor's call with 8 MB, p50", 1e3 * ray_bulk, "ms"),
        Figure("a Ray actor's calls at once", ray_rate, "/s"),
        Figure("a call over a Ray actor's, p50", latency / ray_latency, "x", 1.0, slack=1.5),
        Figure("8 MB over a Ray actor's, p50", bulk / ray_bulk, "x"),
        Figure("calls at once over a Ray actor's", rate / ray_rate, "x"),
    ]


@contextmanager
def _child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python process until the block ends, and its input with it."""
    command = [sys.executable, "-P", "-m", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_WAIT_SECONDS)
        finally:
            process.kill()


@contextmanager
def _group(directory: Path) -> Iterator[RoleGroup]:
    address = call_address(directory, "echo-0")
    with _child("perf.bench.cluster.calls", "callee", address) as process, Caller() as caller:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == address
        caller.update([Member("echo-0", 1, Stage.RUNNING, address)])
        yield caller.group("echo")


@contextmanager
def _bare_zmq(directory: Path) -> Iterator[zmq.Socket[bytes]]:
    address = f"ipc://{directory}/bare"
    with _child("perf.bench.cluster.calls", "bare", address) as process, zmq.Context() as context:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == address
        with context.socket(zmq.DEALER) as socket:
            socket.linger, socket.rcvtimeo = 0, int(1000 * _WAIT_SECONDS)
            socket.connect(address)
            yield socket
            socket.send(b"end")
            socket.recv()


def _bare_latency(socket: zmq.Socket[bytes], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        socket.send(b"x" * 64)
        socket.recv()
        seconds.append(time.perf_counter() - began)
    return seconds


@contextmanager
def _ray() -> Iterator[Rays | None]:
    if importlib.util.find_spec("ray") is None:
        print("cluster-calls: Ray is not installed (the extra `ray`), so nothing is compared with it", file=sys.stderr)
        yield None
        return
    with _child("perf.bench.cluster.ray_calls") as process:
        rays = Rays(process)
        assert rays.ask() == "ready"
        yield rays


def _answer_calls(address: str) -> None:
    with CallServer(Echo(), "echo-0", 1, address):
        print(address, flush=True)
        sys.stdin.read()


def _answer_bare(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        print(address, flush=True)
        data = b""
        while data != b"end":
            peer, data = socket.recv_multipart()
            socket.send_multipart([peer, data])


if __name__ == "__main__":
    if sys.argv[1:2] == ["callee"]:
        _answer_calls(sys.argv[2])
    elif sys.argv[1:2] == ["bare"]:
        _answer_bare(sys.argv[2])
    else:
        show(measure)
