"""Resolves a model's name to its directory in a process of its own, so that no command carries torch along."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.mounts import unmounted
from counterpoint.transport.process.child import run

_READ = frozenset({".json", ".safetensors", ".bin", ".jinja", ".model"})
"""The files of a model that are read, by their suffix."""


def check_model(name: str) -> None:
    """Raises `UserError` for a model that `resolve_model` would not find. Builds and downloads nothing.

    Whether the hub has a model is not known if it does not answer, which is said on standard error.
    """
    if (Path(name) / "config.json").is_file():
        return _check_readable(Path(name))
    from counterpoint.models.build import check_model as check

    try:
        doubt = check(name)
    except ValueError as error:
        raise _refusal(name, str(error)) from None
    if doubt:
        sys.stderr.write(f"not checked: {doubt}\n")


def resolve_model(name: str) -> Path:
    """Returns the directory of the model called `name`, built or downloaded if need be. The child prints progress on stderr.

    Raises `SystemExit` if there is no such model, after the child printed why; `KeyboardInterrupt` with a message on Ctrl-C; and
    `UserError` if the child prints no directory.
    """
    if (Path(name) / "config.json").is_file():
        _check_readable(Path(name))
        return Path(name).resolve()
    if os.path.isabs(name) and unmounted(name):
        raise _refusal(name, f"model = {name!r}: there is no such directory")
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "make-model", name]
    try:
        done = run(f"make-model {name}", command, stderr=None)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted while the model {name} was found or built; nothing else was started. "
            "The same command begins again"
        ) from None
    if done.code != 0:
        raise SystemExit(done.code)
    lines = done.output.decode(errors="surrogateescape").split("\n")
    directory = Path(lines[-2]) if len(lines) > 1 else Path()
    if not directory.is_dir():
        raise UserError(f"make-model {name} printed {str(directory)!r}, which is not a directory")
    _check_readable(directory)
    return directory.resolve()


def _refusal(name: str, reason: str) -> UserError:
    """Returns the error of a model that is not found: `Obstructed` where its file system may not be mounted yet."""
    if os.path.isabs(name) and (place := unmounted(name)):
        return Obstructed(f"{reason}. Nothing is mounted at {place} yet, as it seems: start again when it is")
    return UserError(reason)


def _check_readable(directory: Path) -> None:
    """Raises `UserError` for a file of a model that this user may not read: safetensors would call it missing."""
    for path in sorted(directory.iterdir()):
        try:
            if path.suffix in _READ and path.is_file():
                path.open("rb").close()
        except OSError as error:
            raise UserError(
                f"model = {str(directory)!r}: {path.name} cannot be read by user {os.geteuid()}: {error.strerror}; "
                "give its readers the right to, for example with chmod a+r"
            ) from None
