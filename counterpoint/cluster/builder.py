"""Makes a job's spec: step by step in Python with `JobBuilder`, or from a TOML file with `load_spec`.

Errors are those of a configuration: they name the file, the line, the key, what is allowed, and the nearest key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from counterpoint.cluster.spec import JobSpec, Resources, RestartScope
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.configuration.toml_file import parse, read_text
from counterpoint.transport.errors import UserError


def load_spec(file: str | Path) -> JobSpec:
    """Returns the job that a TOML file describes: the keys of `JobSpec`, and a `[[roles]]` table for each role.

    Raises `UserError` that lists every error, each with its line.
    """
    file = Path(file)
    text = read_text(file)
    return validate(JobSpec, parse(text, file), str(file), text=text)


class JobBuilder:
    """Collects the roles of a job. `build` returns the spec.

    Example: `JobBuilder("demo").role("source", worker="my.module:Source", count=2).build()`.
    """

    def __init__(self, name: str, *, stay: bool = False, lease_seconds: float = 10.0) -> None:
        """Takes the job's own keys (`JobSpec`)."""
        self._job: dict[str, Any] = {"name": name, "stay": stay, "lease_seconds": lease_seconds}
        self._roles: list[dict[str, Any]] = []

    def role(
        self,
        name: str,
        *,
        worker: str | type | None = None,
        command: Sequence[str] | None = None,
        sub_master: str | type | None = None,
        config: Mapping[str, Any] | None = None,
        resources: Resources | Mapping[str, Any] | None = None,
        restart: RestartScope | str = RestartScope.WORKER,
        **keys: Any,
    ) -> JobBuilder:
        """Adds a role, and returns this builder. A class may stand for its import path; `keys` are further keys of `RoleSpec`.

        Raises `UserError` for a class that no other process can import.
        """
        given: dict[str, Any] = {
            "worker": worker if worker is None or isinstance(worker, str) else import_path_of(worker),
            "sub_master": sub_master
            if sub_master is None or isinstance(sub_master, str)
            else import_path_of(sub_master),
            "command": None if command is None else [str(word) for word in command],
            "config": None if config is None else dict(config),
            "resources": resources.model_dump() if isinstance(resources, Resources) else resources,
        }
        written = {key: value for key, value in given.items() if value is not None}
        self._roles.append({"name": name, "restart": str(restart), **written, **keys})
        return self

    def build(self) -> JobSpec:
        """Returns the spec. Raises `UserError` that lists every error."""
        spec = validate(JobSpec, {**self._job, "roles": self._roles}, f"job {self._job['name']!r}")
        require_json(spec)
        return spec


def import_path_of(kind: type) -> str:
    """Returns a class's import path. Raises `UserError` for one that other processes cannot import."""
    if not isinstance(kind, type):
        raise UserError(f"{kind!r:.80} is no class; expected a subclass of Worker, or its import path")
    path = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__":
        raise UserError(
            f"{kind.__qualname__} is defined in the program itself; move it to a module, which workers can import"
        )
    if "." in kind.__qualname__:
        raise UserError(f"{path} is defined inside something else; define it at the top of its module")
    return path


def require_json(spec: JobSpec) -> None:
    """Raises `UserError` naming the first value of a role's `config` that JSON does not have, and for what is no spec."""
    if not isinstance(spec, JobSpec):
        raise UserError(
            f"{spec!r:.80} is no job; expected a JobSpec, as JobBuilder(...).build() and load_spec(file) return"
        )
    for role in spec.roles:
        for key, value in role.config.items():
            try:
                json.dumps(value, allow_nan=False)  # refuses what orjson would change, such as infinity or a date
                orjson.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"job {spec.name!r}: config.{key} of role {role.name!r} is {value!r:.80}: {error}; expected a value that "
                    "JSON has: text, number, true or false, list, table"
                ) from None
