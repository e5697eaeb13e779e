"""A process that has imported what an agent's program and its clients import, and is forked for each rollout.

It runs as a script (`python agent_template.py CONTROL NAMES PROGRAM ARGUMENTS...`) by the interpreter of the program, on the
standard library alone; `warm.py` is the other end of the socket CONTROL. It says, as a line of JSON, which of the operator's
files it has imported, or why it must not be forked. Then it receives, for each rollout, a byte with six descriptors: a file
with what is to be run as JSON, the program's standard input, output and errors, and the pipes of its guard (`agent_guard`).

It never runs the program's own code, and has none of NAMES, the variables that only a rollout has: an import that asks for
one is refused, since all rollouts would have what one process read.
"""

from __future__ import annotations

import sys

_AT_START = frozenset(sys.modules)
"""What the interpreter imports by itself, before a program's directory is searched."""

# ruff: noqa: E402
import ast
import gc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import select
import socket
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import agent_guard  # type: ignore[import-not-found]

del sys.path[0], sys.modules["agent_guard"], sys.modules["launch"]  # the program may have modules of these names

MOST_REQUEST_BYTES = 2 << 20
"""The size that Linux allows for the arguments and the environment of a command."""
LATER = {
    "openai": ("openai.resources.chat", "openai.resources.responses"),
    "anthropic": ("anthropic.resources.messages",),
    "httpx": ("httpcore", "certifi"),
    "httpx2": ("httpcore2", "certifi"),
}
"""What clients import at their first use, by the library; it is up to a third of what a program imports."""
OLDEST = (3, 9)
"""The first Python that passes descriptors and waits for processes by them."""
_THREAD_SECONDS = 1.0
"""How long a thread that was joined may still be listed."""


class Unfit(Exception):
    """This process must not be forked. The message says why."""


class _NotedEnvironment(os._Environ):  # type: ignore[type-arg]
    """The environment while modules are imported: it notes which variables of a rollout they ask for."""

    names: frozenset[str] = frozenset()
    asked: set[str] = set()

    def __getitem__(self, key: str) -> str:
        if key in self.names:
            self.asked.add(key)
        value: str = super().__getitem__(key)
        return value


def main() -> str:
    """Imports, and serves; returns, in the process of each rollout, the program that is to be run."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _NotedEnvironment.names = frozenset(json.loads(sys.argv[2]))
    program = sys.argv[3]
    before = dict(os.environ)
    try:
        if sys.version_info < OLDEST:
            raise Unfit(f"the interpreter is Python {sys.version.split()[0]}; expected 3.9 or newer")
        _pretend(program)
        said: dict[str, Any] = {"files": _import(program)}
    except Unfit as error:
        said = {"refused": str(error)}
    sys.stdout.flush()
    control.sendall(json.dumps(said).encode() + b"\n")
    if "refused" in said:
        sys.exit(1)
    after = dict(os.environ)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    request = _serve(control)
    asked = json.loads(os.pread(request, MOST_REQUEST_BYTES, 0))
    os.close(request)
    os.chdir(asked["directory"])
    _begin_anew(before["TMPDIR"])
    variables = asked["variables"]
    # What imports have set and removed, and the interpreter, such as LC_CTYPE.
    set_here = {name: value for name, value in after.items() if name not in variables or value != before.get(name)}
    os.environ.clear()
    os.environ.update(variables | set_here)
    for name in before.keys() - after.keys():
        os.environ.pop(name, None)
    return program


def _pretend(program: str) -> None:
    """Makes `sys` and `__main__` what they are where the program is started by itself."""
    directory = os.path.dirname(os.path.realpath(program))
    sys.argv[:] = sys.argv[3:]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[1:] = sys.argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory
    itself = sys.modules["__main__"]
    pretended = types.ModuleType("__main__")
    vars(pretended).update({name: value for name, value in vars(itself).items() if name.startswith("__")})
    loader = importlib.machinery.SourceFileLoader("__main__", program)
    vars(pretended).update(__doc__=None, __file__=program, __loader__=loader)
    if "__annotations__" in vars(pretended):
        pretended.__annotations__ = {}
    sys.modules["__main__"] = pretended
    for name in [name for name in sys.modules if "." not in name and name not in _AT_START]:
        found = importlib.machinery.PathFinder.find_spec(name, [directory])
        if found is not None and found.has_location:
            raise Unfit(f"{found.origin} has the name of a module of Python's own, which is imported in its place")


def _import(program: str) -> dict[str, list[int]]:
    """Imports what the program imports at its top; returns the operator's own files, with what `os.stat` says of each.

    Raises `Unfit`.
    """
    files = {program: _state(program)}
    began: dict[str, str] = {}
    os.environ.__class__ = _NotedEnvironment
    for name, names in itertools.chain(_imports(program), _later()):
        try:
            __import__(name, {}, {}, names)
        except BaseException as error:
            raise Unfit(f"importing {name} failed: {type(error).__name__}: {error}") from error
        if asked := _NotedEnvironment.asked | _NotedEnvironment.names.intersection(os.environ):
            raise Unfit(
                f"importing {name} reads or sets {', '.join(sorted(asked))}, which each rollout has a value of its own for"
            )
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file not in files and _is_own(file):
                files[file] = _state(file)
        for thread in os.listdir("/proc/self/task"):
            began.setdefault(thread, name)
    os.environ.__class__ = os._Environ
    for thread, called in _threads().items():
        raise Unfit(
            f"importing {began.get(thread, 'at the start')} started the thread {called!r}, which no fork would have"
        )
    return files


def _imports(program: str) -> Iterator[tuple[str, list[str]]]:
    """The modules, and names of them, that a file imports before its first other statement: any might change what they do."""
    try:
        with open(program, "rb") as file:
            statements = ast.parse(file.read(), program).body
    except (SyntaxError, ValueError) as error:
        raise Unfit(f"{program} cannot be read: {error}") from error
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from ((alias.name, []) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None and not statement.level:
            yield statement.module, [alias.name for alias in statement.names]
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            return


def _later() -> Iterator[tuple[str, list[str]]]:
    for module in itertools.chain.from_iterable(later for name, later in LATER.items() if name in sys.modules):
        with suppress(ModuleNotFoundError):  # another version may not have it
            if importlib.util.find_spec(module) is not None:
                yield module, []


def _state(file: str) -> list[int]:
    try:
        found = os.stat(file)
    except OSError:  # such as a module in an archive
        return []
    return [found.st_mtime_ns, found.st_size, found.st_ino]


def _is_own(file: str) -> bool:
    """Whether the operator may have written a file: it is neither Python's nor installed."""
    return not (file.startswith(os.path.dirname(os.__file__)) or "/site-packages/" in file or "/dist-packages/" in file)


def _threads() -> dict[str, str]:
    """Returns the names of the threads beside this one that a fork would not have.

    Those that a library stops before a fork, as OpenBLAS does, are gone after one.
    """
    if threading.active_count() == 1 and len(os.listdir("/proc/self/task")) > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    until = time.monotonic() + _THREAD_SECONDS
    named = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    while True:
        others = [thread for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()]
        if not others or time.monotonic() > until:
            return {thread: named.get(thread) or _name(thread) for thread in others}
        time.sleep(0.01)


def _name(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/comm") as file:
        return file.read().strip()


def _serve(control: socket.socket) -> int:
    """Forks for each request, and returns, in the fork that is to run the program, the descriptor of what was asked."""
    while True:
        agent_guard.launch.reap()
        if not select.select([control], [], [], agent_guard.REAP_SECONDS)[0]:
            continue
        said, descriptors, _, _ = socket.recv_fds(control, 1, 6)
        if not said:
            sys.exit()
        if os.fork() == 0:
            control.close()
            request, *streams, ended, go = descriptors
            for target, descriptor in enumerate(streams):
                os.dup2(descriptor, target)
                os.close(descriptor)
            os.setsid()
            agent_guard.guard(ended, go)
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _begin_anew(temporary: str) -> None:
    """Changes what a process has once and a fork would have from the template. `random` does that by itself."""
    modules: Any = sys.modules
    if "tempfile" in modules and modules["tempfile"].tempdir == temporary:
        modules["tempfile"].tempdir = None
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()


def run(program: str) -> None:
    """Runs the program as `__main__`, and prints what it raises without our own frames."""
    try:
        with open(program, "rb") as file:
            code = compile(file.read(), program, "exec", dont_inherit=True)
        exec(code, vars(sys.modules["__main__"]))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        traceback = error.__traceback__
        assert traceback is not None
        error = error.with_traceback(traceback.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    run(main())
