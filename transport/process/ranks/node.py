"""Starts the ranks of one node as a child process that runs torch's elastic agent (`torch_agent`), and says how they fare.

The child runs under a guardian (`transport.process.launch`), so that no rank is left when it ends, or when this process dies.
This module does not import torch. An elastic worker (`counterpoint/cluster/elastic/elastic_worker.py`) uses it for each round; a
process that is alone on its node, as a job's trainer, uses `alone`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from typing import Any

from counterpoint.transport.process.child import Child

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

MAX_MESSAGES = 2**20
"""Most bytes that the child may send in all; what is beyond is ignored."""

LONGEST_REASON = 2000
"""Characters of a failure's reason."""


@dataclass(frozen=True, slots=True)
class RanksOrder:
    """What `torch_agent` is to run."""

    run_id: str
    """The rendezvous of that name, which every node of the round joins."""
    host: str
    port: int
    """The port at which its store listens."""
    nodes: int
    """How many nodes join."""
    local_ranks: int
    """How many ranks this node has."""
    command: tuple[str, ...]
    """Each rank's command; torchrun's variables tell it its rank."""
    directory: str
    """The directory where ranks may leave files that explain their failure."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to each rank's environment."""
    join_seconds: float = 120.0
    """How long the nodes may take to join."""
    stop_seconds: float = 30.0
    """How long ranks may take to end after SIGTERM."""
    exit_seconds: float = 300.0
    """How long this node's ranks, having succeeded, wait for those of the others."""


def python_command(script: str = "", module: str = "", arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the command that runs a script or a module. Raises `ValueError` unless exactly one is given."""
    if bool(script) == bool(module):
        raise ValueError(f"expected exactly one of script and module, not script = {script!r}, module = {module!r}")
    return (sys.executable, "-u", *((script,) if script else ("-m", module)), *arguments)


def listen(host: str = LOOPBACK) -> socket.socket:
    """Returns a socket that listens on a free port of this address alone, for a torch store.

    By itself, torch's store would listen on every interface. It asks nobody for a key, so beyond loopback the network must be
    trusted.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    listener.set_inheritable(False)
    return listener


def interfaces(host: str) -> dict[str, str]:
    """Returns the variables that keep gloo and NCCL on the loopback interface, if the store's address is there."""
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {}


class RanksProcess:
    """The child of one round. Start it from a thread that outlives it: the kernel ties its life to that thread."""

    def __init__(self, order: RanksOrder, listener: socket.socket | None) -> None:
        """Starts it. `listener`: this node has the store, at that socket, which is closed here. Raises `OSError`."""
        self.order = order
        self.joined = False
        """Whether the rendezvous is complete, and the ranks have been started."""
        self.node_rank: int | None = None
        """This node's, once it is complete: rank 0 is on that of number 0."""
        self.failure: str | None = None
        """Why a rank failed, once one did."""
        self.succeeded = False
        self._received = bytearray()
        self._lock = threading.Lock()
        """Guards what is received: one thread may look while another closes."""
        self._messages, write_end = os.pipe()
        os.set_blocking(self._messages, False)
        descriptors = [write_end] if listener is None else [write_end, listener.fileno()]
        command = [
            sys.executable,
            "-P",
            "-m",
            "counterpoint.transport.process.ranks.torch_agent",
            *map(str, descriptors),
        ]
        try:
            given = json.dumps(asdict(order)).encode()
            self.child = Child("torch's elastic agent", command, given=given, pass_fds=descriptors)
        except OSError:
            os.close(self._messages)
            raise
        finally:
            os.close(write_end)
            if listener is not None:
                listener.close()

    def poll(self) -> int | None:
        """Reads what the child said; returns its exit code, None while it runs. 0: every rank of every node succeeded."""
        code = self.child.code  # before reading: what it said last is there once it has ended
        with self._lock, suppress(BlockingIOError):
            while self._messages >= 0 and len(self._received) < MAX_MESSAGES:
                if not (data := os.read(self._messages, 65536)):
                    break
                self._received += data
        with self._lock:
            while b"\n" in self._received:
                line, _, self._received = self._received.partition(b"\n")
                self._take(json.loads(line))
        if code is not None and not self.succeeded and self.failure is None:
            self.failure = f"torch's agent ended with exit code {code}; its output tells more"
        return code

    def _take(self, message: dict[str, Any]) -> None:
        if "joined" in message:
            self.joined, self.node_rank = True, int(message["joined"])
        self.succeeded |= "succeeded" in message
        if "failed" in message and self.failure is None:
            self.failure = str(message["failed"])[:LONGEST_REASON]

    def terminate(self) -> None:
        """Asks all ranks to end by SIGTERM; torch's agent kills them after `stop_seconds`."""
        self.child.signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Asks all ranks to end, kills everything after `seconds`, and closes this."""
        if not self.child.stop(seconds):
            logger.warning("the ranks did not end within %.0f s of their SIGTERM and were killed", seconds)
        self.close()

    def close(self) -> None:
        """Kills what still runs, waits for it, and frees the descriptor and the order's directory."""
        self.child.close()
        self.poll()
        with self._lock:
            if self._messages >= 0:
                os.close(self._messages)
                self._messages = -1
        shutil.rmtree(self.order.directory, ignore_errors=True)


def alone(command: Sequence[str], local_ranks: int, environment: Mapping[str, str] | None = None) -> RanksProcess:
    """Starts ranks that have this node for themselves; their store listens on loopback only."""
    listener = listen()
    host, port = listener.getsockname()
    order = RanksOrder(
        run_id=f"alone-{os.getpid()}",
        host=host,
        port=port,
        nodes=1,
        local_ranks=local_ranks,
        command=tuple(command),
        directory=tempfile.mkdtemp(prefix="counterpoint-ranks-"),
        environment=interfaces(host) | dict(environment or {}),
    )
    return RanksProcess(order, listener)
