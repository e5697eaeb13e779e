"""Why a server ended, as its own output says it: the exception to which vLLM refers last, or what refused its arguments."""

from __future__ import annotations

import re
from pathlib import Path

from counterpoint.transport.printable import shortened
from counterpoint.transport.process.child import last_lines
from counterpoint.transport.process.permanent_errors import is_passing

_EXCEPTION = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception): \S.*)")
"""The last line of a traceback, as a process prints it or as vLLM logs it of one of its processes."""

_REFUSAL = re.compile(r"^[\w./ -]+: error: (\S.*)")
"""What argparse says of arguments that it does not take."""

_REFERS = re.compile("root cause|failed to be inspected", re.IGNORECASE)
"""What an exception of vLLM says that refers to another one above it in the log."""

_OF_PYDANTIC = re.compile(r"\d+ validation errors? for \w+$")
"""An exception whose text begins with the next line."""

_TYPE = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*): ")

_OF_INPUT = {"ImportError", "ModuleNotFoundError", "NotImplementedError", "ValidationError"}
_SAY_INPUT = re.compile("unsupported|not supported", re.IGNORECASE)
"""What no other moment spares: exceptions about the model, packages or arguments, not about memory, files or neighbours."""

_KILLED = re.compile(r"core proc\(s\): .*: -\d+")
"""What vLLM says of an engine that a signal ended, which leaves no exception: those above it are of something else."""

_ERRNO = re.compile(r"(?:\[errno |errno: |\(os error )(\d{1,4})\b(?:.*: '([^']+)')?", re.IGNORECASE)
"""The number of a system's error as Python, torch's sockets and Rust write it, and the path that Python names."""

_OF_MACHINE = {
    "AcceleratorError", "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError",
    "ConnectionResetError", "DistBackendError", "DistNetworkError", "DistStoreError", "MemoryError", "OutOfMemoryError",
    "TimeoutError",
}  # fmt: skip
"""Exceptions of Python and torch by which a device, a neighbour or the system refuses something, perhaps only now."""

_SAY_MACHINE = re.compile(r"other processes|EADDRINUSE|CUDA error|NCCL", re.IGNORECASE)
"""What vLLM and older versions of torch say of the same in a `ValueError` or a `RuntimeError`."""

_MEMORY = re.compile(r"\([\d.]+/([\d.]+) GiB\) .* than .*?([\d.]+)(?:/[\d.]+)? GiB\)")
"""What vLLM says of memory that it does not get: all that there is, and what it asked for."""

MOST_LINES = 500
"""Lines searched from the end of the output."""


MOST_CHARACTERS = 300
"""Characters of a cause: vLLM's own may list every architecture that it knows."""


def root_cause(log_file: Path, start: int = 0) -> str | None:
    """Returns the newest exception in a server's output that does not refer to another one, or why it refused its arguments.

    `start` is the place, in bytes, where the output begins. None if there is neither.
    """
    lines = last_lines(log_file, MOST_LINES, start)
    referring = None
    for place in reversed(range(len(lines))):
        if (refused := _REFUSAL.match(lines[place])) is not None:
            return refused[1]
        if (found := _EXCEPTION.match(lines[place])) is None:
            continue
        cause = found[1]
        if _OF_PYDANTIC.search(cause) and place + 1 < len(lines):
            name, said = cause.partition(":")[0].rpartition(".")[2], lines[place + 1].strip()
            cause = f"{name}: {said.removeprefix('Value error, ')}"
        cause = shortened(cause, MOST_CHARACTERS)
        if not _REFERS.search(cause):
            return cause
        if _KILLED.search(cause):
            return cause
        referring = referring or cause
    return referring


def is_of_input(cause: str) -> bool:
    """Whether a cause is about the model or the arguments, so that the next start would end alike.

    That is left to words ("not supported") where the type of the exception does not say it.
    """
    return (_type_of(cause) in _OF_INPUT or _SAY_INPUT.search(cause) is not None) and not is_of_machine(cause)


def is_of_machine(cause: str) -> bool:
    """Whether a cause is about the machine or its other processes, so that the next start may end otherwise.

    It is decided by the number of the system's error, else by the exit code of the engine, else by the type of the exception.
    Left to words: memory that vLLM does not get, a `ValueError` (more than the machine has is never there, whatever else runs),
    and an error of CUDA or NCCL that is a `RuntimeError`.
    """
    if (system := _ERRNO.search(cause)) is not None:
        return is_passing(OSError(int(system[1]), "", system[2]))
    if (memory := _MEMORY.search(cause)) is not None and float(memory[2]) > float(memory[1]):
        return False
    if _KILLED.search(cause) or _type_of(cause) in _OF_MACHINE:
        return True
    return _SAY_MACHINE.search(cause) is not None


def _type_of(cause: str) -> str:
    """Returns the name of the exception's type, without its module; empty if the cause is no exception."""
    return found[1] if (found := _TYPE.match(cause)) is not None else ""
