"""What systemd's journal reads has the priority of its record in each line; what goes elsewhere stays as it is."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from counterpoint.transport.process.journal import formatter_for, prioritized


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A file that systemd would have opened for this process."""
    with (tmp_path / "journal").open("w") as file:
        found = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        yield file


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7)],
)
def test_every_line_of_a_record_has_its_priority(journal: TextIO, level: int, priority: int) -> None:
    record = logging.LogRecord("a", level, "x.py", 1, "one\n\ntwo", None, None)
    said = formatter_for(journal, logging.Formatter("%(message)s")).format(record)
    assert said == f"<{priority}>one\n\n<{priority}>two"
    assert prioritized("one", level, journal) == f"<{priority}>one"


def test_other_files_get_no_priorities(journal: TextIO, tmp_path: Path) -> None:
    plain = logging.Formatter("%(message)s")
    with (tmp_path / "log").open("w") as log:
        for other in (log, io.StringIO()):
            assert formatter_for(other, plain) is plain
            assert prioritized("one", logging.ERROR, other) == "one"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["orchestrator", "run"])
def test_a_commands_error_has_the_priority_of_one(journal: TextIO, command: str) -> None:
    given = [sys.executable, "-m", "counterpoint.cli.main", command, "missing.toml"]
    assert subprocess.run(given, stderr=journal, check=False).returncode == 2
    assert Path(journal.name).read_text().startswith("<3>counterpoint: error: ")
