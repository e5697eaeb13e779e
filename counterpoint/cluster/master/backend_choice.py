"""Finds the class of a backend by its name, or by an import path for one of the user's own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Backend
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.spec import JobSpec

NAMES = {
    "local": "counterpoint.cluster.backends.local:LocalBackend",
    "ray": "counterpoint.cluster.backends.on_ray:RayBackend",
}


def backend_class(name: str) -> Any:
    """Returns the class. Raises `ClusterError` naming what is wrong with the name."""
    module_name, colon, class_name = NAMES.get(name, name).partition(":")
    if not colon:
        raise ClusterError(
            f"backend = {name!r}: expected one of {', '.join(NAMES)}, or the import path `package.module:Class` of your own"
        )
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        hint = ": install counterpoint[ray]" if name == "ray" else ""
        raise ClusterError(f"backend = {name!r} cannot be imported: {error}{hint}") from error
    except AttributeError:
        raise ClusterError(f"backend = {name!r}: {module_name} has no {class_name}") from None


def open_backend(name: str, spec: JobSpec, directory: Path, epoch: int, options: dict[str, Any]) -> Backend:
    """Makes the backend, in the name of the epoch. Raises `ClusterError`."""
    try:
        backend: Backend = backend_class(name)(spec, directory, epoch, **options)
    except TypeError as error:
        raise ClusterError(f"backend = {name!r} does not take {sorted(options)}: {error}") from error
    return backend
