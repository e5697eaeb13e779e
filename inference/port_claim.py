"""Claims a server's port among the servers of one machine, from the check of the port until the server has ended.

Two processes may bind one port while neither listens, and vLLM listens half a minute after its start. So the port is claimed by
an abstract UNIX socket, whose name the kernel gives to one process at a time, in the network namespace that has the port, and
takes back however that process ends. Nothing is sent over it: the kernel tells who holds it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from counterpoint.transport.printable import shortened

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""

_PENDING = 128
"""Processes that may have asked for the holder: none of them is ever answered."""

_LONGEST_COMMAND = 300


@contextmanager
def claimed(host: str, port: int) -> Iterator[None]:
    """Holds the claim of a port during the block. Raises `OSError`, which names the holder, if another process has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(_name(port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                errno.EADDRINUSE,
                f"cannot listen on {host}:{port}: {_holder(port) or 'another process'} has a server there, or starts one; end "
                "that, or set another port",
            ) from None
        claim.listen(_PENDING)
        yield


def is_claimed(port: int) -> bool:
    """Returns whether a process holds the claim of a port."""
    return bool(_holder(port))


def _name(port: int) -> str:
    return f"\0counterpoint/server/{port}"


def _holder(port: int) -> str:
    """Describes the process that holds a claim; empty if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_name(port))
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
