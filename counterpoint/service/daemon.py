"""The service's process: one uvloop loop, from its start to a signal.

It connects to the job's trainer and servers, takes up the records of the former process, and then answers clients. Its loop is
measured and blamed as an orchestrator's: `service/health.jsonl` in the job's directory has a line each `HEALTH_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import uvloop

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import InferenceError
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.run.config import LagConfig
from counterpoint.run.loop_health.gc_tuning import collect_as_memory_grows, freeze_gc, infrequent_gc
from counterpoint.run.loop_health.health import LoopMonitors
from counterpoint.run.loop_health.threads import prompt_switching
from counterpoint.service.config import ServiceConfig
from counterpoint.service.keys import check_access
from counterpoint.service.records.store import RecordStore
from counterpoint.service.samplers import Samplers
from counterpoint.service.tasks import Tasks
from counterpoint.service.tinker.app import Endpoints
from counterpoint.service.tinker.service import Service
from counterpoint.service.tinker.status import status_of, write_status
from counterpoint.service.tinker.weights.imports import check_adapters
from counterpoint.transport.files.rotated_lines import RotatedLines
from counterpoint.transport.http.listening import listening
from counterpoint.transport.loopback import host_in_url
from counterpoint.transport.process.notify import Heartbeat, notify
from counterpoint.transport.process.resident import resident_bytes
from counterpoint.transport.process.stop_requests import StopSignals, end_at_second_request
from counterpoint.transport.wires.open import open_connection

logger = logging.getLogger(__name__)

THREADS = 32
"""Threads for waits on the disk: one key's many writes must not take all of them."""

POLL_SECONDS = 0.2
"""The time between two looks for a stop request."""

HEALTH_SECONDS = 10.0
"""The time between two lines about the loop."""

MOST_HEALTH_BYTES = 4 * 2**20
"""The size at which the file of these lines is renamed, and a new one begins."""


def run(config: ServiceConfig, on_ready: Callable[[], None]) -> int:
    """Serves clients until SIGTERM or SIGINT, in the main thread. Calls `on_ready` once it answers requests.

    `config.model` is a directory. Returns the exit code: 1 without servers, else 0. Raises `UserError` for a wrong
    configuration.
    """
    keys = check_access(config)
    check_adapters(config.adapters, config.max_rank)
    with (
        StopSignals(end_at_second_request) as stop,
        infrequent_gc(),
        prompt_switching(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            runner.run(_serve(config, keys, on_ready, stop))
        except InferenceError as error:
            logger.error("%s", error)
            return 1
    return 0


async def _serve(
    config: ServiceConfig, keys: dict[bytes, str], on_ready: Callable[[], None], stop: StopSignals
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "service"))
    bounds = await asyncio.to_thread(read_bounds, Path(config.model))
    store = await asyncio.to_thread(RecordStore, config.output_dir / "service")
    connection = open_connection(config.transport, config.output_dir)
    claim = LoadClaim(
        await asyncio.to_thread(store.secret, "claim"), f"the service in {store.directory.absolute()}"[-200:]
    )
    pool, alone = InferencePool(config.inference), len(keys) <= 1
    samplers = Samplers(pool, config.model, bounds, config.max_samplers, claim, alone=alone)
    chat = await asyncio.to_thread(_chat, config.model)
    service = Service(
        config, store, connection, samplers, bounds.vocabulary, keys, chat, has_experts=bool(bounds.experts)
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(samplers.close)
        stack.push_async_callback(service.close)
        heartbeat = Heartbeat()
        starting = asyncio.create_task(samplers.start())
        while not (starting.done() or stop.count):
            heartbeat.beat()
            await asyncio.wait([starting], timeout=POLL_SECONDS)
        if stop.count:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        await starting
        freeze_gc()  # a pause before the loop is measured
        await stack.enter_async_context(_measured(store.directory / "health.jsonl", service))
        await service.start()
        app = (await asyncio.to_thread(Endpoints, service, keys)).app()
        port = await stack.enter_async_context(listening(app, config.host, config.port, None))
        url = f"http://{host_in_url(config.host)}:{port}"
        logger.info("the service for the Tinker SDK answers at %s", url)
        notify(f"STATUS={url}")
        on_ready()
        while not stop.count:
            heartbeat.beat()
            await asyncio.sleep(POLL_SECONDS)
        notify("STOPPING=1")


@asynccontextmanager
async def _measured(path: Path, service: Service) -> AsyncIterator[None]:
    """Measures the loop during the block, and writes the measurements as lines of a file."""
    health, lines = LoopMonitors(LagConfig()), RotatedLines(path, "lines about the loop", MOST_HEALTH_BYTES)

    async def write() -> None:
        counts = {"pending": service.results.pending, "resident_bytes": resident_bytes(), **service.replays.counts}
        await asyncio.to_thread(lines.append, [{"time": time.time(), **health.take_metrics(), **counts}])
        try:
            await asyncio.to_thread(write_status, status_of(service), service.store)
        except OSError as error:
            logger.warning("the page does not see how the service is: %s", error)

    async def at_times() -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await write()

    with health.blame:
        tasks = Tasks("the measuring of the loop")
        for work in (health.lag.run, at_times, partial(collect_as_memory_grows, health.rollout_counts)):
            tasks.keep(work)
        try:
            yield
        finally:
            await tasks.cancel()
            await write()


def _chat(model: str) -> Chat | None:
    try:
        return Chat(model)
    except ValueError as error:
        logger.info("OpenAI's and Anthropic's APIs are not served: %s", error)
        return None
