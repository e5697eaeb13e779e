"""Holds a space against the one that an experiment began with: what is resumed with another space would mix two searches."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.search.spaces import Function
from counterpoint.tune.search.variants import flat_name, unresolved

_LONGEST = 200
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of a function within a choice; it differs in each process."""


def describe(space: dict[str, Any]) -> dict[str, str]:
    """Each domain and grid by flat name; functions only by their presence, since they have no form that is saved."""
    domains, grids = unresolved(space)
    described = {
        flat_name(path): "sample_from" if isinstance(domain, Function) else repr(domain)
        for path, domain in domains.items()
    }
    described |= {flat_name(path): f"grid_search({values!r})" for path, values in grids.items()}
    described = {name: _ADDRESS.sub("", text) for name, text in described.items()}
    return {name: text if len(text) <= _LONGEST else _digest(text) for name, text in described.items()}


def check_same_space(space: dict[str, Any], described: dict[str, str]) -> None:
    """Raises `TuneError` that names the keys in which the space is not what it was."""
    now = describe(space)
    changes = [
        f"{name} was {described.get(name, 'not searched')}, is {now.get(name, 'not searched')}"
        for name in sorted({*now, *described})
        if now.get(name) != described.get(name)
    ]
    if changes:
        raise TuneError(
            f"the space is not that of the experiment that is resumed: {'; '.join(changes)}. "
            "Resume with the same space, or begin another experiment"
        )


def _digest(text: str) -> str:
    return f"{text[:60]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
