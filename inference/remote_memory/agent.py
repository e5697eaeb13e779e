"""What both ends of a transfer do with NIXL: open an agent, and register the memory of a file.

An agent is NIXL's end of a connection. Its metadata, some hundred bytes, says how to reach it and which memory it has registered.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from transport.process.imports import without_modules
from transport.process.launch import die_with_parent

MEMORY = "DRAM"
"""NIXL's name for the memory of the machine, as opposed to that of a GPU."""

_VARIABLES = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_",
    "LC_",
    "LANG",
    "PYTHON",
    "VIRTUAL_ENV",
    "UCX_",
    "NIXL_",
    "IBV_",
    "MLX",
    "RDMAV_",
)
"""How the names of environment variables begin that a program of a transfer gets."""


def is_installed() -> bool:
    """Returns whether this machine has NIXL."""
    return find_spec("nixl") is not None


def require_nixl() -> None:
    """Raises `ValueError` where `send_weights = "nixl"` is asked for and this machine lacks NIXL."""
    if not is_installed():
        raise ValueError('send_weights = "nixl": NIXL is not installed; pip install "counterpoint[nixl]", or set true')


def has_rdma() -> bool:
    """Returns whether this machine has an adapter for InfiniBand or RoCE that Linux knows."""
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def program(name: str, *arguments: str) -> list[str]:
    """Returns the command of a program of this package."""
    return [sys.executable, "-P", "-m", f"inference.remote_memory.{name}", *arguments]


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns those of a process's environment variables that a program of a transfer needs, without the job's secrets.

    Over TCP, whoever reaches the program's port may read all of its memory.
    """
    return {name: value for name, value in variables.items() if name.startswith(_VARIABLES)}


def begin() -> TextIO:
    """Prepares the process of a program; returns its standard output, for answers alone.

    What NIXL and UCX print goes to the standard error. The process dies with the thread that started it, even while it hangs in
    NIXL, and lives on when somebody presses Ctrl-C: its parent ends it.
    """
    die_with_parent(signal.SIGKILL, os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def open_agent() -> Any:
    """Returns an agent with a name that no other has, and without a thread of its own, which would spin for as long as it lives.

    Whoever has it looks at it regularly instead. NIXL is imported now; raises `ImportError` without it. It would import torch for
    two seconds, to ask which of its two builds for GPUs fits; for the memory of the machine either does. `UCX_*` of the
    environment are UCX's own settings.
    """
    os.environ.setdefault("UCX_TLS", "^cuda")
    with without_modules("torch", to=("nixl", "nixl_meta_utils", "nixl_cu12", "nixl_cu13")):
        from nixl import nixl_agent, nixl_agent_config
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class MappedFile:
    """A file in memory, registered with an agent."""

    def __init__(self, agent: Any, descriptor: int, nbytes: int, *, writable: bool) -> None:
        """Maps `nbytes` of the file. Raises `OSError`, and what NIXL raises."""
        import numpy as np

        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(descriptor, nbytes, prot=access)
        self.address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)
        """The address of its first byte, in this process."""
        agent.register_memory([(self.address, nbytes, 0, "")], MEMORY)
