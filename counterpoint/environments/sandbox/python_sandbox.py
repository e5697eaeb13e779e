"""The caller's side of the sandbox: starts the zygote, maps its users, and asks it for runs.

Use one `Sandbox` for a whole environment. See the package's docstring for an example.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from counterpoint.environments.sandbox.namespaces import MACHINES, NOBODY
from counterpoint.environments.sandbox.supervisor import ANSWERS, REQUESTS
from counterpoint.transport.frames import BadFrame

START_SECONDS = 60.0
OVERHEAD_SECONDS = 30.0
"""How long a run may take beside its own deadline before the sandbox counts as dead."""

MAX_CODE_BYTES = 1 << 20
MAX_STDIN_BYTES = 8 << 20
LEAST_MEMORY_MIB = 64
LEAST_THREADS, THREADS_EACH = 512, 64
"""Threads of all programs at a time: a machine, or a container, has a limited number for everything."""

OLDEST_LINUX = (5, 14)
"""The first that counts the threads of a namespace by themselves."""

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_FILES = ("/etc/ld.so.cache", "/etc/localtime")


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine a process. The message says what it refuses and what to do."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one run."""

    stdout: str
    stderr: str
    """The program's stderr, with the traceback of an exception that the program did not catch."""
    exit_code: int | None
    """The exit code; None if it was killed."""
    killed: str
    """Why it was killed: `deadline`, of time or processor time, `output` (it wrote too much), or `signal N (its name)`; empty if
    it ended by itself."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself, with exit code 0."""
        return self.exit_code == 0


class Sandbox:
    """Runs programs, each in a process of its own, confined unless `mode` is "none"."""

    def __init__(
        self,
        mode: Literal["namespaces", "none"] = "namespaces",
        *,
        at_once: int | None = None,
        output_bytes: int = 1 << 16,
        files_mib: int = 16,
        packages: Sequence[Path] = (),
    ) -> None:
        """`at_once` programs run at the same time, by default one for each core; others wait.

        A program that writes more than `output_bytes` to a stream is killed; the files in its directory, which is its own, take
        at most `files_mib`. `packages` are directories whose modules it may import besides the standard library. With "none"
        the limits hold, but nothing keeps a program from the files, the network and the processes of this machine.
        """
        if mode not in ("namespaces", "none"):
            raise ValueError(f"sandbox = {mode!r}: expected 'namespaces' or 'none'")
        self._mode = mode
        at_once = at_once or len(os.sched_getaffinity(0))
        self._settings: dict[str, Any] = {
            "namespaces": mode == "namespaces",
            "as_root": has_nobody(),
            "output_bytes": output_bytes,
            "files_bytes": files_mib << 20,
            "threads": max(LEAST_THREADS, THREADS_EACH * at_once),
            # Not at their own places: those may be below /tmp, which each run has for itself.
            "packages": {str(path.resolve()): f"/packages/{index}" for index, path in enumerate(packages)},
        } | _paths()
        self._places = asyncio.Semaphore(at_once)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts the zygote. Raises `SandboxUnavailable` where the machine cannot confine it."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            await self._end()
            if self._mode == "namespaces":
                check_machine()
            try:
                async with asyncio.timeout(START_SECONDS):
                    await self._start_zygote()
            except BaseException:
                await self._end()
                raise

    async def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        ours.setblocking(False)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *_interpreter(),
                json.dumps(self._settings),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        while True:
            said = await loop.sock_recv(ours, 1024)
            if said == b"unshared":
                try:
                    map_users(self._process.pid)
                except OSError as error:
                    raise SandboxUnavailable(_advice(f"users cannot be mapped: {error}")) from error
                await loop.sock_sendall(ours, b"mapped")
            elif said == b"ready":
                return
            else:
                raise SandboxUnavailable(_advice(said.decode(errors="replace").removeprefix("refused ")))

    async def run(
        self, code: str, stdin: str = "", seconds: float = 10.0, memory_mib: int = 512, cpu_seconds: float | None = None
    ) -> Result:
        """Runs `code` as a program, with `stdin` as its input, for at most `seconds`, and `cpu_seconds` of processor time.

        `memory_mib` bounds its address space. Whatever the program does is a `Result`. Raises `SandboxUnavailable` if it cannot
        be run at all, and `ValueError` for arguments out of range. Cancelling the call kills the program.
        """
        if len(code.encode(errors="replace")) > MAX_CODE_BYTES or len(stdin.encode(errors="replace")) > MAX_STDIN_BYTES:
            return Result("", f"the program or its input is longer than {MAX_CODE_BYTES} bytes", 1, "", 0.0)
        if not 0 < seconds < 86_400 or memory_mib < LEAST_MEMORY_MIB:
            raise ValueError(
                f"seconds = {seconds}, memory_mib = {memory_mib}: expected a time, {LEAST_MEMORY_MIB} or more MiB"
            )
        request = {
            "code": code.encode(errors="replace").decode(),
            "stdin": stdin.encode(errors="replace").decode(),
            "seconds": seconds,
            "memory_mib": memory_mib,
            "cpu_seconds": seconds if cpu_seconds is None else cpu_seconds,
        }
        async with self._places:
            await self.start()
            return await self._ask(json.dumps(request).encode(), seconds)

    async def _ask(self, body: bytes, seconds: float) -> Result:
        ours, theirs = socket.socketpair()
        assert self._control is not None
        try:
            with theirs:
                socket.send_fds(self._control, [b"r"], [theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(f"the sandbox does not take a program: {error}; it is started anew") from error
        try:
            async with asyncio.timeout(seconds + OVERHEAD_SECONDS):
                writer.write(REQUESTS.frame(body))
                await writer.drain()
                answer = json.loads(await ANSWERS.read_from(reader))
        except (OSError, BadFrame, EOFError, TimeoutError) as error:
            raise SandboxUnavailable(f"a run of the sandbox ended without a result: {error!r}") from error
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if "refused" in answer:
            raise SandboxUnavailable(_advice(str(answer["refused"])))
        return Result(**answer)

    async def close(self) -> None:
        """Ends the zygote and every run. Safe to call twice."""
        self._closed = True
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


def _interpreter() -> list[str]:
    """Returns the command of the zygote: the interpreter without the virtual environment that this process may run in.

    A program's process returns from `main`, so that the program has one frame below its own.
    """
    root = str(Path(__file__).absolute().parents[3])
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from counterpoint.environments.sandbox.zygote import main; "
        f"sys.path.remove({root!r}); code = 0; program, shown, finish = main()\n"
        "try: exec(compile(*program[:2], 'exec'), program.pop())\n"
        "except BaseException as error: code = shown(error)\n"
        "finish(code)"
    )
    return [sys._base_executable, "-s", "-S", "-P", "-B", "-c", program]  # type: ignore[attr-defined]


def _paths() -> dict[str, list[str]]:
    """Returns what the root of a run has: the interpreter's library and the libraries that its modules load."""
    base = Path(sys.base_prefix)
    library = Path(os.__file__).resolve().parent
    shared = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    directories = [library, *map(Path, _LIBRARIES)]
    return {
        "directories": sorted(map(str, directories)),
        "files": [*_FILES, *map(str, shared.glob("libpython3*.so*"))],
        "hidden": [str(library / name) for name in ("site-packages", "dist-packages")]
        + [str(base / "lib/python3/dist-packages")],
    }


def check_machine() -> None:
    """Raises `SandboxUnavailable` on a machine that the sandbox does not know."""
    system = os.uname()
    if sys.platform != "linux" or system.machine not in MACHINES:
        raise SandboxUnavailable(
            _advice(f"it knows Linux on {' and '.join(MACHINES)}, not {sys.platform} on {system.machine}")
        )
    release = tuple(int(part) for part in system.release.split("-")[0].split(".")[:2])
    if release < OLDEST_LINUX:
        raise SandboxUnavailable(
            _advice(f"it needs Linux {'.'.join(map(str, OLDEST_LINUX))} or newer, not {system.release}")
        )


def has_nobody() -> bool:
    """Returns whether we are root, and may map the user nobody: root of a container may have been given a single user."""
    if os.geteuid() != 0:
        return False
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= NOBODY < int(first) + int(count) for first, _, count in ranges)


def map_users(pid: int) -> None:
    """Gives the zygote's user namespace its users: our own as its root and, if that is root, nobody for the programs."""
    as_root = has_nobody()
    second = f"\n1000 {NOBODY} 1" if as_root else ""
    if not as_root:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {os.geteuid()} 1{second}")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {os.getegid()} 1{second}")


def _advice(reason: str) -> str:
    return f'{confining_advice(reason)}, or run without any protection by sandbox = "none", for code that you trust'


def confining_advice(reason: str) -> str:
    """Returns why a process cannot be confined, and what lets it."""
    return (
        f"the sandbox cannot confine programs here: {reason}. Allow unprivileged user namespaces (sysctl "
        "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container, a seccomp profile that allows "
        "unshare)"
    )
