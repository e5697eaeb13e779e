"""The suite runs where other packages have brought plugins of pytest that it does not use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["benchmark", "schemathesis"])
def test_a_plugin_that_warns_as_it_starts_does_not_end_the_suite(name: str, tmp_path: Path) -> None:
    """As pytest-benchmark 5.1 does beside xdist; warnings are errors here."""
    (tmp_path / "foreign_plugin.py").write_text(
        "def pytest_configure():\n    raise UserWarning('disabled beside xdist')\n"
    )
    (tmp_path / "foreign-1.0.dist-info").mkdir()
    (tmp_path / "foreign-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (tmp_path / "foreign-1.0.dist-info" / "entry_points.txt").write_text(f"[pytest11]\n{name} = foreign_plugin\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/test_units.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
