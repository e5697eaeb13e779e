"""A worker that takes calls in a process of its own, so that it can be killed and stopped.

python -m tests.cluster.calls.process ADDRESS WORKER INCARNATION
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.calls.server import CallServer
from counterpoint.cluster.member import Member, Stage
from tests.support.polling import wait_until


class Callee:
    """What the tests call."""

    def __init__(self, name: str = "callee-0", incarnation: int = 1) -> None:
        self.name, self.incarnation = name, incarnation
        self.ran: list[Any] = []
        self.open = threading.Event()
        """Blocks `wait` until it is set."""

    @remote
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        self.ran.append(args)
        return [*args, kwargs] if kwargs else [*args]

    @remote(idempotent=True)
    def identity(self) -> list[Any]:
        self.ran.append("identity")
        return [self.name, self.incarnation, os.getpid()]

    @remote
    def wait(self, seconds: float = 60.0) -> bool:
        self.ran.append("wait")
        return self.open.wait(seconds)

    @remote
    def wait_unless(self, name: str) -> bool:
        if name == self.name:
            raise ValueError(name)
        return self.wait()

    @remote(idempotent=True)
    def wait_again(self, seconds: float = 60.0) -> bool:
        self.ran.append("wait_again")
        return self.open.wait(seconds)

    @remote
    async def nap(self, seconds: float) -> str:
        self.ran.append("nap")
        await asyncio.sleep(seconds)
        return "rested"

    @remote(idempotent=True)
    async def nap_again(self, seconds: float) -> str:
        return await self.nap(seconds)

    @remote
    def fail(self, message: str) -> None:
        raise LookupError(message)

    @remote
    def leave(self) -> None:
        sys.exit(3)

    @remote
    def unsendable(self) -> object:
        return {"module": [os]}

    @remote
    def double(self, items: Any, factor: int = 2) -> Any:
        self.ran.append(len(items))
        return items * factor if hasattr(items, "dtype") else [item * factor for item in items]

    @remote
    def is_list(self, items: Any) -> bool:
        return isinstance(items, list)

    def unmarked(self) -> None:
        raise AssertionError("nobody may call this")


@contextmanager
def callee_process(address: str, worker: str = "callee-0", incarnation: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Runs one; it has bound its address when the block begins, and has ended when that ends."""
    command = [sys.executable, "-P", "-m", "tests.cluster.calls.process", address, worker, str(incarnation)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == address
            yield process
        finally:
            process.kill()


def until_no_thread_is_left() -> None:
    """Waits for the end of all threads of callers and servers, which `close` waits for, too, but not for long."""

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("calls")]

    wait_until(lambda: not left(), "the end of all threads", details=lambda: str(left()))


def member(address: str, worker: str = "callee-0", incarnation: int = 1, stage: Stage = Stage.RUNNING) -> Member:
    return Member(worker, incarnation, stage, address)


def main() -> None:
    address, worker, incarnation = sys.argv[1:]
    callee = Callee(worker, int(incarnation))
    with CallServer(callee, worker, int(incarnation), address):
        print(address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
