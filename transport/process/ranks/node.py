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
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from ipaddress import ip_address

from counterpoint.transport.process.child import Child
from counterpoint.transport.process.notify import NotifySocket

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

AGENT = "counterpoint.transport.process.ranks.torch_agent"

NODE_RANK, RANKS_FAILURE = "X_NODE_RANK", "X_RANKS_FAILURE"
"""What the agent sends beside what ranks do: its number in the rendezvous, once that is complete, and why a rank failed."""


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
    """The child of one round. Start it from a thread that outlives it: the kernel ties its life to that thread.

    The agent and its ranks say how they fare by systemd's protocol, at an address of the round.
    """

    def __init__(self, order: RanksOrder, listener: socket.socket | None) -> None:
        """Starts it. `listener`: this node has the store, at that socket, which is closed here. Raises `OSError`."""
        self._notifications: NotifySocket | None = NotifySocket()
        self.order = replace(order, environment={**order.environment, "NOTIFY_SOCKET": self._notifications.address})
        self.said: dict[str, tuple[str, float]] = {}
        """The newest value of each assignment that was sent, and when that came; of `X_FAILURE` the first."""
        self.failure: str | None = None
        """Why a rank failed, once one did."""
        self.began = time.monotonic()
        self._lock = threading.Lock()
        """One thread may hear while another closes."""
        descriptors = () if listener is None else (listener.fileno(),)
        command = [sys.executable, "-P", "-m", AGENT, *map(str, descriptors)]
        try:
            given = json.dumps(asdict(self.order)).encode()
            self.child = Child("torch's elastic agent", command, given=given, pass_fds=descriptors)
        except OSError:
            self._notifications.close()
            raise
        finally:
            if listener is not None:
                listener.close()

    def fileno(self) -> int:
        """Returns the descriptor at which something is to be heard."""
        assert self._notifications is not None
        return self._notifications.fileno()

    def hear(self) -> list[dict[str, str]]:
        """Takes what was said, and returns it."""
        heard: list[dict[str, str]] = []
        with self._lock:
            while self._notifications is not None and (message := self._notifications.receive()) is not None:
                heard.append(message)
                for name, value in message.items():
                    if name != "X_FAILURE" or name not in self.said:
                        self.said[name] = value, time.monotonic()
        return heard

    def number(self, name: str) -> int | None:
        """Returns the number that was last sent by that name."""
        value, _ = self.said.get(name, ("", 0.0))
        return int(value[:18]) if value.isdecimal() else None

    @property
    def node_rank(self) -> int | None:
        """This node's, once the rendezvous is complete, and its ranks are being started: rank 0 is on that of number 0."""
        return self.number(NODE_RANK)

    @property
    def code(self) -> int | None:
        """The child's exit code; None while it runs."""
        return self.child.code

    @property
    def succeeded(self) -> bool:
        """Whether every rank of every node has succeeded."""
        return self.code == 0

    def poll(self) -> int | None:
        """Hears what was said; returns the child's exit code, None while it runs."""
        code = self.code  # before hearing: what it said last is there once it has ended
        self.hear()
        if code:
            unsaid = f"torch's agent ended with exit code {code}; its output tells more"
            self.failure = self.said.get(RANKS_FAILURE, (unsaid, 0.0))[0]
        return code

    def terminate(self) -> None:
        """Asks all ranks to end by SIGTERM; torch's agent kills them after `stop_seconds`."""
        self.child.signal(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """Asks all ranks to end, kills everything after `seconds`, and closes this."""
        if not self.child.stop(seconds):
            logger.warning("the ranks did not end within %.0f s of their SIGTERM and were killed", seconds)
        self.close()

    def close(self) -> None:
        """Kills what still runs, waits for it, and frees the address and the order's directory."""
        self.child.close()
        self.poll()
        with self._lock:
            notifications, self._notifications = self._notifications, None
        if notifications is not None:
            notifications.close()
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
