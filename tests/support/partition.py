"""A peer on another host, and the network between, which a test cuts and heals without a word to either end.

`Namespace` is a network namespace with a cable of its own, where the test runs as root and has iproute2 and nftables. What is
sent while it is cut is dropped, and no kernel acknowledges it. `Proxied` runs anywhere: a TCP proxy that forwards nothing while
it is cut and accepts nobody. The kernel of the proxy acknowledges what it holds.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol, TypeVar

import pytest

Made = TypeVar("Made")

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class Peer(Protocol):
    """Another host, until `close`."""

    host: str
    """The address at which what runs there listens."""

    def run(self, make: Callable[[], Made]) -> Made:
        """Calls `make` there: the sockets that it opens are that host's."""

    def reach(self, port: int) -> tuple[str, int]:
        """Returns address and port by which this process reaches `port` there."""

    def cut(self) -> None:
        """Lets nothing through, in either direction."""

    def heal(self) -> None:
        """Lets everything through again."""

    def close(self) -> None:
        """Ends the network."""


def lack_of_namespaces() -> str:
    """Returns why this process cannot make a `Namespace`; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [each for each in ("ip", "nft") if shutil.which(each) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2, nftables) are not installed"
    made = subprocess.run(["unshare", "--net", "nft", "list", "ruleset"], check=False, capture_output=True, text=True)
    return f"this machine makes no network namespaces: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def peer_by(kind: str) -> Iterator[Peer]:
    """Yields another host, `kind` of `KINDS`. Skips the test where this machine cannot make a namespace."""
    if kind == "namespace" and (reason := lack_of_namespaces()):
        pytest.skip(f"{reason}; the same is tested through a proxy")
    peer = KINDS[kind]()
    try:
        yield peer
    finally:
        peer.close()


def open_listener(host: str) -> socket.socket:
    """Returns a listening socket at a free port of `host`."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    return listener


class Namespace:
    """A `Peer` in a network namespace."""

    def __init__(self) -> None:
        number = next(_numbers)
        self._name = f"cp{os.getpid()}-{number}"
        cable = f"cp{os.getpid() % 10**7}.{number}"
        subnet = f"10.77.{os.getpid() % 251}.{4 * number % 252}"
        prefix, last = subnet.rsplit(".", 1)
        ours, self.host = f"{prefix}.{int(last) + 1}", f"{prefix}.{int(last) + 2}"
        _command("ip", "netns", "add", self._name)
        try:
            _command("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self._name)
            _command("ip", "address", "add", f"{ours}/30", "dev", cable)
            _command("ip", "link", "set", cable, "up")
            self._command("ip", "address", "add", f"{self.host}/30", "dev", "eth0")
            self._command("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def run(self, make: Callable[[], Made]) -> Made:
        """See `Peer`."""

        def enter() -> None:
            with open(f"/run/netns/{self._name}", "rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        with ThreadPoolExecutor(1, initializer=enter) as thread:  # which ends with it: no other call runs there
            return thread.submit(make).result()

    def reach(self, port: int) -> tuple[str, int]:
        """See `Peer`."""
        return self.host, port

    def cut(self) -> None:
        """See `Peer`."""
        chains = "".join(
            f"chain {each} {{ type filter hook {each} priority 0; policy drop; }}\n" for each in ("input", "output")
        )
        self._command("nft", "-f", "-", given=f"table inet cut {{\n{chains}}}\n")

    def heal(self) -> None:
        """See `Peer`."""
        self._command("nft", "delete", "table", "inet", "cut")

    def close(self) -> None:
        """See `Peer`."""
        _command("ip", "netns", "delete", self._name)  # its end of the cable goes with it, and so does ours

    def _command(self, *command: str, given: str = "") -> None:
        _command("ip", "netns", "exec", self._name, *command, given=given)


class Proxied:
    """A `Peer` on loopback, behind proxies that are cut together."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._proxies: list[_Proxy] = []

    def run(self, make: Callable[[], Made]) -> Made:
        """See `Peer`."""
        return make()

    def reach(self, port: int) -> tuple[str, int]:
        """See `Peer`."""
        self._proxies.append(proxy := _Proxy(port))
        return self.host, proxy.port

    def cut(self) -> None:
        """See `Peer`."""
        for proxy in self._proxies:
            proxy.cut()

    def heal(self) -> None:
        """See `Peer`."""
        for proxy in self._proxies:
            proxy.heal()

    def close(self) -> None:
        """See `Peer`."""
        for proxy in self._proxies:
            proxy.close()


class _Proxy:
    """Forwards connections to `port`, in a thread for each direction of each."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open = threading.Event()
        self._open.set()
        self._closed = False
        self._held = ExitStack()
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> None:
        self._open.clear()
        for _ in range(3):  # fills the backlog, so that the kernel drops whoever else comes
            filler = self._held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))

    def heal(self) -> None:
        self._held.close()
        self._open.set()

    def close(self) -> None:
        self._closed = True
        self.heal()
        self._accepting.join()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed:
            self._open.wait()
            if not select.select([self._listener], [], [], 0.05)[0] or not self._open.is_set():
                continue
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                continue  # either end has gone, or this is closed
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                self._open.wait()
                sink.sendall(piece)
        with suppress(OSError):
            self._open.wait()
            sink.shutdown(socket.SHUT_WR)


def _command(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


KINDS: dict[str, Callable[[], Peer]] = {"proxy": Proxied, "namespace": Namespace}
