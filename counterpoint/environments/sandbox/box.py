"""A box: a root of its own in which commands of a model run and leave files, in phases. See `builder`, which does the work.

    async with Box(files_mib=1024, memory_mib=2048) as box:
        await box.begin()
        await box.unpack(archive)                          # a tar of the files that the first phase begins with
        ran = await box.run(["/bin/bash", "-c", "make"], {"PATH": ...}, "/app", seconds=60.0)
        await box.end()                                    # all its processes are dead
        await box.renew()                                  # /tests and /logs are new
        await box.begin()
        ...
        await box.end()
        text = await box.read("/logs/verifier/reward.txt")

One coroutine at a time is served; others wait.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from counterpoint.environments.sandbox.builder import HOME
from counterpoint.environments.sandbox.namespaces import INNER_ROOT, INNER_USER
from counterpoint.environments.sandbox.phase import MESSAGES, PROGRAMS, PYTHON
from counterpoint.environments.sandbox.python_sandbox import (
    SandboxUnavailable,
    check_machine,
    confining_advice,
    has_nobody,
    map_users,
)
from counterpoint.transport.frames import BadFrame

START_SECONDS = 60.0
OVERHEAD_SECONDS = 30.0
"""How long a request may take beside its own deadline before the box counts as dead."""
MOST_PROCESSES = 512


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    output: str
    """What it wrote to both of its streams, in order."""
    exit_code: int | None
    """None if it was killed."""
    killed: str
    """Why it was killed: `deadline`, `output` (it wrote too much); empty if it ended by itself."""


class BoxLost(RuntimeError):
    """A box ended, or refused, after its first phase had begun: what was done in it is lost. The message says why."""


class Box:
    """A box, from its entry to its exit.

    Raises `SandboxUnavailable` where the machine cannot confine it; once its first phase has begun, `BoxLost`, since it may then
    be the commands that ended it.
    """

    def __init__(self, files_mib: int, memory_mib: int) -> None:
        """`files_mib` bounds its files, which are in memory, and /dev/shm; `memory_mib`, the private memory of a process."""
        self._files_bytes, self._memory_bytes = files_mib << 20, memory_mib << 20
        self._one = asyncio.Lock()
        self._root = ""
        self._process: asyncio.subprocess.Process | None = None
        self._has_begun = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        check_machine()
        self._root = await asyncio.to_thread(tempfile.mkdtemp, prefix="counterpoint-box-")
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def begin(self) -> None:
        """Begins a phase."""
        await self._ask({"do": "phase"})
        self._has_begun = True

    async def end(self) -> None:
        """Ends the phase: no process of it lives."""
        await self._ask({"do": "end"})

    async def unpack(self, archive: bytes, directory: str = "/") -> None:
        """Puts the files of a tar into a directory, as the user of the box. During a phase."""
        answer = await self._ask({"do": "files", "directory": directory}, 600.0, archive)
        if answer["exit_code"] != 0:
            raise BoxLost(f"files could not be put into {directory} of the box: {answer['output'][-500:]}")

    async def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        directory: str,
        *,
        seconds: float,
        output_bytes: int = 1 << 18,
    ) -> Ran:
        """Runs a command, with these variables and no others. During a phase."""
        asked = {"do": "run", "command": [*command], "variables": dict(variables), "directory": directory}
        answer = await self._ask(asked | {"seconds": seconds, "output_bytes": output_bytes}, seconds)
        return Ran(answer["output"], answer["exit_code"], answer["killed"])

    async def renew(self, aside: Sequence[str] = ()) -> None:
        """Makes what is not read-only anew for later phases, whatever the phases before made of it. Between phases.

        Directories at /tests and /logs are new, and there is a new home, `TESTS_HOME`. Files with one of the names `aside` at the
        root get other names.
        """
        await self._ask({"do": "renew", "aside": [*aside]})

    async def read(self, path: str) -> str | None:
        """Returns the text of a file; None if there is none. Between phases. Raises `ValueError` for what is no plain file."""
        answer = await self._ask({"do": "read", "path": path})
        if "why" in answer:
            raise ValueError(answer["why"])
        text: str | None = answer["text"]
        return text

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        settings = {
            "root": self._root,
            "user": INNER_USER if has_nobody() else INNER_ROOT,
            "files_bytes": self._files_bytes,
            "memory_bytes": self._memory_bytes,
            "processes": MOST_PROCESSES,
            "python": _python(),
        }
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *_interpreter(),
                    json.dumps(settings),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        said = await self._reader.read(8)
        if said != b"unshared":
            rest = (said + await self._reader.read(1024))[4:].decode(errors="replace")
            raise SandboxUnavailable(confining_advice(rest or "the builder of a box ended at its start"))
        try:
            map_users(self._process.pid)
        except OSError as error:
            raise SandboxUnavailable(confining_advice(f"users cannot be mapped: {error}")) from error
        self._writer.write(b"mapped")
        await self._answer()

    async def _ask(self, asked: dict[str, Any], seconds: float = 0.0, archive: bytes | None = None) -> dict[str, Any]:
        async with self._one:
            if self._writer is None:
                raise self._lost("it is closed")
            try:
                async with asyncio.timeout(seconds + OVERHEAD_SECONDS):
                    self._writer.write(MESSAGES.frame(json.dumps(asked).encode()))
                    if archive is not None:
                        self._writer.write(MESSAGES.frame(archive))
                    await self._writer.drain()
                    return await self._answer(is_end=asked["do"] == "end")
            except BaseException as error:
                # Whatever was asked may still be done: nothing more can be asked.
                await self._close()
                if isinstance(error, OSError | BadFrame | EOFError | TimeoutError):
                    raise self._lost(f"it did not answer {asked['do']!r}: {error!r}") from error
                raise

    async def _answer(self, *, is_end: bool = False) -> dict[str, Any]:
        assert self._reader is not None
        answer: dict[str, Any] = json.loads(await MESSAGES.read_from(self._reader))
        if "refused" in answer:
            raise self._lost(str(answer["refused"]))
        if "ended" in answer and not is_end:
            raise self._lost(
                "its first process was killed: the machine, or the limit of a container, may be out of memory"
            )
        return answer

    def _lost(self, why: str) -> RuntimeError:
        return BoxLost(f"the box is lost: {why}") if self._has_begun else SandboxUnavailable(confining_advice(why))

    async def _close(self) -> None:
        """Kills the builder, upon which the kernel kills what is left of a phase and frees the files."""
        writer, self._writer = self._writer, None
        process, self._process = self._process, None
        if process is not None:  # first, since the waits below may be cancelled
            with suppress(ProcessLookupError):
                process.kill()
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if process is not None:
            await process.wait()
        if self._root:
            root, self._root = self._root, ""
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


def box_variables() -> dict[str, str]:
    """Returns the variables of a command in a box: its programs are those of this machine, and this process's interpreter."""
    variables = {
        "PATH": ":".join(PROGRAMS),
        "HOME": HOME,
        "LANG": "C.UTF-8",
    }
    if _python():
        variables |= {"PATH": f"{PYTHON}/bin:{variables['PATH']}", "LD_LIBRARY_PATH": f"{PYTHON}/lib"}
    return variables


def _python() -> str:
    """The directory of this process's interpreter, if it is not below /usr."""
    return "" if Path(sys.base_prefix).is_relative_to("/usr") else sys.base_prefix


def _interpreter() -> list[str]:
    """Returns the command of the builder: the interpreter without a virtual environment or packages."""
    root = str(Path(__file__).absolute().parents[3])
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from counterpoint.environments.sandbox.builder import main; main()"
    )
    return [sys._base_executable, "-s", "-S", "-P", "-B", "-c", program]  # type: ignore[attr-defined]
