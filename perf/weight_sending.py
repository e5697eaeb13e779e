"""Measures what it costs to send a version's weights to a server: seconds, CPU seconds of both ends, and the sender's loop lag.

    python -m perf.weight_sending [--mib 1024] [--servers 1] [--nixl]

A file in shared memory goes by the orchestrator's own sender over loopback to processes that receive it as a server does
(`inference/plugin/receiving.py`), under uvicorn, and load nothing. With `--nixl` every other turn they read it themselves
(`inference/remote_memory/`); `UCX_TLS=tcp` keeps NIXL from what two machines do not have. The lag is that of a coroutine that
sleeps a millisecond, over and over, with a stall counted for as long as it lasts: while nothing is sent and while weights are, in
turns. CPU seconds include those of processes that were started for it. Once a turn as many bytes go through a bare socket into a
file in shared memory, which is the least that the kernel takes for it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from inference.base import Probe, WeightUpdate
from inference.clients.http_sessions import HttpSessions
from inference.clients.weight_sender import WeightSender
from inference.config import PoolConfig
from inference.loads import Claim
from inference.plugin.receiving import Receiver
from inference.plugin.socket_body import Connection, connection_of
from inference.sent_weights import MAX_OFFER_BYTES, OFFER_PATH, READ_PATH, SEND_PATH, Offer, Readable
from orchestrator.loop_health.lag import LagDistribution
from transport.files.atomic import STABLE
from transport.files.shared_memory import SHARED_MEMORY

TURNS = 3
IDLE_SECONDS = 3.0
START_SECONDS = 60.0
FREED_BYTES = 31 << 20
"""Once a block of nearly 32 MiB was freed, the C library keeps blocks of such sizes instead of returning each to the kernel. A
real server has freed larger ones by the time it is ready."""
SAMPLE_SECONDS = 0.001
BARE_BYTES = 4 << 20
"""What a bare socket is read and written by: as much as `Receiver` writes at a time."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--mib", type=int, default=1024, help="MiB of the weights; each end holds them in shared memory"
    )
    parser.add_argument("--servers", type=int, default=1, help="receiving processes, to which they go at once")
    parser.add_argument("--nixl", action="store_true", help="have servers read the weights every other turn")
    parser.add_argument("--receive", nargs=2, metavar=("MODEL", "DESCRIPTOR"), help=argparse.SUPPRESS)
    parser.add_argument("--receive-bare", nargs=2, metavar=("FILE", "DESCRIPTOR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive_bare:
        receive_bare(Path(arguments.receive_bare[0]), int(arguments.receive_bare[1]))
        return
    if arguments.receive:
        receive(Path(arguments.receive[0]), int(arguments.receive[1]))
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
        save_file({"weights": np.ones(arguments.mib << 18, np.float32)}, Path(memory) / "model.safetensors")
        (Path(memory) / STABLE).touch()
        Console(width=140).print(uvloop.run(measure(Path(memory), arguments.servers, arguments.nixl)))


def receive(model: Path, descriptor: int) -> None:
    """Receives weights at a socket that listens already, until it is killed."""
    bytearray(FREED_BYTES)
    receiver, app = Receiver(model), FastAPI()

    @app.post(OFFER_PATH)
    async def offer(request: Request) -> dict[str, object]:
        body = await request.body()
        assert len(body) <= MAX_OFFER_BYTES
        held, reads = await receiver.consider(Offer.decode(body))
        return {"holds": sorted(held), "reads": reads}

    @app.post(SEND_PATH)
    async def send(request: Request) -> float:
        began = cpu_seconds()
        _, received = await receiver.receive(request.stream(), connection_of(request.scope))
        taken = cpu_seconds() - began
        await asyncio.to_thread(received.remove)
        return taken

    @app.post(READ_PATH)
    async def read(request: Request) -> float:
        began = cpu_seconds()
        received = await receiver.read(Readable.decode(await request.body()))
        taken = cpu_seconds() - began
        await asyncio.to_thread(received.remove)
        return taken

    uvicorn.run(app, fd=descriptor, http=Connection, log_level="warning")


def receive_bare(path: Path, descriptor: int) -> None:
    """Writes all that a connected socket brings to a new file, and prints the CPU seconds that it took."""
    buffer, began = memoryview(bytearray(BARE_BYTES)), time.process_time()
    with socket.socket(fileno=descriptor) as connection, path.open("wb", buffering=0) as file:
        while held := connection.recv_into(buffer):
            file.write(buffer[:held])
    print(time.process_time() - began)


def send_bare(directory: Path) -> tuple[float, float, float]:
    """Returns the seconds of a bare socket for the weights, and the CPU seconds of its sender and its receiver. Blocks."""
    received = directory / "bare"
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    command = [sys.executable, "-m", "perf.weight_sending", "--receive-bare", str(received), str(receiver.fileno())]
    with (
        sender,
        receiver,
        (directory / "model.safetensors").open("rb") as file,
        subprocess.Popen(command, pass_fds=[receiver.fileno()], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        sender.sendall(file.read(BARE_BYTES))  # returns once the receiver has started and takes it
        began, cpu = time.perf_counter(), time.thread_time()
        sender.sendfile(file, offset=BARE_BYTES)
        sender.shutdown(socket.SHUT_WR)
        taken = float(process.stdout.read())
        figures = time.perf_counter() - began, time.thread_time() - cpu, taken
    assert received.stat().st_size == (directory / "model.safetensors").stat().st_size
    received.unlink()
    return figures


def cpu_seconds() -> float:
    """Returns those of this process, and of all that it has started and that have ended."""
    return time.process_time() + os.times().children_user + os.times().children_system


async def measure(directory: Path, servers: int, nixl: bool) -> Table:
    """Returns the table of all turns."""
    table = Table("turn", "seconds", "MB/s", "CPU s, sender", "CPU s, each server", "lag p50, ms", "p99", "max")
    nbytes = servers * (directory / "model.safetensors").stat().st_size
    with receivers(directory, servers) as urls:
        async with AsyncExitStack() as stack:
            senders: dict[str, list[WeightSender]] = {}
            for way in ("are sent", "are read by NIXL") if nixl else ("are sent",):
                setting: bool | Literal["nixl"] = "nixl" if way == "are read by NIXL" else True
                config = PoolConfig(send_weights=setting, connect_timeout_seconds=START_SECONDS)
                sessions = await stack.enter_async_context(HttpSessions(config))
                senders[way] = [sender for url in urls if (sender := sessions.weight_sender(url)) is not None]
                await send_to_all(senders[way], directory, 0)
            for turn in range(1, TURNS + 1):
                lags = asyncio.create_task(sample_lags())
                await asyncio.sleep(IDLE_SECONDS)
                lags.cancel()
                table.add_row(f"{turn}: nothing is sent", "", "", "", "", *await lags)
                elapsed, cpu, received = await asyncio.to_thread(send_bare, directory)
                one = nbytes / servers / elapsed / 1e6
                table.add_row(f"{turn}: a bare socket", f"{elapsed:.2f}", f"{one:.0f}", f"{cpu:.2f}", f"{received:.2f}")
                for way, those in senders.items():
                    lags = asyncio.create_task(sample_lags())
                    began, cpu = time.perf_counter(), cpu_seconds()
                    taken = await send_to_all(those, directory, turn)
                    elapsed, cpu = time.perf_counter() - began, cpu_seconds() - cpu
                    lags.cancel()
                    figures = f"{elapsed:.2f}", f"{nbytes / elapsed / 1e6:.0f}", f"{cpu:.2f}", f"{max(taken):.2f}"
                    table.add_row(f"{turn}: weights {way}", *figures, *await lags)
    return table


async def send_to_all(senders: list[WeightSender], directory: Path, version: int) -> list[float]:
    """Returns the CPU seconds that each server took."""
    update = WeightUpdate(version, directory, Probe(version, [1, 2], [0.0]), None)
    return [
        float(taken) for taken in await asyncio.gather(*(sender.send(update, Claim.of_process()) for sender in senders))
    ]


async def sample_lags() -> tuple[str, str, str]:
    """Returns median, 99th percentile and maximum of the loop's lag in milliseconds, once it is cancelled."""
    lags = [0.0]
    try:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(SAMPLE_SECONDS)
            lags.append(max(0.0, time.perf_counter() - began - SAMPLE_SECONDS))
    except asyncio.CancelledError:
        found = LagDistribution.of(lags, SAMPLE_SECONDS)
        return f"{1e3 * found.median:.2f}", f"{1e3 * found.p99:.1f}", f"{1e3 * found.max:.1f}"


@contextmanager
def receivers(model: Path, count: int) -> Iterator[list[str]]:
    """Yields the URLs of receiving processes, which are killed afterwards."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    command = [sys.executable, "-m", "perf.weight_sending", "--receive", str(model)]
    processes = [
        subprocess.Popen([*command, str(each.fileno())], pass_fds=[each.fileno()], env=os.environ) for each in sockets
    ]
    try:
        yield [f"http://127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for process, each in zip(processes, sockets, strict=True):
            process.kill()
            process.wait()
            each.close()


if __name__ == "__main__":
    main()
