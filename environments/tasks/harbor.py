"""`harbor`: directories of tasks in Harbor's format, played with a shell in a box, and scored by their own tests.

Of a task are read: `task.toml`, instruction.md, `environment/` (what begins in the box) and `tests/`, whose `test.sh` writes
/logs/verifier/reward.json or reward.txt. The format is that of Harbor 0.24 (schema 1.4). A box (`environments/sandbox/box.py`) is
no container: a task that needs an image, a network or services is refused when it is loaded, by name. The tests enter the box
when no process of the policy's lives any more. docs/environments.md says what that stops and what not.
"""

from __future__ import annotations

import asyncio
import fnmatch
import io
import json
import math
import os
import re
import shlex
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.reward import number_in
from counterpoint.environments.sandbox.box import Box, BoxLost, box_variables
from counterpoint.environments.tools.definition import ToolError, ToolFunction, ToolUnavailable, tool_from
from counterpoint.environments.tools.play import ToolLimits, play_with_tools, tool_metrics
from counterpoint.transport.records import Rollout

MOST_FILES_MIB = 1024
"""Files of a box are in memory, so a task's `storage_mb` counts up to here."""
MEMORY_MIB = 2048
VERIFIER_SECONDS = 600.0
_MOST_ARCHIVE_BYTES = 64 << 20
_MOST_REFUSED = 20
"""Tasks that one refusal names."""
_KEPT = 16 * 1024
"""Characters of the tests' output that the rollout's state has."""
_IMAGE = re.compile(r"(?:docker\.io/)?(?:library/)?(debian|ubuntu|python)(?::([\w.-]+))?")
_TAKEN = ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "sys", "python", "tests", "logs", "solution")
"""What is not for an environment's files: it is the machine's, or that of a phase."""
_WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task, as it is played."""

    name: str
    directory: Path
    instruction: str
    workdir: str
    files: tuple[tuple[Path, str], ...]
    """What begins in the box: files and their paths there. A directory stands for itself, without what is in it."""
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]
    agent_seconds: float
    verifier_seconds: float
    memory_mib: int
    files_mib: int


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
        if call_seconds <= 0:
            raise ValueError(f"call_seconds = {call_seconds}: expected a time above 0")
        self._call_seconds = call_seconds
        self._tasks = _load(Path(path).expanduser().resolve(), tasks)
        self.fingerprint = _fingerprint(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        task = self._tasks[index]
        return Example(index, task.instruction, "", {"name": task.name})

    async def start(self, context: EnvironmentContext) -> None:
        """Raises `SandboxUnavailable` where the machine cannot confine a box."""
        async with Box(1, 256) as box:
            await box.begin()

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
            await box.renew()
            await box.begin()
            await box.unpack(await asyncio.to_thread(_archive, _tests(task), "/tests"))
            variables = {**box_variables(), **task.variables, **task.verifier_variables, "PYTHONNOUSERSITE": "1"}
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
    """Returns the numbers that the tests wrote, with one named `reward`. As in Harbor, reward.json counts first."""
    if as_json is not None:
        try:
            found = json.loads(as_json)
        except ValueError:
            found = None
        named = found if isinstance(found, dict) else {"reward": found}
        if "reward" not in named or not all(
            type(each) in (int, float) and math.isfinite(each) for each in named.values()
        ):
            raise ValueError(f"reward.json is {as_json[:200]!r}; expected an object of numbers with reward; {where}")
        return {name: float(value) for name, value in named.items()}
    if as_text is None:
        raise ValueError(f"the tests wrote neither reward.json nor reward.txt in /logs/verifier; {where}")
    if (reward := number_in(as_text)) is None:
        raise ValueError(f"reward.txt is {as_text[:200]!r}; expected a number such as 0.5; {where}")
    return {"reward": reward}


def _end(output: str) -> str:
    return f"the end of the tests' output is {output[-500:].strip()!r}"


def _load(root: Path, wanted: Sequence[str]) -> list[HarborTask]:
    """Reads the tasks. Raises `ValueError` that says all that is wrong."""
    found = sorted(file.parent for file in root.rglob("task.toml"))
    if not found:
        raise ValueError(f"path = {str(root)!r}: there is no task.toml at or below it; expected Harbor's directories")
    tasks, refused, names = [], [], list[str]()
    for directory in found:
        try:
            config = tomllib.loads((directory / "task.toml").read_text())
            name = str(_table(config, "task").get("name") or directory.name)
            names.append(directory.name)
            if wanted and not any(fnmatch.fnmatchcase(each, one) for each in (name, directory.name) for one in wanted):
                continue
            tasks.append(_task(name, directory, config))
        except (OSError, ValueError) as error:
            refused.append(f"{directory.name}: {error}")
    if refused:
        more = f"\n  and {len(refused) - _MOST_REFUSED} more" if len(refused) > _MOST_REFUSED else ""
        lines = "".join(f"\n  {line}" for line in refused[:_MOST_REFUSED])
        raise ValueError(
            f"{len(refused)} of {len(found)} tasks cannot be played here. Name the others in args.tasks, mend these, or play "
            f'them with Docker by kind = "verifiers", whose taskset is harbor (docs/verifiers.md):{lines}{more}'
        )
    if not tasks:
        raise ValueError(f"tasks = {list(wanted)}: none of them is in {str(root)!r}, which has {', '.join(names[:20])}")
    return tasks


def _task(name: str, directory: Path, config: Mapping[str, Any]) -> HarborTask:
    """Reads one task. Raises `ValueError` with all that it needs and a box does not have."""
    needs = [*_needs(config, directory)]
    environment, agent, verifier = (_table(config, key) for key in ("environment", "agent", "verifier"))
    workdir, files, image_variables = "/", list[tuple[Path, str]](), dict[str, str]()
    try:
        workdir, files, image_variables = _environment(directory / "environment", environment)
    except ValueError as error:
        needs.append(str(error))
    needs += [f"there is no {file}" for file in ("instruction.md", "tests/test.sh") if not (directory / file).is_file()]
    if needs:
        raise ValueError("; ".join(needs))
    if sum(file.stat().st_size for file, _ in files if file.is_file()) > _MOST_ARCHIVE_BYTES:
        raise ValueError(f"environment/ has more than {_MOST_ARCHIVE_BYTES >> 20} MiB, which a box does not take")
    return HarborTask(
        name,
        directory,
        _CANARY.sub("", (directory / "instruction.md").read_text()).strip(),
        workdir,
        tuple(files),
        image_variables | _variables(environment),
        _variables(verifier),
        _seconds(agent, math.inf),
        _seconds(verifier, VERIFIER_SECONDS),
        _mebibytes(environment, "memory", MEMORY_MIB),
        min(_mebibytes(environment, "storage", MOST_FILES_MIB), MOST_FILES_MIB),
    )


def _needs(config: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """What a task's configuration asks for beyond a box."""
    environment, agent, verifier = (_table(config, key) for key in ("environment", "agent", "verifier"))
    if any((directory / "environment").glob("*compose*.y*ml")):
        yield "environment/ has a compose file: it needs Docker's services"
    if config.get("steps"):
        yield "it has [[steps]]: only tasks of one step are played"
    network = environment.get("network_mode")
    if network is None and environment.get("allow_internet") is False:
        network = "no-network"
    if network != "no-network":
        yield (
            f"[environment] network_mode is {network or 'not set, which is public'}: a box has no network; if neither the task "
            'nor its tests need one, set network_mode = "no-network"'
        )
    for key, table in (("agent", agent), ("verifier", verifier)):
        if table.get("network_mode") not in (None, "no-network"):
            yield f"[{key}] network_mode is {table['network_mode']}: a box has no network"
        if table.get("user") not in (None, "root", 0):
            yield f"[{key}] user is {table['user']}: a box has one user"
    if verifier.get("environment_mode") == "separate" or verifier.get("environment") or verifier.get("collect"):
        yield "its tests need an environment of their own ([verifier] environment_mode, environment or collect)"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"[environment] os is {environment['os']}"
    for key in ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"):
        if environment.get(key):
            yield f"[environment] {key} is set, which a box does not have"


def _environment(place: Path, environment: Mapping[str, Any]) -> tuple[str, list[tuple[Path, str]], dict[str, str]]:
    """Returns the working directory, the files with their paths in the box, and the variables. Raises `ValueError`."""
    image, dockerfile = environment.get("docker_image"), place / "Dockerfile"
    if image:
        _check_image(str(image), "[environment] docker_image")
        workdir = str(environment.get("workdir") or "/")
        if dockerfile.exists():
            return workdir, [], {}
        return workdir, [*_below(place, workdir)], {}
    if not dockerfile.is_file():
        raise ValueError("there is neither environment/Dockerfile nor [environment] docker_image")
    workdir, files, variables = _Dockerfile(place).read(dockerfile.read_text())
    return str(environment.get("workdir") or workdir), files, variables


def _check_image(image: str, where: str) -> None:
    """Raises `ValueError` for an image that has more than this machine's programs."""
    found = _IMAGE.fullmatch(image)
    if found is None:
        raise ValueError(f"{where} is {image}: only debian, ubuntu and python are played, with this machine's programs")
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    version = re.match(r"\d+\.\d+", found[2] or "")
    if found[1] == "python" and version and version[0] != ours:
        raise ValueError(f"{where} is {image}: this machine's Python is {ours}; take python:{ours} if it will do")


class _Dockerfile:
    """Reads a Dockerfile that is a base image and copies. Raises `ValueError` for any other."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._workdir = PurePosixPath("/")
        self._files: list[tuple[Path, str]] = []
        self._variables: dict[str, str] = {}
        self._images = 0

    def read(self, text: str) -> tuple[str, list[tuple[Path, str]], dict[str, str]]:
        """Returns the working directory, the files with their paths, and the variables."""
        if (self._place / ".dockerignore").exists():
            raise ValueError("environment/ has a .dockerignore, which is not read here")
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
            if line.strip():
                word, _, rest = line.strip().partition(" ")
                self._instruction(word.upper(), rest.strip())
        if not self._images:
            raise ValueError("environment/Dockerfile has no FROM")
        return str(self._workdir), self._files, self._variables

    def _instruction(self, word: str, rest: str) -> None:
        if word in _WITHOUT_EFFECT or (word == "USER" and rest in ("root", "0")):
            return
        if word not in ("FROM", "WORKDIR", "ENV", "COPY"):
            raise ValueError(
                f"environment/Dockerfile has {word} {rest[:60]}: it needs Docker; a box takes FROM, WORKDIR, ENV and COPY only"
            )
        if "$" in rest or "<<" in rest:
            raise ValueError(f"environment/Dockerfile: {word} {rest[:60]}: variables and heredocs are not read here")
        if word == "FROM":
            self._images += 1
            if self._images > 1:
                raise ValueError("environment/Dockerfile has several stages: it needs Docker")
            _check_image(rest, "environment/Dockerfile: FROM")
        elif word == "WORKDIR":
            self._workdir = self._inside(rest)
            self._files.append((self._place, str(self._workdir)))
        elif word == "ENV":
            pairs = shlex.split(rest)
            if not all("=" in pair for pair in pairs):
                raise ValueError(f"environment/Dockerfile: ENV {rest[:60]}: expected NAME=VALUE")
            self._variables |= dict(pair.split("=", 1) for pair in pairs)
        else:
            self._copy(rest)

    def _inside(self, path: str) -> PurePosixPath:
        """A path of the box, relative to the working directory, where files of an environment may be."""
        inside = self._workdir / path
        if ".." in inside.parts or (len(inside.parts) > 1 and inside.parts[1] in _TAKEN):
            raise ValueError(f"environment/Dockerfile: {inside}: this place is not the environment's in a box")
        return inside

    def _copy(self, rest: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        words = [word for word in words if not word.startswith("--chown=")]
        if len(words) < 2 or any(word.startswith("--") for word in words):
            raise ValueError(
                f"environment/Dockerfile: COPY {rest[:60]}: expected files of environment/ and a destination"
            )
        *sources, destination = words
        into = self._inside(destination)
        directories = {str(PurePosixPath(path)) for file, path in self._files if file.is_dir()}
        for source in sources:
            found = (
                sorted(self._place.glob(source.removeprefix("/").removeprefix("./") or "*")) if source != "." else []
            )
            if source.rstrip("/") in (".", "./", ""):
                found = [self._place]
            if not found or not all(each.resolve().is_relative_to(self._place.resolve()) for each in found):
                raise ValueError(f"environment/Dockerfile: COPY {source}: there is no such file in environment/")
            for each in found:
                if each.is_dir():
                    self._files += [(self._place, str(into)), *_below(each, str(into))]
                elif destination.endswith(("/", ".")) or len(words) > 2 or len(found) > 1 or str(into) in directories:
                    self._files.append((each, str(into / each.name)))
                else:
                    self._files.append((each, str(into)))


def _below(place: Path, directory: str) -> Iterator[tuple[Path, str]]:
    """Each file and directory below `place`, and its path below `directory`. Links to directories are not followed."""
    for file in sorted(place.rglob("*")) if place.is_dir() else ():
        yield file, str(PurePosixPath(directory) / file.relative_to(place).as_posix())


def _tests(task: HarborTask) -> tuple[tuple[Path, str], ...]:
    return tuple(_below(task.directory / "tests", "/tests"))


def _archive(files: Sequence[tuple[Path, str]], workdir: str) -> bytes:
    """A tar of files at their paths in a box, and of the working directory. Links stay links."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for file, path in [*files, (None, workdir)]:
            inside = path.strip("/") or "."
            if file is None or (file.is_dir() and not file.is_symlink()):
                directory = tarfile.TarInfo(inside)
                directory.type, directory.mode = tarfile.DIRTYPE, 0o755
                if inside != ".":
                    archive.addfile(directory)
            else:
                archive.add(file, inside, recursive=False, filter=partial(_plain, path=path))
    return written.getvalue()


def _plain(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    if not (member.isfile() or member.issym() or member.islnk()):
        raise ValueError(f"{path} is no file, no link and no directory")
    member.mode = member.mode & 0o755 | 0o600
    return member


def _fingerprint(tasks: Sequence[HarborTask]) -> str:
    """A digest of all that decides how the tasks are played."""
    digest = blake2b(digest_size=16)
    for task in tasks:
        settings = [getattr(task, each.name) for each in fields(task) if each.name not in ("directory", "files")]
        digest.update(repr(settings).encode())
        for file, path in [*task.files, *_tests(task)]:
            digest.update(os.fsencode(path) + b"\0")
            if file.is_symlink():
                digest.update(b"-> " + os.fsencode(file.readlink()) + b"\0")
            elif file.is_file():
                is_program = file.stat().st_mode & 0o100  # the other bits depend on who has checked the file out
                digest.update(blake2b(file.read_bytes(), person=b"x" if is_program else b"").digest())
    return digest.hexdigest()


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = config.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{key} in task.toml is {table!r}; expected a table")
    return table


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    variables = {name: str(value) for name, value in _table(table, "env").items()}
    for name, value in variables.items():
        if "${" in value:
            raise ValueError(
                f"env.{name} is {value}: variables of this machine are not given to a box; write the value"
            )
    return variables


def _seconds(table: Mapping[str, Any], default: float) -> float:
    seconds = table.get("timeout_sec", default)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"timeout_sec is {seconds!r}; expected seconds above 0")
    return float(seconds)


def _mebibytes(environment: Mapping[str, Any], name: str, default: int) -> int:
    """A size in `NAME_mb`, or in `NAME` as the format before had it, such as "2G"."""
    given = environment.get(f"{name}_mb", environment.get(name, default))
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", str(given).strip().upper())
    if found is None or not (size := math.ceil(float(found[1]) * {"K": 1 / 1024, "G": 1024}.get(found[2], 1))):
        raise ValueError(f"[environment] {name} is {given!r}; expected MiB, or a size such as 2G")
    return size
