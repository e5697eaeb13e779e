"""Has a module start another command than its own, as the `Child` that it would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from counterpoint.transport.process.child import Child


def start_instead(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, command: Callable[[Sequence[str]], Sequence[str]]
) -> None:
    """Every child of `module` runs what `command` returns for its own."""

    def started(name: str, given: Sequence[str], **how: Any) -> Child:
        return Child(name, command(given), **how)

    monkeypatch.setattr(module, "Child", started)
