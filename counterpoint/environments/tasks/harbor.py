"""`harbor`: directories of tasks in Harbor's format, played with a shell in a box, and scored by their own tests.

Of a task are read: `task.toml`, instruction.md, `environment/` (what begins in the box) and `tests/`, whose `test.sh` writes
/logs/verifier/reward.json or reward.txt (`harbor_task` reads them). The tests enter the box when no process of the policy's lives
any more. docs/environments.md says what that stops and what not.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import tarfile
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.reward import number_in
from counterpoint.environments.sandbox.box import Box, BoxLost, box_variables
from counterpoint.environments.tasks.dockerfile import Placed
from counterpoint.environments.tasks.harbor_task import MOST_SECONDS, HarborTask, load_tasks
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolUnavailable, tool_from
from counterpoint.environments.tools.play import ToolLimits, play_with_tools, tool_metrics
from counterpoint.transport.records import Rollout

_KEPT = 16 * 1024
"""Characters of the tests' output that the rollout's state has."""


class Harbor:
    """The tasks at and below `path`; of those, the ones whose directory or name is, or matches, one of `tasks`.

    The policy has one tool, `bash`, for at most `max_turns` turns; a command has `call_seconds`, and its output is cut to
    `observation_characters`.
    """

    group_scoring = False
    needs_tool_parser = True
    reward_bounds = (0.0, 1.0)
    state_keys = ("answer", "reward", "rewards", "timed_out", "tools", "verifier_exit_code", "verifier_output")

    def __init__(
        self,
        path: str,
        tasks: Sequence[str] = (),
        max_turns: int = 30,
        call_seconds: float = 60.0,
        observation_characters: int = 8192,
    ) -> None:
        """Raises `ValueError` that names each task that cannot be played, what it needs, and what to do instead."""
        if isinstance(tasks, str) or not all(isinstance(name, str) for name in tasks):
            raise ValueError(f"tasks = {tasks!r}: expected a list of names")
        self._limits = ToolLimits(max_turns, 86_400.0, observation_characters)
        if not 0 < call_seconds <= MOST_SECONDS:
            raise ValueError(f"call_seconds = {call_seconds}: expected seconds above 0, at most {MOST_SECONDS:g}")
        self._call_seconds = call_seconds
        self._tasks = load_tasks(Path(path).expanduser().resolve(), tasks)
        self.fingerprint = _fingerprint(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        task = self._tasks[index]
        return Example(index, task.instruction, "", {"name": task.name})

    async def start(self, context: EnvironmentContext) -> None:
        """Raises `SandboxUnavailable` where the machine confines no box, and `BoxLost` where one does not do all its work."""
        async with Box(8, 256) as box:
            await box.begin()
            await box.unpack(_archive((), "/app"))
            await box.end()
            await box.renew()
            await box.begin()
            writes = ["/bin/bash", "-c", "echo 1 > /logs/verifier/reward.txt"]
            ran = await box.run(writes, box_variables(), "/app", seconds=60.0)
            await box.end()
            if await box.read("/logs/verifier/reward.txt") != "1\n":
                raise BoxLost(f"a command in a box does not work here: {ran.output!r}, exit code {ran.exit_code}")

    async def close(self) -> None:
        """See `Environment`."""

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Plays the task, ends all that the policy started, and runs the tests. Raises `ValueError` if they give no reward."""
        task = self._tasks[example.index]
        async with Box(task.files_mib, task.memory_mib) as box:
            await box.begin()
            await box.unpack(await asyncio.to_thread(_archive, task.files, task.workdir))
            await self._play(task, box, model, state)
            await box.end()
            await box.renew(task.aside)
            await box.begin()
            await box.unpack(await asyncio.to_thread(_archive, task.tests(), "/tests"))
            variables = {**box_variables(), "HOME": task.tests_home, **task.variables, **task.verifier_variables}
            variables["PYTHONNOUSERSITE"] = "1"
            ran = await box.run(["/bin/bash", "/tests/test.sh"], variables, task.workdir, seconds=task.verifier_seconds)
            await box.end()
            state |= {"verifier_output": ran.output[-_KEPT:], "verifier_exit_code": ran.exit_code}
            if ran.killed:
                raise RuntimeError(f"task {task.name!r}: its tests were killed: {ran.killed}; {_end(ran.output)}")
            as_json, as_text = [await box.read(f"/logs/verifier/reward.{kind}") for kind in ("json", "txt")]
        state["rewards"] = _rewards(as_json, as_text, f"task {task.name!r}: {_end(ran.output)}")
        state["reward"] = state["rewards"].pop("reward")

    async def _play(self, task: HarborTask, box: Box, model: Model, state: dict[str, Any]) -> None:
        """Lets the policy work until it calls no tool, or its time is over; then what it has done counts, as in Harbor."""
        until = time.monotonic() + task.agent_seconds
        tool = self._bash(task, box, until)
        state["timed_out"] = False
        try:
            async with asyncio.timeout(task.agent_seconds if math.isfinite(task.agent_seconds) else None) as deadline:
                messages = [{"role": "user", "content": task.instruction}]
                reply = await play_with_tools(model, messages, [tool], state, self._limits)
                state["answer"] = "" if reply.calls or reply.malformed else reply.content
        except TimeoutError:
            if not deadline.expired():
                raise
            state |= {"timed_out": True, "answer": ""}

    def _bash(self, task: HarborTask, box: Box, until: float) -> ToolFunction:
        variables = {**box_variables(), **task.variables}

        async def bash(command: str) -> str:
            """Runs a command in a shell and returns its output.

            Each call is a new shell in the task's directory. Files stay, and what runs in the background.

            Args:
                command: such as ls -la
            """
            seconds = max(min(self._call_seconds, until - time.monotonic()), 0.1)
            # A call that is cancelled at the policy's deadline ends by its own: a box serves one request at a time.
            run = box.run(["/bin/bash", "-c", command], variables, task.workdir, seconds=seconds)
            running = asyncio.ensure_future(run)
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            try:
                ran = await asyncio.shield(running)
            except BoxLost as error:
                raise ToolUnavailable(str(error)) from error
            if ran.killed:
                reason = f"it took longer than {seconds:g} s" if ran.killed == "deadline" else "it wrote too much"
                raise ToolError(f"the command was killed: {reason}\n{ran.output}")
            return ran.output if ran.exit_code == 0 else f"{ran.output}\n[exit code {ran.exit_code}]"

        return tool_from(bash)

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the reward that the tests wrote. Their other numbers, and the counts of the tool, are metrics."""
        rollout.metrics |= tool_metrics(rollout.state)
        rollout.metrics |= {f"reward/{name}": value for name, value in rollout.state["rewards"].items()}
        rollout.metrics["timed_out"] = float(rollout.state["timed_out"])
        return float(rollout.state["reward"])

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """See `Environment`."""
        raise NotImplementedError("harbor scores each rollout by itself")


def _rewards(as_json: str | None, as_text: str | None, where: str) -> dict[str, float]:
    """Returns the numbers that the tests wrote, with one named `reward`. Two rewards that differ are none.

    A program of the policy's that the tests ran may have written a file, too.
    """
    named = None if as_json is None else _named_numbers(as_json)
    if as_json is not None and named is None:
        raise ValueError(f"reward.json is {as_json[:200]!r}; expected an object of numbers with reward; {where}")
    reward = None if as_text is None else number_in(as_text)
    if as_text is not None and reward is None:
        raise ValueError(f"reward.txt is {as_text[:200]!r}; expected a number such as 0.5; {where}")
    if named is not None and reward not in (None, named["reward"]):
        raise ValueError(
            f"reward.json says {named['reward']:g} and reward.txt {reward:g}; write one, or the same; {where}"
        )
    if reward is not None and named is None:
        named = {"reward": reward}
    if named is None:
        raise ValueError(f"the tests wrote neither reward.json nor reward.txt in /logs/verifier; {where}")
    return named


def _named_numbers(text: str) -> dict[str, float] | None:
    """The numbers of a JSON object, or one number as `reward`; None for anything else, and for a name that is there twice."""
    try:
        found = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    pairs = found if isinstance(found, list) else [("reward", found)]
    named = dict[str, float]()
    for pair in pairs:
        name, value = pair if isinstance(pair, tuple) else ("", None)
        if type(value) not in (int, float) or name in named:
            return None
        try:
            named[name] = float(value)
        except OverflowError:  # an integer of over 308 digits
            return None
    return named if "reward" in named and all(map(math.isfinite, named.values())) else None


def _end(output: str) -> str:
    return f"the end of the tests' output is {output[-500:].strip()!r}"


def _archive(files: Sequence[Placed], workdir: str) -> bytes:
    """A tar of files at their paths in a box, and of the working directory. Links stay links."""
    written = io.BytesIO()
    at_paths = {placed.path: placed for placed in files}
    with tarfile.open(fileobj=written, mode="w") as archive:
        for placed in at_paths.values():
            if placed.file.is_dir() and not placed.file.is_symlink():
                _add_directory(archive, placed.path, placed.mode)
            else:
                archive.add(placed.file, placed.path.strip("/"), recursive=False, filter=partial(_plain, placed=placed))
        if workdir not in at_paths:
            _add_directory(archive, workdir, None)
    return written.getvalue()


def _add_directory(archive: tarfile.TarFile, path: str, mode: int | None) -> None:
    if name := path.strip("/"):
        directory = tarfile.TarInfo(name)
        # Where root may do all, whatever the mode, so may the one user of a box.
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755 if mode is None else mode | 0o700
        archive.addfile(directory)


def _plain(member: tarfile.TarInfo, placed: Placed) -> tarfile.TarInfo:
    if not (member.isfile() or member.issym() or member.islnk()):
        raise ValueError(f"{placed.path} is no file, no link and no directory")
    member.mode = member.mode & 0o755 | 0o600 if placed.mode is None else placed.mode
    return member


def _fingerprint(tasks: Sequence[HarborTask]) -> str:
    """A digest of all that decides how the tasks are played."""
    digest = blake2b(digest_size=16)
    for task in tasks:
        settings = [getattr(task, each.name) for each in fields(task) if each.name not in ("directory", "files")]
        digest.update(repr(settings).encode())
        for file, path, mode in [*task.files, *task.tests()]:
            digest.update(os.fsencode(path) + (b"\0" if mode is None else f"\0{mode:o}".encode()))
            if file.is_symlink():
                digest.update(b"-> " + os.fsencode(file.readlink()) + b"\0")
            elif file.is_file():
                is_program = file.stat().st_mode & 0o100  # the other bits depend on who has checked the file out
                digest.update(blake2b(file.read_bytes(), person=b"x" if is_program else b"").digest())
    return digest.hexdigest()
