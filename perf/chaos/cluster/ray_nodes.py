"""A Ray cluster on this machine whose nodes can be lost, and cut off: each is in a network of its own, behind a bridge.

`python -m ray.scripts.scripts start` makes the head, beside which the masters run, and each node. The network of this process is
made anew first (`unshare`), so neither bridge nor ports are seen by others, and the kernel removes all of it at the end. Whoever
may not do that runs the bench below `unshare --user --map-root-user --mount`. A cluster has a token of its own, without which
Ray answers nobody.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.transport.process.launch import descendants
from perf.chaos.cluster.audit import command_line

NODES = 3
PLACES = 5
"""Workers of a job that fit on a node: two nodes together hold all, no node does."""
PLACE = "chaos_place"
"""What a worker takes one of."""

_CLONE_NEWNET = 0x40000000
_NETWORK = "198.18.0"  # kept for benchmarks of networks (RFC 2544)
_PORT = 6379
_START_SECONDS = 60.0
_KILL_SECONDS = 20.0
_POLL_SECONDS = 0.1

_NODE = """
echo there && read -r _ && exec >&2 && ip link set lo up && ip address add {address}/24 dev eth0 && ip link set eth0 up &&
mount -t tmpfs tmpfs {files} && exec {start}
"""
"""A node in its namespaces: waits for its end of the cable, and keeps its files for itself, as another machine does."""

_LEFT = """
import json, sys, time, ray
from ray.util.placement_group import placement_group_table
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
began = time.monotonic()
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    assert time.monotonic() - began < float(sys.argv[3]), f"nodes are missing: {ray.nodes()}"
    time.sleep(0.1)
left = [f"actor {one['name']}" for one in ray.util.list_named_actors(all_namespaces=True)]
left += [f"group {one['name']}" for one in placement_group_table().values() if one["state"] != "REMOVED"]
print(json.dumps(left))
"""


class NoNetworkError(RuntimeError):
    """This process may not make a network of its own."""


@dataclass
class _Node:
    name: str
    number: int
    process: subprocess.Popen[bytes]
    network: int
    """The id of its network's namespace, by which its processes are known."""
    cut: bool = False


@dataclass
class RayNodes:
    """The cluster. Make it before this process has threads; `close` it."""

    files: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ccr-")))
    lost: int = 0
    """Nodes that ended and were replaced, whether by a fault or since Ray gave them up."""
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _made: int = 0
    _head: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Ray's address."""
        return f"{_NETWORK}.1:{_PORT}"

    def start(self) -> None:
        """Starts head and nodes, and waits for them. Raises `NoNetworkError`."""
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0 or shutil.which("ip") is None:
            raise NoNetworkError(
                "the nodes of Ray need networks of their own: run this as root, or below "
                "`unshare --user --map-root-user --mount`, with the program `ip` installed"
            )
        os.environ |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("address", "add", f"{_NETWORK}.1/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")
        head = [f"--port={_PORT}", "--num-cpus=0", f"--temp-dir={self.files}", "--include-dashboard=false"]
        with (self.files / "head.log").open("wb") as log:
            self._head = subprocess.Popen([*_start(f"{_NETWORK}.1"), "--head", *head], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while not (self.files / "ray_current_cluster").exists():
            if self._head.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the head of the Ray cluster did not start; see {self.files}/head.log")
            time.sleep(_POLL_SECONDS)
        for _ in range(NODES):
            self._add()

    @property
    def names(self) -> list[str]:
        """The nodes that run, except for the head."""
        return list(self._nodes)

    def processes(self, name: str) -> list[int]:
        """Returns all processes of a node."""
        return _in_network(self._nodes[name].network) if name in self._nodes else []

    def all_processes(self) -> list[int]:
        """Returns those of all nodes but the head."""
        return [pid for name in self._nodes for pid in self.processes(name)]

    def cut(self, name: str) -> None:
        """Pulls the cable of a node, which otherwise goes on."""
        _ip("link", "set", f"cable{self._nodes[name].number}", "down")
        self._nodes[name].cut = True

    def mend(self) -> None:
        """Plugs all cables in again."""
        for node in self._nodes.values():
            if node.cut and node.process.poll() is None:
                _ip("link", "set", f"cable{node.number}", "up")
            node.cut = False

    def replace_lost(self) -> list[int]:
        """Adds a node for each that has ended: killed, or given up by Ray. Returns what had to be killed there."""
        killed = []
        for node in list(self._nodes.values()):
            if node.process.poll() is not None:
                killed += _in_network(node.network)
                if left := self._end(node):
                    raise RuntimeError(f"processes of {node.name} cannot be killed: {left}")
                del self._nodes[node.name]
                self.lost += 1
                self._add()
        return killed

    def left(self) -> list[str]:
        """Returns the named actors and placement groups that are on Ray, once all nodes are there."""
        command = [sys.executable, "-c", _LEFT, self.address, str(NODES + 1), str(_START_SECONDS)]
        trouble = self.files / "left.log"
        with tempfile.TemporaryFile("w+") as said, trouble.open("w") as log:
            with subprocess.Popen(command, stdout=said, stderr=log) as asked:
                while asked.poll() is None:
                    self.replace_lost()
                    time.sleep(_POLL_SECONDS)
            said.seek(0)
            found = said.read()
        if asked.returncode != 0:
            raise RuntimeError(f"the Ray cluster does not answer: {trouble.read_text()[-3000:]}")
        return [str(name) for name in json.loads(found)]

    def close(self) -> list[int]:
        """Ends everything; returns the processes that cannot be ended."""
        left: list[int] = []
        for node in self._nodes.values():
            left += self._end(node)
        self._nodes.clear()
        if self._head is not None:
            below = descendants(self._head.pid)
            self._head.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._head.wait(20)
            left += _kill(lambda: [pid for pid in below if str(self.files) in command_line(pid)])
        shutil.rmtree(self.files, ignore_errors=True)
        return left

    def _add(self) -> None:
        self._made += 1
        number, name = self._made, f"node-{self._made}"
        address = f"{_NETWORK}.{2 + number % 250}"
        places = f"--resources={json.dumps({PLACE: PLACES})}"
        start = shlex.join([*_start(address), f"--address={self.address}", "--num-cpus=1", places])
        script = _NODE.format(address=address, files=self.files, start=start)
        with (self.files / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["unshare", "--net", "--mount", "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # from here on its network is its own
        _ip("link", "add", f"cable{number}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        _ip("link", "set", f"cable{number}", "master", "bridge", "up")
        network = os.stat(f"/proc/{process.pid}/ns/net").st_ino
        process.stdin.write(b"go\n")
        process.stdin.close()
        process.stdout.close()
        self._nodes[name] = _Node(name, number, process, network)

    def _end(self, node: _Node) -> list[int]:
        left = _kill(lambda: _in_network(node.network))
        node.process.wait()
        subprocess.run(["ip", "link", "delete", f"cable{node.number}"], check=False, capture_output=True)
        return left


def _start(address: str) -> list[str]:
    common = ["--disable-usage-stats", "--block", "--object-store-memory=80000000"]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address}", *common]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _in_network(network: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # it has ended
            if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino == network:
                found.append(int(entry))
    return found


def _kill(find: Callable[[], list[int]]) -> list[int]:
    """Kills what is found until nothing is; returns what cannot be killed."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (found := find()) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return find()
