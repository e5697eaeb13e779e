"""Workers find the tests' own modules, and a model directory without weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from counterpoint.environments.workers import supply
from counterpoint.models.tiny_tokenizer import write_tokenizer


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is about how long a worker that died stays away."""
    monkeypatch.setattr(supply, "PAUSE_SECONDS", (0.02, 0.2))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory, longest=1024)
    return directory
