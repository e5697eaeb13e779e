"""Adapters that were trained elsewhere, in PEFT's format, as states that clients begin with: `tinker://import/weights/NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from counterpoint.run.adapter_description import read_description, require_one_scale
from counterpoint.service.records.structs import ModelRecord
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.transport.errors import UserError
from counterpoint.transport.typed import met

PREFIX = "tinker://import/weights/"


class _Description(msgspec.Struct, frozen=True):
    r: int
    lora_alpha: float
    target_modules: list[str]


def imported(adapters: Mapping[str, Path], path: str) -> ModelRecord | None:
    """Returns the record of a model that begins with a URI's adapter, for any owner, or None for another URI.

    The trainer checks the adapter itself. Blocks. Raises `BadRequest`.
    """
    if not path.startswith(PREFIX):
        return None
    name = path.removeprefix(PREFIX)
    if (directory := adapters.get(name)) is None:
        known = ", ".join(PREFIX + each for each in sorted(adapters))
        raise BadRequest(
            f"{path[:120]!r} is not there; expected {known or 'a name of [tinker.adapters], which has none'}"
        )
    try:
        found = _read(directory)
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path[:120]!r} cannot be read: {error}") from error
    modules = sorted({each.rpartition(".")[2] for each in found.target_modules})
    return ModelRecord(
        "import", "import", "", found.r, modules, start_adapter=str(directory.absolute()), alpha=found.lora_alpha
    )


def check_adapters(adapters: Mapping[str, Path], max_rank: int) -> None:
    """Raises `UserError` for a directory that has no adapter, one that means more than plain LoRA, or one of a higher rank."""
    for name, directory in adapters.items():
        try:
            rank = _read(directory).r
        except (OSError, ValueError) as error:
            raise UserError(
                f"tinker.adapters.{name} = {str(directory)!r} is no adapter that a model can begin with: {error}"
            ) from None
        if rank > max_rank:
            raise UserError(f"tinker.adapters.{name} has rank {rank}, and tinker.max_rank = {max_rank}; raise that")


def _read(directory: Path) -> _Description:
    """Raises `OSError` and `ValueError`."""
    description = read_description(directory)
    require_one_scale(description)
    return msgspec.convert(description, met(_Description))
