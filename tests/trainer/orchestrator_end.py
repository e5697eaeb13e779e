"""The other end of the wire for tests: a trainer in a real process, and a link that feeds it batches as an orchestrator does."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import orjson
import tomli_w

from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.messages import Acknowledged, Commit, Hello, Offer, Ready, ToOrchestrator
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.link import TrainerLink
from counterpoint.transport.wires.open import open_link
from tests.support.polling import DEADLINE_SECONDS

sys.path.append(str(Path(__file__).parents[2]))  # each trainer imports this module by its name, and gets our path
processes = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Has torch and transformers, whose import takes seconds, imported once: in the server that each trainer is forked from.

    A process has one such server, which imports only what was named before it started. So the one of other tests is ended.
    """
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    processes.set_forkserver_preload(["counterpoint.trainer.rank_process", "transformers.models.auto.modeling_auto"])


def _main(config_json: str, log: str, ready: Connection, largest_file: int | None) -> None:
    from counterpoint.trainer.launch import run

    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    sys.exit(run(TrainerConfig.model_validate_json(config_json), lambda: ready.send_bytes(b"READY")))


def write_run(config: RunConfig) -> None:
    """`control/orch.toml`, as the orchestrator writes it: younger than those of other runs, also within one tick of the clock."""
    control = config.run_dir / "control"
    control.mkdir(parents=True, exist_ok=True)
    others = [file.stat().st_mtime_ns for file in config.output_dir.glob("run_*/control/orch.toml")]
    changed = max([time.time_ns(), *(other + 1 for other in others)])
    written = control / "orch.toml.new"
    written.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    os.utime(written, ns=(changed, changed))
    written.replace(control / "orch.toml")  # a running trainer may look


@contextmanager
def trainer_process(config: TrainerConfig, largest_file: int | None = None) -> Iterator[ForkServerProcess]:
    """A trainer in a process of its own, past `on_ready` or ended; killed at the end if it still runs. It cannot write files
    of more than `largest_file` bytes."""
    config.output_dir.mkdir(parents=True, exist_ok=True)
    receiver, sender = processes.Pipe(duplex=False)
    arguments = (config.model_dump_json(), str(log_path(config)), sender, largest_file)
    process = processes.Process(target=_main, args=arguments)
    process.start()
    sender.close()
    try:
        assert wait([receiver, process.sentinel], DEADLINE_SECONDS), "the trainer is neither ready nor ended"
        yield process
    finally:
        process.kill()
        process.join()
        receiver.close()


def log_path(config: TrainerConfig) -> Path:
    """Where the process's log goes."""
    return config.output_dir / "trainer.log"


class Feeder:
    """Sends batches and keeps the trainer's messages."""

    def __init__(self, link: TrainerLink) -> None:
        self.link = link
        self.ready: Ready | None = None
        self.durable = 0
        self.acknowledged: list[int] = []
        self.received: list[ToOrchestrator] = []

    async def until(self, kind: type[ToOrchestrator], **expected: Any) -> ToOrchestrator:
        """The next message of `kind` whose fields are as expected; those before it are only noted."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                message = await self.link.receive()
                self.received.append(message)
                if isinstance(message, Ready):
                    self.ready = message
                if isinstance(message, Acknowledged):
                    self.acknowledged.append(message.step)
                    self.durable = max(self.durable, message.durable)
                if isinstance(message, kind) and all(
                    getattr(message, name) == value for name, value in expected.items()
                ):
                    return message

    async def send(self, batch: Batch) -> None:
        """Sends a batch that is committed."""
        assert self.ready is not None, "wait for READY first"
        await self.link.send(Commit(batch.step, self.ready.session))
        await self.link.send(Offer(batch, self.ready.session))

    async def train(self, *batches: Batch) -> None:
        """Sends batches and waits until the last is acknowledged."""
        for batch in batches:
            await self.send(batch)
        await self.until(Acknowledged, step=batches[-1].step)


@asynccontextmanager
async def feeder(
    config: TrainerConfig, run_id: str = "default", link: TrainerLink | None = None, epoch: int = 0
) -> AsyncIterator[Feeder]:
    """A connected feeder; leaves with `BYE`. `link` is of a connection that it shares."""
    link = link or open_link(config.transport, config.output_dir)
    await link.start(Hello(run_id, 0, epoch, f"holder of epoch {epoch}" if epoch else ""))
    try:
        yield Feeder(link)
    finally:
        await link.close()


async def ended(process: ForkServerProcess) -> int:
    """The exit code of the process."""
    await asyncio.to_thread(process.join, DEADLINE_SECONDS)
    assert process.exitcode is not None, "the trainer does not end"
    return process.exitcode


def send_signal(process: ForkServerProcess, number: signal.Signals) -> None:
    """Sends a signal to a process that still runs."""
    assert process.pid is not None
    os.kill(process.pid, number)


def metrics_lines(output_dir: Path) -> list[dict[str, Any]]:
    """What is in `trainer/metrics.jsonl`."""
    path = output_dir / "trainer" / "metrics.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def read_probe(output_dir: Path, version: int, run_id: str = "default") -> dict[str, Any]:
    """A broadcast's probe."""
    path = output_dir / f"run_{run_id}" / "broadcast" / f"step_{version}" / "probe.json"
    probe: dict[str, Any] = json.loads(path.read_text())
    return probe
