"""Claims a server's port among the servers of one machine, from the check of the port until the server has ended.

Two processes may bind one port while neither listens, and vLLM listens half a minute after its start. So the port is claimed by
an abstract UNIX socket, whose name the kernel gives to one process at a time, in the network namespace that has the port, and
takes back however that process ends. Nothing is sent over it: the kernel tells who holds it. A job's command claims the ports of
its servers by other names, before they start and between two of their starts.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from counterpoint.transport.printable import shortened

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""

_PENDING = 128
"""Processes that may have asked for the holder: none of them is ever answered."""

_LONGEST_COMMAND = 300

Whose = Literal["server", "job"]
"""Who claims a port: a server, or the command of the job that it belongs to."""


@contextmanager
def claimed(host: str, port: int, whose: Whose = "server") -> Iterator[None]:
    """Holds the claim of a port during the block. Raises `OSError`, which names the holder, if another process has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(_name(port, whose))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise _taken(host, port, _holder(port, whose) or "another process") from None
        claim.listen(_PENDING)
        yield


def check_free(host: str, port: int) -> None:
    """Raises `OSError` if a server or a job's command claims the port, or nothing can listen there now."""
    if holder := _holder(port, "server") or _holder(port, "job"):
        raise _taken(host, port, holder)
    check_port(host, port)


def check_port(host: str, port: int) -> None:
    """Raises `OSError` if nothing can listen there now, as where another process does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot listen on {host}:{port}: {error.strerror}; stop what uses the port or set another one",
        ) from error


def _taken(host: str, port: int, holder: str) -> OSError:
    return OSError(
        errno.EADDRINUSE,
        f"cannot listen on {host}:{port}: {holder} has a server there, or starts one; end that, or set another port",
    )


def _name(port: int, whose: Whose) -> str:
    return f"\0counterpoint/{whose}/{port}"


def _holder(port: int, whose: Whose) -> str:
    """Describes the process that holds a claim; empty if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_name(port, whose))
        except BlockingIOError:  # too many have asked
            return "another process"
        except ConnectionRefusedError:
            return ""
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = int(_CREDENTIALS.unpack(credentials)[0])
    described = f"process {pid}"
    with suppress(OSError):  # it has just ended
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        described += f" ({shortened(' '.join(words).strip(), _LONGEST_COMMAND)})"
    with suppress(OSError):  # another user's
        described += f", in {os.readlink(f'/proc/{pid}/cwd')},"
    return described
