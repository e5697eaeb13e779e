"""Where weights that are sent to a server come into, in place of the machine's shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.inference.plugin import receiving


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setattr(receiving, "SHARED_MEMORY", root)
    return root
