"""Reads directories of tasks in Harbor's format, for a box. Refuses a task that needs more, by what it needs.

The format is that of Harbor 0.24 (schema 1.4). A box (`counterpoint/environments/sandbox/box.py`) is no container: a task that
needs an image, a network or services is refused when it is loaded.
"""

from __future__ import annotations

import fnmatch
import math
import re
import reprlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from counterpoint.environments.sandbox.builder import HOME, TESTS_HOME
from counterpoint.environments.tasks.dockerfile import Dockerfile, Placed, below, check_image

MOST_FILES_MIB = 1024
"""Files of a box are in memory, so a task's `storage_mb` counts up to here."""
MEMORY_MIB = 2048
MOST_MEMORY_MIB = 1 << 40
VERIFIER_SECONDS = 600.0
MOST_SECONDS = 1e7
"""The longest time that may be set: far below what system calls take."""
_MOST_ARCHIVE_BYTES = 64 << 20
_MOST_REFUSED = 20
"""Tasks that one refusal names."""
_OF_PROJECTS = (
    *(
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "setup.py",
        "pyproject.toml",
    ),
    *(
        "package.json",
        "node_modules",
        ".npmrc",
        "tsconfig.json",
        "Cargo.toml",
        ".cargo",
        "go.mod",
        "go.work",
        "Gemfile",
        ".git",
    ),
)
"""Files in which a program looks for a project, from its own files upwards to the root."""
_HOME = re.compile(
    r"~(?=\W|$)|\bHOME\b|/root\b|\bhome (?:dir|folder)|--global\b|(?<!\w)\.\w*(?:rc|profile|config)\b", re.IGNORECASE
)
"""What an instruction says that is about the home: its name, or a file with which programs start."""
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task, as it is played."""

    name: str
    directory: Path
    instruction: str
    workdir: str
    files: tuple[Placed, ...]
    """What begins in the box. A directory stands for itself, without what is in it."""
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]
    agent_seconds: float
    verifier_seconds: float
    memory_mib: int
    files_mib: int
    tests_home: str
    """HOME of the tests: a new directory, unless the task is about its home, since the policy then works there."""

    def tests(self) -> tuple[Placed, ...]:
        """What enters the box for the tests."""
        return tuple(below(self.directory / "tests", "/tests"))

    @property
    def aside(self) -> tuple[str, ...]:
        """Names at the root that the tests do not meet if the policy made them: programs would read them for /tests, too."""
        if self.workdir == "/":
            return ()
        own = {PurePosixPath(placed.path).parts[1] for placed in self.files if placed.path != "/"}
        return tuple(name for name in _OF_PROJECTS if name not in own)


def load_tasks(root: Path, wanted: Sequence[str]) -> list[HarborTask]:
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
    box = Dockerfile(directory / "environment")
    try:
        _read_environment(box, directory / "environment", environment)
    except ValueError as error:
        needs.append(str(error))
    needs += [f"there is no {file}" for file in ("instruction.md", "tests/test.sh") if not (directory / file).is_file()]
    if needs:
        raise ValueError("; ".join(needs))
    if sum(placed.file.stat().st_size for placed in box.files if placed.file.is_file()) > _MOST_ARCHIVE_BYTES:
        raise ValueError(f"environment/ has more than {_MOST_ARCHIVE_BYTES >> 20} MiB, which a box does not take")
    instruction = _CANARY.sub("", (directory / "instruction.md").read_text()).strip()
    is_about_home = _HOME.search(instruction) or any(f"{path}/".startswith(f"{HOME}/") for _, path, _ in box.files)
    return HarborTask(
        name,
        directory,
        instruction,
        box.workdir,
        tuple(box.files),
        box.variables | _variables(environment),
        _variables(verifier),
        _seconds(agent, math.inf),
        _seconds(verifier, VERIFIER_SECONDS),
        _mebibytes(environment, "memory", MEMORY_MIB),
        min(_mebibytes(environment, "storage", MOST_FILES_MIB), MOST_FILES_MIB),
        HOME if is_about_home else TESTS_HOME,
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


def _read_environment(box: Dockerfile, place: Path, environment: Mapping[str, Any]) -> None:
    """Reads what begins in the box. Raises `ValueError`."""
    image, has_dockerfile = environment.get("docker_image"), (place / "Dockerfile").is_file()
    if image:
        try:
            check_image(str(image))
        except ValueError as error:
            raise ValueError(f"[environment] docker_image: {error}") from error
    elif has_dockerfile:
        box.read()
    else:
        raise ValueError("there is neither environment/Dockerfile nor [environment] docker_image")
    if workdir := environment.get("workdir"):
        try:
            box.go_to(str(workdir))
        except ValueError as error:
            raise ValueError(f"[environment] workdir: {error}") from error
    if image and not has_dockerfile:
        box.copy_all()


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
    if "timeout_sec" not in table:
        return default
    seconds = table["timeout_sec"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"timeout_sec is {reprlib.repr(seconds)}; expected seconds above 0, at most {MOST_SECONDS:g}")
    return float(seconds)


def _mebibytes(environment: Mapping[str, Any], name: str, default: int) -> int:
    """A size in `NAME_mb`, or in `NAME` as the format before had it, such as "2G"."""
    given = environment.get(f"{name}_mb", environment.get(name, default))
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", str(given).strip().upper())
    size = 0.0 if found is None else float(found[1]) * {"K": 1 / 1024, "G": 1024}.get(found[2], 1)
    if not 0 < size <= MOST_MEMORY_MIB:
        raise ValueError(f"[environment] {name} is {reprlib.repr(given)}; expected MiB, or a size such as 2G")
    return math.ceil(size)
