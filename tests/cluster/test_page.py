"""The job of `docs/cluster.md` works as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


def block(language: str, containing: str) -> str:
    """The page's first block of a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return next(text for text in blocks if containing in text)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["toml", "python"])
def test_the_job_of_the_page_works_as_written(tmp_path: Path, way: str) -> None:
    (tmp_path / "adding.py").write_text(block("python", "class Adder"))
    (tmp_path / "adding.toml").write_text(block("toml", 'name = "adding"'))
    (tmp_path / "run.py").write_text(block("python", "JobBuilder"))
    program = ["-m", "counterpoint.cli.main", "submit", "adding.toml"] if way == "toml" else ["run.py"]
    completed = subprocess.run(
        [sys.executable, *program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "done" in completed.stdout
    assert "4 + 4 = 8" in (tmp_path / "outputs" / "adding" / "logs" / "client-0.log").read_text()
