"""What both ends of a transfer do with NIXL: open an agent, and register the memory of a file.

An agent is NIXL's end of a connection. Its metadata, some hundred bytes, says how to reach it and which memory it has registered.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from transport.process.imports import without_modules

MEMORY = "DRAM"
"""NIXL's name for the memory of the machine, as opposed to that of a GPU."""


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


def own_output() -> TextIO:
    """Returns the standard output of this process for answers alone: what NIXL and UCX print goes to the standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def open_agent() -> Any:
    """Returns an agent with a name that no other has.

    NIXL is imported now; raises `ImportError` without it. It would import torch for two seconds, to ask which of its two builds
    for GPUs fits; for the memory of the machine either does. `UCX_*` of the environment are UCX's own settings.
    """
    os.environ.setdefault("UCX_TLS", "^cuda")
    with without_modules("torch"):
        from nixl import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))


class MappedFile:
    """A file in memory, registered with an agent."""

    def __init__(self, agent: Any, descriptor: int, nbytes: int, *, writable: bool) -> None:
        """Maps `nbytes` of the file. Raises `OSError`, and what NIXL raises."""
        import numpy as np

        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(descriptor, nbytes, prot=access)
        self.address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)
        """Of its first byte, in this process."""
        agent.register_memory([(self.address, nbytes, 0, "")], MEMORY)
