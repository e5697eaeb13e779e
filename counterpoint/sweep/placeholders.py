"""Names of outputs and inputs in a configuration that is made before it is known where its target will run.

`OutputName` and `InputName` stand for paths until the worker that claimed the target resolves them, so that the paths are in that
worker's region.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutputName:
    """Stands for a path below the target's own output. Without a name, for the output itself."""

    name: str = ""

    def __post_init__(self) -> None:
        _check(self.name)


@dataclass(frozen=True, slots=True)
class InputName:
    """Stands for a path below the root of the worker's region: what is read, such as a data set or another's output."""

    name: str

    def __post_init__(self) -> None:
        _check(self.name)


def resolve_names(config: T, output_path: str, input_root: str) -> T:
    """Returns a copy of the configuration with paths in place of the names: in dicts, lists, tuples, sets and dataclasses."""
    return _resolved(config, output_path.rstrip("/"), input_root.rstrip("/"))  # type: ignore[no-any-return]


def _resolved(value: Any, output_path: str, input_root: str) -> Any:
    if isinstance(value, OutputName):
        return f"{output_path}/{value.name}" if value.name else output_path
    if isinstance(value, InputName):
        return f"{input_root}/{value.name}"
    if isinstance(value, dict):
        return {key: _resolved(each, output_path, input_root) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, output_path, input_root) for each in value]
    if type(value) in (tuple, set, frozenset) or hasattr(value, "_make"):  # which named tuples have
        make = getattr(value, "_make", type(value))
        return make(_resolved(each, output_path, input_root) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: _resolved(each, output_path, input_root) for name, each in found.items()})
    return value


def _check(name: str) -> None:
    if name.startswith("/") or "://" in name or ".." in name.split("/"):
        raise ValueError(f"{name!r} leaves the place that it is to be below: give a relative path without '..'")
