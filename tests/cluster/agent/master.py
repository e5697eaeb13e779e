"""A master for the tests: speaks to one agent by its protocol, and keeps what it reports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.agent.protocol import MESSAGES
from counterpoint.cluster.agent.remains import kill_marked, marked
from counterpoint.cluster.agent.settings import AgentEndpoint, AgentSettings
from counterpoint.cluster.agent.starting import lives, reap, start_agent
from tests.support.polling import wait_until

JOB = "job"


class Master:
    """One master of one agent. `heartbeats`: says HELLO while it waits."""

    def __init__(self, endpoint: AgentEndpoint, epoch: int = 1, lease_seconds: float = 10.0) -> None:
        self.endpoint, self.epoch, self.lease_seconds = endpoint, epoch, lease_seconds
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint.address)
        self.reports: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self.answers: list[dict[str, Any]] = []
        self.beats: list[dict[str, Any]] = []
        self.welcome: dict[str, Any] = {}
        self._commands = 0
        self._said_hello = 0.0

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def send(self, kind: str, **fields: Any) -> int:
        self._commands += 1
        self._socket.send(MESSAGES.pack({"kind": kind, "epoch": self.epoch, "id": self._commands, **fields}))
        return self._commands

    def hello(self, received: int = 0) -> None:
        self._said_hello = time.monotonic()
        fields = {"job": JOB, "lease_seconds": self.lease_seconds, "received": received}
        self._socket.send(MESSAGES.pack({"kind": protocol.HELLO, "epoch": self.epoch, **fields}))

    def read(self) -> None:
        while self._socket.poll(5):
            message = MESSAGES.unpack(self._socket.recv())
            match message["kind"]:
                case protocol.REPORT:
                    self.reports[message["number"]] = (message["event"], message["fields"])
                case protocol.BEAT:
                    self.beats.append(message)
                case protocol.WELCOME:
                    self.welcome = message
                case _:
                    self.answers.append(message)

    def wait(self, condition: Callable[[], object], what: str, heartbeats: bool = True) -> None:
        def holds() -> bool:
            if heartbeats and time.monotonic() - self._said_hello > self.lease_seconds / 4:
                self.hello(max(self.reports, default=0))
            self.read()
            return bool(condition())

        wait_until(holds, what, details=lambda: f"reports: {self.reports}\nanswers: {self.answers}")

    def command(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and returns its answer."""
        number = self.send(kind, **fields)
        self.wait(lambda: any(answer["id"] == number for answer in self.answers), f"the answer to {kind} {fields}")
        return next(answer for answer in self.answers if answer["id"] == number)

    def events(self, name: str, worker: str) -> list[Mapping[str, Any]]:
        return [fields for event, fields in self.reports.values() if event == name and fields.get("worker") == worker]

    def wait_for(self, name: str, worker: str, incarnation: int = 1) -> Mapping[str, Any]:
        """Returns the fields of a report once it is there."""

        def found() -> list[Mapping[str, Any]]:
            return [fields for fields in self.events(name, worker) if fields["incarnation"] == incarnation]

        self.wait(found, f"{name} of {worker} {incarnation}")
        return found()[0]


class Node:
    """An agent that a test starts, and what is left of it."""

    def __init__(self, directory: Path, lease_seconds: float = 60.0, agent: str = "a1", listen: str = "ipc") -> None:
        self.directory = directory
        self.settings = AgentSettings(
            agent=agent,
            job=JOB,
            node="node-0",
            name="n0",
            directory=directory / "agents",
            lease_seconds=lease_seconds,
            listen=listen,
        )
        self.endpoint = start_agent(self.settings)
        self._masters: list[Master] = []

    def master(self, epoch: int = 1, lease_seconds: float | None = None) -> Master:
        master = Master(self.endpoint, epoch, lease_seconds or self.settings.lease_seconds)
        self._masters.append(master)
        master.hello()
        return master

    def order(self, worker: str, code: str = "", incarnation: int = 1, **fields: Any) -> dict[str, Any]:
        """An order for a Python program, or with `description` for a class."""
        command = [sys.executable, "-c", code]
        if "description" in fields:
            command = [sys.executable, "-m", "counterpoint.cluster.worker_process"]
        log_file = str(self.directory / f"{worker}.log")
        own = {"worker": worker, "incarnation": incarnation, "bundle": worker, "command": command}
        return {**own, "environment": {}, "log_file": log_file, **fields}

    def log(self, worker: str) -> str:
        return (self.directory / f"{worker}.log").read_text()

    @property
    def processes(self) -> list[int]:
        """All that it has, itself included."""
        return marked(self.settings.mark)

    def ended(self) -> bool:
        reap(self.endpoint.pid)
        return not lives(self.endpoint)

    def close(self) -> None:
        for master in self._masters:
            master.close()
        left = kill_marked(self.settings.mark)
        wait_until(self.ended, "the agent's end")
        assert not left


@contextmanager
def running_node(directory: Path, lease_seconds: float = 60.0, listen: str = "ipc") -> Iterator[Node]:
    node = Node(directory, lease_seconds, listen=listen)
    try:
        yield node
    finally:
        node.close()
