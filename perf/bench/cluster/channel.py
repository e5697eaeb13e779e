"""Measures channels between processes: records of 1 KB beside Ray's queue, and of 8 MB beside bare ZMQ.

    python -m perf.bench.cluster.channel [--quick | --full]

Without Ray (the extra `ray`) its rows are left out, and a line says so. Rates count from the first record that
arrives to the last. The bare sockets are a PUSH and a PULL over the same kind of address, with nothing stored, confirmed or
acknowledged. Rounds of all kinds alternate, and a ratio is the median of the rounds'.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from cluster.channel.config import ChannelConfig
from cluster.channel.consumer import ChannelConsumer
from cluster.channel.host import ChannelHost
from cluster.channel.producer import ChannelProducer
from perf.bench.command import Size, show
from perf.figures import Case, Figure

SMALL_BYTES, LARGE_BYTES = 1000, 8 * 2**20
CREDIT, LARGE_CREDIT = 256, 8
TIMEOUT_SECONDS = 120.0

_processes = multiprocessing.get_context("spawn")


def measure(size: Size) -> list[Case]:
    """Measures the case `cluster-channel`, in some 40 s; 10 s when quick; minutes in full."""
    rounds = size.pick(1, 3, 5)
    small, large = size.pick(5_000, 20_000, 50_000), size.pick(40, 100, 200)
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        root = Path(directory)
        kinds: dict[str, Callable[[Path], float]] = {
            "small": lambda place: _channel(place, small, _small(), CREDIT, own_host=True),
            "small, journal": lambda place: _channel(place, small, _small(), CREDIT, own_host=True, journal=True),
            "put": lambda place: _channel(place, small // 10, _small(), CREDIT, own_host=True, one_by_one=True),
            "bare": lambda place: _bare(place, large),
            "large": lambda place: _channel(place, large, _large(), LARGE_CREDIT, own_host=False),
            "large, own host": lambda place: _channel(place, large, _large(), LARGE_CREDIT, own_host=True),
            "large, journal": lambda place: _channel(
                place, large, _large(), LARGE_CREDIT, own_host=False, journal=True
            ),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds):
            for index, (kind, run) in enumerate(kinds.items()):
                place = root / f"{number}-{index}"
                place.mkdir()
                rates[kind].append(run(place))
    return [_case(rates, _ray(size.pick(500, 2_000, 5_000)))]


def _small() -> dict[str, Any]:
    return {"text": b"x" * SMALL_BYTES}


def _large() -> dict[str, Any]:
    return {"array": np.ones(LARGE_BYTES, np.uint8)}


def _channel(
    place: Path,
    count: int,
    record: dict[str, Any],
    credit: int,
    own_host: bool,
    journal: bool = False,
    one_by_one: bool = False,
) -> float:
    """Returns the records a second of one channel, whose producer is this process, and its host, too, unless it has its own."""
    config = ChannelConfig(
        name="bench", producers=("source",), capacity=2 * credit, directory=place / "journal" if journal else None
    )
    with (
        _child(_host, config, place) if own_host else _here(config, place),
        _child(_consume, config, place, count, credit) as consumer,
        ChannelProducer(config, place, "source", window=2 * credit).blocking as producer,
    ):
        for _ in range(count):
            if one_by_one:
                producer.put(record, timeout=TIMEOUT_SECONDS)
            else:
                producer.send(record, timeout=TIMEOUT_SECONDS)
        producer.end(TIMEOUT_SECONDS)
        return _answer(consumer)


@contextmanager
def _here(config: ChannelConfig, place: Path) -> Iterator[None]:
    with ChannelHost(config, place):
        yield


def _host(ours: Connection, config: ChannelConfig, place: Path) -> None:
    with ChannelHost(config, place):
        ours.send(0.0)
        ours.poll(None)


def _consume(ours: Connection, config: ChannelConfig, place: Path, count: int, credit: int) -> None:
    with ChannelConsumer(config, place, "sink", credit=credit) as consumer:
        ours.send(0.0)
        began = 0.0
        for item in consumer:
            began = began or time.perf_counter()
            item.acknowledge()
            if item.position == count - 1:
                ours.send((count - 1) / (time.perf_counter() - began))


def _bare(place: Path, count: int) -> float:
    """Returns the large records a second of a PUSH and a PULL."""
    address = f"ipc://{place}/bare"
    array = np.ones(LARGE_BYTES, np.uint8)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, _child(_pull, address, count) as puller:
        push.sndhwm = 2 * LARGE_CREDIT
        push.connect(address)
        for _ in range(count):
            push.send(array.data, copy=False)
        return _answer(puller)


def _pull(ours: Connection, address: str, count: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.rcvhwm = LARGE_CREDIT
        pull.bind(address)
        ours.send(0.0)
        pull.recv(copy=False)
        began = time.perf_counter()
        for _ in range(count - 1):
            pull.recv(copy=False)
        ours.send((count - 1) / (time.perf_counter() - began))


@contextmanager
def _child(function: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs `function` in a process of its own, and waits until it is ready; ends it by closing its pipe."""
    theirs, ours = _processes.Pipe()
    process = _processes.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        _answer(ours)
        yield ours
    finally:
        ours.close()
        process.join(TIMEOUT_SECONDS)


def _answer(connection: Connection) -> float:
    assert connection.poll(TIMEOUT_SECONDS), "a process of the bench does not answer"
    answer: float = connection.recv()
    return answer


def _ray(count: int) -> float | None:
    """Returns the records a second of Ray's queue; None without Ray."""
    if importlib.util.find_spec("ray") is None:
        print(
            "cluster-channel: Ray is not installed (the extra `ray`), so nothing is compared with it", file=sys.stderr
        )
        return None
    command = [sys.executable, "-m", "perf.bench.cluster.ray_queue", str(count), str(SMALL_BYTES)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    rate: float = json.loads(completed.stdout.splitlines()[-1])
    return rate


def _case(rates: dict[str, list[float]], ray: float | None) -> Case:
    median = {kind: statistics.median(values) for kind, values in rates.items()}
    megabytes = LARGE_BYTES / 1e6

    shares = {
        kind: tuple(ours / bare for ours, bare in zip(values, rates["bare"], strict=True))
        for kind, values in rates.items()
    }
    share = {kind: statistics.median(values) for kind, values in shares.items()}

    figures = [
        Figure("1 KB: records a second", median["small"], "/s"),
        Figure("1 KB, with a journal", median["small, journal"], "/s"),
        Figure("1 KB, each stored before the next is put", median["put"], "/s"),
    ]
    if ray is not None:
        figures += [
            Figure("1 KB through Ray's queue", ray, "/s"),
            Figure("1 KB: over Ray's queue", median["small"] / ray, "x", 10.0, "at least"),
            Figure("1 KB, with a journal: over Ray's queue", median["small, journal"] / ray, "x"),
        ]
    return Case(
        "cluster-channel",
        [
            *figures,
            Figure("8 MB through bare ZMQ", median["bare"] * megabytes, "MB/s"),
            Figure("8 MB, the host in the producer", median["large"] * megabytes, "MB/s"),
            Figure(
                "8 MB, the host in the producer: share of the bare rate",
                share["large"],
                "",
                0.6,
                "at least",
                rounds=shares["large"],
            ),
            Figure("8 MB, a host of its own: share of the bare rate", share["large, own host"], ""),
            Figure("8 MB, with a journal: share of the bare rate", share["large, journal"], ""),
        ],
    )


if __name__ == "__main__":
    show(measure)
