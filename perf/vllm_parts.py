"""What each private part of vLLM gains that our servers on a CPU replace (`docs/vllm_parts.md`).

    python -m perf.vllm_parts [PART ...]

For each part two servers run, one of them without it, and take turns at the same work. What is printed is the processor time that
they took, which other processes disturb least, once for each half of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from counterpoint.inference import wire
from counterpoint.inference.base import GenerateRequest, SamplingParameters
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import InferenceConfig, PoolConfig
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.sent_weights import SEND_PATH, WeightOffer
from counterpoint.inference.server import server_command, server_environment
from counterpoint.job.evaluation.server import free_port
from counterpoint.models.build import make_model
from counterpoint.transport.process.launch import descendants
from perf.noise import cpu_seconds

TURNS = 12
CALLS = 64
SENT_BYTES = 60 << 20


@dataclass(frozen=True)
class Server:
    """A running server of the tiny dense model."""

    url: str
    model: str
    process: int

    def seconds(self) -> dict[str, float]:
        """Returns the processor time of the API server and of the engine until now."""
        (engine,) = [each for each in descendants(self.process) if _comm(each).startswith("VLLM::Engine")]
        return {"API server": cpu_seconds(self.process), "engine": cpu_seconds(engine)}


def _comm(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text()


def _requests(server: Server, tokens: int) -> Iterator[GenerateRequest]:
    """Yields as many calls as are made at once, of different prompts."""
    sampling = SamplingParameters(temperature=1.0, max_tokens=tokens)
    for index in range(CALLS):
        yield GenerateRequest(server.model, np.arange(5 + index, 37 + index, dtype=np.int32), sampling)


async def calls(server: Server, client: BinaryClient, tokens: int) -> None:
    """Makes many calls at once."""
    await asyncio.gather(*(client.generate(each) for each in _requests(server, tokens)))


async def posts(server: Server, client: BinaryClient, tokens: int) -> None:
    """Makes the same calls, each by a connection of its own."""
    bodies = [wire.encode_request(each) for each in _requests(server, tokens)]
    media_type = "application/octet-stream"
    await asyncio.gather(*(client._http.post(wire.GENERATE_PATH, each, media_type) for each in bodies))


async def send(server: Server, client: BinaryClient) -> None:
    """Sends a body that is no model, as long as the server takes for a tiny one; it is refused once it has come."""
    offer = WeightOffer(1, None, LoadClaim("measured", "0" * 32), {"model.safetensors": SENT_BYTES})
    body = offer.preamble() + bytes(SENT_BYTES)
    async with aiohttp.ClientSession() as session, session.post(server.url + SEND_PATH, data=body) as answer:
        if answer.status != 422:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")


def _without_call_connection() -> None:
    from fastapi.responses import Response

    from counterpoint.inference.plugin import routes

    vars(routes)["take_calls"] = lambda *_: Response(status_code=HTTPStatus.NOT_IMPLEMENTED)


def _without_direct_route() -> None:
    from counterpoint.inference.plugin.calls.direct_route import DirectRoute

    async def pass_on(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    DirectRoute.__call__ = pass_on  # type: ignore[method-assign]


def _without_quick_imports() -> None:
    import gc

    from counterpoint.inference.plugin import program

    program.quick_imports = nullcontext
    gc.enable()


def _without_socket_body() -> None:
    from counterpoint.inference.plugin import routes

    vars(routes)["connection_of"] = lambda scope: None


def _without_import_beside() -> None:
    from counterpoint.inference.plugin import program

    serve = program._serve

    def serve_alone() -> None:
        from counterpoint.inference.plugin import forking_server  # within the quick imports

        forking_server.import_beside = lambda engines: threading.Thread()  # never started
        serve()

    program._serve = serve_alone


def _without_fork() -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


Work = Callable[[Server, BinaryClient], Awaitable[None]]

PARTS: dict[str, tuple[Callable[[], None] | str, Work | None]] = {
    "call_connection": (_without_call_connection, lambda server, client: calls(server, client, 8)),
    "direct_route": (_without_direct_route, lambda server, client: posts(server, client, 8)),
    "held_outputs": (
        "--scheduler-cls=vllm.v1.core.sched.scheduler.Scheduler",
        lambda server, client: calls(server, client, 64),
    ),
    "socket_body": (_without_socket_body, send),
    "forking_server": (_without_fork, None),
    "import_beside": (_without_import_beside, None),
    "quick_imports": (_without_quick_imports, None),
}
"""The parts by name: how a server does without one, and the work of a turn; None where it is a server's start."""


@asynccontextmanager
async def running(model: str, without: str | None) -> AsyncIterator[Server]:
    """Yields a server, without a part if one is named, once it is ready."""
    port = free_port("127.0.0.1", 0)
    config = InferenceConfig(model=model, port=port, dtype="float32", max_model_len=512, max_num_seqs=CALLS)
    command = server_command(config)
    if without is not None and isinstance(taken := PARTS[without][0], str):
        command.append(taken)
    elif without is not None:
        place = command.index("counterpoint.inference.plugin.program")
        command[place : place + 1] = ["perf.vllm_parts", "--serve-without", without]
    environment = server_environment(config) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    server = Server(f"http://127.0.0.1:{port}", model, process.pid)
    try:
        async with aiohttp.ClientSession() as session:
            while not await _is_ready(session, server.url):
                if process.returncode is not None:
                    raise RuntimeError(f"the server without {without} ended with {process.returncode}")
                await asyncio.sleep(0.1)
        yield server
    finally:
        process.terminate()
        await process.wait()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/health") as answer:
            return answer.status == HTTPStatus.OK
    except aiohttp.ClientConnectionError:
        return False


def compare(name: str, half: int, ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Prints the processor time with the part and without it."""
    for process, seconds in ours.items():
        print(
            f"{name:16} attempt {half + 1} {process:11} with {seconds:6.2f} s  without {theirs[process]:6.2f} s  "
            f"{theirs[process] / seconds if seconds else math.inf:5.2f} times as much"
        )


async def measure_start(model: str, name: str) -> None:
    """Starts servers in turns."""
    for half in range(2):
        taken = []
        for without in (None, name):
            began = time.monotonic()
            async with running(model, without) as server:
                taken.append({"both": sum(server.seconds().values()), "by a clock": time.monotonic() - began})
        compare(name, half, *taken)


async def measure_work(model: str, name: str, work: Work) -> None:
    """Lets two servers work in turns."""
    async with running(model, None) as ours, running(model, name) as theirs, HttpSessions(PoolConfig()) as sessions:
        servers = [(each, BinaryClient(each.url, sessions)) for each in (ours, theirs)]
        for server, client in servers:
            await work(server, client)
        for half in range(2):
            before = [server.seconds() for server, _ in servers]
            for turn in range(TURNS):
                for server, client in servers[:: 1 if turn % 2 else -1]:
                    await work(server, client)
            after = [server.seconds() for server, _ in servers]
            compare(
                name, half, *({key: new[key] - old[key] for key in new} for new, old in zip(after, before, strict=True))
            )


async def measure(model: str, names: Sequence[str]) -> None:
    """Measures each part."""
    for name in names:
        if (work := PARTS[name][1]) is None:
            await measure_start(model, name)
        else:
            await measure_work(model, name, work)


def main() -> None:
    """Measures, or is a server without a part."""
    if sys.argv[1:2] == ["--serve-without"]:
        without = PARTS[sys.argv[2]][0]
        assert not isinstance(without, str)
        del sys.argv[1:3]
        without()
        from counterpoint.inference.plugin import program

        program.main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)
    asyncio.run(measure(str(make_model("tiny-dense")), parts))


if __name__ == "__main__":
    main()
