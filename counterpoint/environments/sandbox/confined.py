"""What the process of a run does: gives up every right, and returns what to run.

It is forked from the supervisor. In namespaces it is the first process of its own, so that its end ends all that it may have
started. Setting up comes first; nothing of it can be undone by the code. The code then runs at the bottom of the stack
(`python_sandbox`). It ends as Python ends a program, but for the teardown of all modules, which would take longer than the rest.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import math
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from counterpoint.environments.sandbox import namespaces, seccomp

PROGRAM = "/program"
"""The path where a run finds its own file, and its standard streams, which `/dev` names."""
STREAMS = ("stdin", "stdout", "stderr")
FILE_NAME = "program.py"

OPEN_FILES = 64
_TROUBLE = 3
_PROGRAM_BYTES = 1 << 25
_INTERRUPTED, _NOT_FLUSHED = 130, 120
_LONG = 1 << 63

Program = tuple[list[Any], Callable[[BaseException], int], Callable[[int], NoReturn]]
"""The source, its file and its names, in a list that can be emptied, so that nothing else holds these; what shows an exception
that the code did not catch, and returns the exit code; and what ends the process."""


def named_pipe(name: str) -> tuple[int, int]:
    """Makes a standard stream that a program can open by its path, too; returns its ends, as `os.pipe`. The first call mounts."""
    path = Path(PROGRAM, name)
    if not os.path.ismount(PROGRAM):
        flags = namespaces.MS_NOSUID | namespaces.MS_NODEV
        namespaces.mount("program", PROGRAM, "tmpfs", flags, f"size={_PROGRAM_BYTES},nr_inodes=8,mode=755")
    os.mkfifo(path)
    path.chmod(0o222)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # first: to write, there has to be a reader
    return end, os.open(path, os.O_WRONLY)


def prepare(
    request: Mapping[str, Any], settings: Mapping[str, Any], directory: str, streams: tuple[int, int, int, int]
) -> Program:
    """Confines this process, and returns what it is to run: `request["code"]`, as `python program.py` does.

    `streams` become its standard streams; the last is told why the process could not be confined, in which case no code runs.
    """
    try:
        namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
        for standard, descriptor in enumerate(streams):
            os.dup2(descriptor, standard)
        os.closerange(len(streams), 1 << 16)
        file = _confine(request, settings, directory)
        sys.path += [os.getcwd(), os.path.dirname(file)]
        program = _program(request["code"].encode(), file)
    except BaseException as error:  # noqa: BLE001 - whatever failed, the code must not run
        os.write(_TROUBLE, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(_TROUBLE)
    return program


def _confine(request: Mapping[str, Any], settings: Mapping[str, Any], directory: str) -> str:
    """Returns the program's file."""
    isolated = bool(settings["namespaces"])
    files = int(settings["files_bytes"])
    if isolated:
        user = namespaces.INNER_USER if settings["as_root"] else namespaces.INNER_ROOT
        options = f"size={files},nr_inodes=4096,mode=700,uid={user},gid={user}"
        flags = namespaces.MS_NOSUID | namespaces.MS_NODEV
        namespaces.mount("work", directory, "tmpfs", flags, options)
        file = _written(request, PROGRAM)
        namespaces.make_read_only(PROGRAM)
        os.chdir(directory)
        if settings["as_root"]:
            os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    else:
        os.setsid()
        file = _written(request, directory)
        work = os.path.join(directory, "work")
        os.mkdir(work)
        os.chdir(work)
    # Again: the kernel forgets it when the user changes.
    namespaces.set_process_option(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    memory = int(request["memory_mib"]) << 20
    seconds = math.ceil(request["seconds"])
    if isolated:
        # The kernel counts a user's threads in the namespace of users; elsewhere it would count all of ours, too.
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        threads = settings["threads"] if most == resource.RLIM_INFINITY else min(most, settings["threads"])
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (limit, limit + (what == resource.RLIMIT_CPU)))
    namespaces.set_process_option(namespaces.PR_SET_NO_NEW_PRIVS, 1)
    if isolated:
        namespaces.drop_capabilities()
        seccomp.install()
    return file


def _written(request: Mapping[str, Any], directory: str) -> str:
    for name, text in ((FILE_NAME, request["code"]), ("stdin", request["stdin"])):
        Path(directory, name).write_bytes(text.encode())
    return os.path.join(directory, FILE_NAME)


def _program(source: bytes, file: str) -> Program:
    """Returns the program. Makes the streams and the main module as Python makes them for a file."""
    sys.stdin = _stream(0, "<stdin>", "r", "surrogateescape")
    sys.stdout = _stream(1, "<stdout>", "w", "backslashreplace")
    sys.stderr = _stream(2, "<stderr>", "w", "backslashreplace")
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv = [FILE_NAME]
    for name in [name for name in sys.modules if name.partition(".")[0] == "counterpoint"]:
        del sys.modules[name]
    program = sys.modules["__main__"] = ModuleType("__main__")
    vars(program).update(__annotations__={}, __builtins__=builtins, __file__=file, __cached__=None)
    program.__loader__ = SourceFileLoader("__main__", file)
    return [source, file, vars(program)], _shown, _finish


def _shown(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or isinstance(code, int):
            code = code or 0
            return code & 0xFF if -_LONG <= code < _LONG else 0xFF
        sys.stderr.write(f"{code}\n")
        return 1
    trace = error.__traceback__
    error.__traceback__ = None if trace is None else trace.tb_next  # without the frame that ran it
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: BLE001 - a hook of the program's may raise anything
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exc()
        sys.stderr.write("\nOriginal exception was:\n")
        traceback.print_exception(error)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _finish(code: int) -> NoReturn:
    """Ends the process: threads, `atexit`, the program's objects, streams, in the order of Python."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        gc.collect()  # which puts objects before what they hold: a text stream is then closed before its buffer
        sys.modules.pop("__main__", None)
        gc.collect()
    except BaseException:  # noqa: BLE001 - a stream that cannot be written, as Python has it
        code = code or _NOT_FLUSHED
    for kept in (sys.stdout, sys.__stdout__, sys.stderr):
        with suppress(Exception):
            kept.flush()  # type: ignore[union-attr]
    os._exit(code)


def _stream(descriptor: int, name: str, mode: str, errors: str) -> io.TextIOWrapper:
    buffer: Any = open(descriptor, f"{mode}b", closefd=False)  # noqa: SIM115 - it lives as long as the program
    buffer.raw.name = name
    stream: Any = io.TextIOWrapper(buffer, "utf-8", errors, newline="\n", line_buffering=name == "<stderr>")
    stream.mode = mode
    found: io.TextIOWrapper = stream
    return found
