"""The checks of one node: compute, memory bandwidth, and a collective with another node; in a child process with deadlines.

`python -m counterpoint.cluster.elastic.node_check` is the child: it reads one JSON object a line, and answers each with one.
`CheckProcess` is its parent's end, which kills a child that does not answer, and does not import torch. The child stays for a
whole check, since starting torch takes seconds, and ends with it, since it may hold memory of an accelerator.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from subprocess import PIPE
from typing import Any

from counterpoint.transport.process.child import Child, ChildError
from counterpoint.transport.process.imports import without_gc
from counterpoint.transport.process.ranks.node import interfaces, listen

MATRIX = 512
"""Rows and columns of the matrices that are multiplied, in float32."""

COPY_BYTES = 32 * 2**20
"""The bytes that are copied: more than the caches of a core hold, so that memory is measured."""

COLLECTIVE_BYTES = 4 * 2**20
"""Bytes that a pair adds up."""

REPEATS = 5
"""The best of so many counts: on a shared machine one may be disturbed."""


class CheckError(Exception):
    """A check failed; the message says what was found."""


class CheckProcess:
    """The child, started when it is first needed. Use it from one thread, which outlives it; `abort` from any."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command or [sys.executable, "-P", "-m", "counterpoint.cluster.elastic.node_check"]
        self._child: Child | None = None
        self._aborted = False

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the child's answer; raises `CheckError` if there is none in time, or the check failed."""
        try:
            if self._aborted:
                raise ChildError("the check's process is not to start")
            self._child = self._child or Child("the check's process", self._command, stdin=PIPE, stdout=PIPE)
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._child.line(seconds, lambda: self._aborted))
        except (ChildError, OSError) as error:
            self.close()
            why = "the worker is being stopped" if self._aborted else f"{error}; its output tells more"
            raise CheckError(why) from None
        if "error" in answer:
            raise CheckError(str(answer["error"]))
        return answer

    def abort(self) -> None:
        """Makes this and every later `ask` fail soon. May be called from any thread."""
        self._aborted = True

    def close(self) -> None:
        """Kills the child, if there is one, and waits for it."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


# --- the child ---


def _best_seconds(work: Callable[[], object], finish: Callable[[], object]) -> float:
    """Returns the duration of the fastest repetition, after one that does not count."""
    durations = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        finish()
        durations.append(time.perf_counter() - began)
    return min(durations[1:])


def measure() -> dict[str, float]:
    """Returns rates of this node; of several accelerators, that of the slowest.

    `compute` in floating-point operations a second (float32), `memory` in bytes copied a second. Raises `CheckError` if a result
    is wrong, and whatever torch raises for a device that does not work.
    """
    with without_gc():
        import torch

    accelerators = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rates: dict[str, float] = {}
    for device in accelerators or [torch.device("cpu")]:
        own = _rates_of(device)
        rates = {name: min(rate, rates.get(name, rate)) for name, rate in own.items()}
    return rates


def _rates_of(device: Any) -> dict[str, float]:
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    ones = torch.ones(MATRIX, MATRIX, device=device)
    product = ones @ ones
    if not bool((product == MATRIX).all()):
        raise CheckError(f"{device} multiplies wrongly: {MATRIX} expected, {float(product.min())} found")
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    compute_seconds = _best_seconds(lambda: torch.matmul(ones, ones, out=product), finish)
    memory_seconds = _best_seconds(lambda: target.copy_(source), finish)
    return {"compute": 2 * MATRIX**3 / compute_seconds, "memory": COPY_BYTES / memory_seconds}


def collective(host: str, port: int, rank: int, seconds: float, listener: socket.socket | None) -> float:
    """Adds up a tensor with the other node of a pair; returns the duration. Rank 0 has the store, at the listener.

    Raises `CheckError` if the sum is wrong, and what torch raises if the other one does not answer.
    """
    import torch
    import torch.distributed as dist

    os.environ.update(interfaces(host))
    timeout = timedelta(seconds=seconds)
    own = {} if listener is None else {"master_listen_fd": listener.detach()}
    store = dist.TCPStore(host, port, is_master=bool(own), wait_for_workers=False, timeout=timeout, **own)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        data = torch.ones(COLLECTIVE_BYTES // 4, device="cuda" if cuda else "cpu")
        finish = torch.cuda.synchronize if cuda else lambda: None
        durations = []
        for _ in range(REPEATS):
            data.fill_(1)
            finish()
            began = time.perf_counter()
            dist.all_reduce(data)
            finish()
            durations.append(time.perf_counter() - began)
            if not bool((data == 2).all()):
                raise CheckError(f"the collective adds wrongly: 2 expected, {float(data.min())} found")
        dist.barrier()  # rank 0's store must not end before the other one has left
        return min(durations)
    finally:
        dist.destroy_process_group()


def answer(question: dict[str, Any], listeners: dict[int, socket.socket]) -> dict[str, Any]:
    """Carries out one question."""
    match question:
        case {"measure": _}:
            return {"rates": measure()}
        case {"listen": host}:
            listener = listen(host)
            port = listener.getsockname()[1]
            listeners[port] = listener
            return {"port": port}
        case {"pair": {"host": host, "port": port, "rank": rank, "seconds": seconds}}:
            return {"seconds": collective(host, port, rank, seconds, listeners.pop(port, None) if rank == 0 else None)}
    raise CheckError(f"an unknown question: {question!r}")


def main() -> None:
    """Answers questions until the input ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # what torch prints is no answer
    listeners: dict[int, socket.socket] = {}
    for line in sys.stdin.buffer:
        try:
            said = answer(json.loads(line), listeners)
        except Exception as error:  # noqa: BLE001 - whatever fails on this node is the check's result
            said = {"error": f"{type(error).__name__}: {error}"[:2000]}
        os.write(output, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
