"""What the process of a job made of a function finds: variables, and the packages of the project's extras."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution

from counterpoint.transport.errors import UserError

PROJECT = "counterpoint"
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[([^\]]*)\])?[^;]*(?:;.*extra == ['"]([\w.-]+)['"])?""")


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Variables of a process, and extras of which it needs the packages."""

    env_vars: Mapping[str, str] = field(default_factory=dict)
    extras: Sequence[str] = ()

    def check(self) -> None:
        """Raises `UserError` naming packages of the extras that are not installed: nothing is installed on the way."""
        if missing := sorted({package for extra in self.extras for package in _missing_of(extra)}):
            raise UserError(
                f"extras = {list(self.extras)}: not installed: {', '.join(missing)}; "
                f"install {PROJECT}[{','.join(self.extras)}] where the job runs"
            )


def create_environment(
    env_vars: Mapping[str, str] | None = None, extras: Sequence[str] | None = None
) -> ProcessEnvironment:
    """Returns the environment with these variables, which a job's process gets beside those of its node, and extras."""
    return ProcessEnvironment(dict(env_vars or {}), tuple(extras or ()))


def _missing_of(extra: str) -> list[str]:
    known = distribution(PROJECT).metadata.get_all("Provides-Extra") or []
    if extra not in known:
        raise UserError(f"extras: {PROJECT} has no extra {extra!r}; it has {', '.join(sorted(known))}")
    missing: list[str] = []
    for requirement in distribution(PROJECT).requires or []:
        match = _REQUIREMENT.match(requirement)
        if match is None or match[3] != extra:
            continue
        if match[1] == PROJECT:
            missing += [package for other in (match[2] or "").split(",") for package in _missing_of(other.strip())]
        elif not _is_installed(match[1]):
            missing.append(match[1])
    return missing


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
