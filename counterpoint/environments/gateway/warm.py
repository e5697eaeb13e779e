"""Keeps a Python program of an agent warm: a template process imports its SDK once, and is forked for each rollout.

The template (`agent_template`) runs below a guard of its own, so nothing of it outlives the orchestrator, and each rollout has
one as without it. It is started anew when it has ended, or a file of the operator's that it has imported has changed. Rollouts in
progress go on.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from counterpoint.environments.gateway.agent_process import AgentResult, Running, Start, running, started

NAMES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "AGENT_EXAMPLE_FILE",
    "AGENT_REWARD_FILE",
)
"""Variables that a rollout has and a template has not, beside `TMPDIR`."""

_TEMPLATE = Path(__file__).with_name("agent_template.py")
_INTERPRETER = re.compile(r"python[0-9.]*t?")
_MOST_SAID_BYTES = 4 << 20
_MOST_REQUEST_BYTES = 2 << 20
"""The bound that `agent_template.MOST_REQUEST_BYTES` names, too."""
_SEND_SECONDS = 30.0
_ATTEMPTS = 2
"""Templates that a rollout may ask, since one may end just before it."""
_SHOWN_ERRORS = 1500


class NotWarm(RuntimeError):
    """The program cannot be kept warm. The message says why, and what to do."""


class _Template:
    """A template process."""

    def __init__(
        self, agent: Running, control: socket.socket, files: Mapping[str, Any], until_end: AsyncExitStack
    ) -> None:
        self._agent, self._control, self._files, self._until_end = agent, control, files, until_end
        self.rollouts = 0
        """How many are in progress."""
        self.retired = False
        """No more are begun; it ends with those in progress."""

    def serves(self) -> bool:
        """Whether it lives and has imported the files as they are now. Reads their states from the disk."""
        return not (self.retired or self._agent.over.is_set()) and all(map(_is_as, self._files, self._files.values()))

    def forked(self, variables: Mapping[str, str], directory: Path) -> Start:
        """Returns what asks for a fork. If the template has ended, or takes nothing, the guard is gone without a word."""
        request = json.dumps({"variables": dict(variables), "directory": str(directory)}).encode()
        if len(request) > _MOST_REQUEST_BYTES:
            raise OSError(errno.E2BIG, "the agent's environment is too large")

        def start(descriptors: Sequence[int]) -> None:
            with open(os.memfd_create("request"), "wb", buffering=0) as file:
                file.write(request)
                with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # the last: it hangs
                    socket.send_fds(self._control, [b"f"], [file.fileno(), *descriptors])

        return start

    async def left(self) -> None:
        """Ends it if it is to end and no rollout needs it."""
        if self.retired and not self.rollouts:
            await self._until_end.aclose()

    def errors(self) -> str:
        """The end of what it wrote as errors."""
        return self._agent.errors.text()[-_SHOWN_ERRORS:].strip()


class WarmProgram:
    """A program of which each rollout is a fork of a template process."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], directory: Path | None) -> None:
        """`command` has absolute paths. Raises `ValueError`, which names the part, unless it is an interpreter and a file."""
        self._command, self._directory = command, directory
        wanted = 'expected a Python interpreter and a file, such as ["python", "agent.py"]; leave `warm` out for others'
        if not _INTERPRETER.fullmatch(os.path.basename(command[0])):
            raise ValueError(f"warm = true: command begins with {command[0]!r}; {wanted}")
        if len(command) < 2 or not os.path.isfile(command[1]):
            raise ValueError(f"warm = true: command has {[*command[1:2]]} after the interpreter; {wanted}")
        self._variables = {name: value for name, value in variables.items() if name not in NAMES}
        self._starting = asyncio.Lock()
        self._template: _Template | None = None

    async def start(self) -> None:
        """Starts the template. Raises `NotWarm`."""
        await self._serving()

    async def run(self, variables: Mapping[str, str], directory: Path, stdin_file: Path) -> AgentResult:
        """Runs the program once, as `agent_process.run_agent` does. Raises `NotWarm`, too."""
        for _ in range(_ATTEMPTS):
            template = await self._serving()
            template.rollouts += 1
            agent: Running | None = None
            try:
                async with running(template.forked(variables, directory), stdin_file) as agent:
                    await agent.over.wait()
            finally:
                template.rollouts -= 1
                template.retired |= agent is not None and agent.guard.number(0) is None  # it has not forked
                await template.left()
            if agent.guard.number(0) is not None:
                return agent.result()
        raise NotWarm(f"warm = true: the template process of {self._command[1]} does not fork: {template.errors()}")

    async def close(self) -> None:
        """Ends the template process."""
        async with self._starting:
            await self._retire()

    async def _serving(self) -> _Template:
        async with self._starting:
            template = self._template
            # It may be retired, and so closed, while the states of its files are read.
            if template is None or not await asyncio.to_thread(template.serves) or template.retired:
                await self._retire()
                template = self._template = await self._started()
            return template

    async def _retire(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            template.retired = True
            await template.left()

    async def _started(self) -> _Template:
        python, *program = self._command
        async with AsyncExitStack() as until_end:
            own = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="counterpoint-agent-"))
            until_end.push_async_callback(asyncio.to_thread, shutil.rmtree, own, ignore_errors=True)
            (own / "work").mkdir()
            (own / "nothing").touch()
            ours, theirs = socket.socketpair()
            until_end.enter_context(ours)
            with theirs:
                command = [python, str(_TEMPLATE), str(theirs.fileno()), json.dumps(NAMES), *program]
                variables = self._variables | {"TMPDIR": str(own)}
                start = started(command, variables, self._directory or own / "work", [theirs.fileno()])
                agent = await until_end.enter_async_context(running(start, own / "nothing"))
            said = await _said(ours)
            if "files" in said:
                return _Template(agent, ours, said["files"], until_end.pop_all())
        why = said.get("refused") or f"it ended: {agent.errors.text()[-_SHOWN_ERRORS:].strip()}"
        raise NotWarm(f"warm = true: {program[0]} cannot be kept warm: {why}. Change that, or leave `warm` out")


async def _said(control: socket.socket) -> dict[str, Any]:
    """Waits for what a template says once it has imported; nothing if it ends before."""
    control.setblocking(False)
    said = bytearray()
    while not said.endswith(b"\n") and len(said) < _MOST_SAID_BYTES:
        more = await asyncio.get_running_loop().sock_recv(control, 1 << 16)
        if not more:
            return {}
        said += more
    control.settimeout(_SEND_SECONDS)
    found: dict[str, Any] = json.loads(said)
    return found


def _is_as(file: str, state: Sequence[int]) -> bool:
    """Whether a file is as a template has seen it."""
    try:
        found = os.stat(file)
    except OSError:
        return not state
    return [found.st_mtime_ns, found.st_size, found.st_ino] == state
