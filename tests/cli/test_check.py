"""What is checked before a run: operators' code that never finishes loading ends in an error, and nothing of it stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cli.check
from cli.check import check_imports
from cli.errors import UserError
from cli.job import JobConfig
from cli.load import load


@pytest.mark.slow
def test_a_module_that_waits_while_it_is_imported_is_named(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "nobody_writes"
    os.mkfifo(fifo)
    (tmp_path / "waiting.py").write_text(f"open({str(fifo)!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    monkeypatch.setattr(cli.check, "CHECK_SECONDS", 5.0)
    config = load(JobConfig, job_file, ["--orchestrator.advantage.kind", "waiting:advantage"])
    with pytest.raises(UserError, match="waiting:advantage: not loaded within 5 s"):
        check_imports([config.orchestrator])
    with pytest.raises(OSError, match="No such device or address"):  # which says that the child waits there no longer
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
