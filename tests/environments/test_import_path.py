"""What a configuration names by an import path: where it is found, and what it cannot hide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.environments.import_path import import_advice, import_module

CHECKOUT = Path(__file__).parents[2]


def imported(here: Path, name: str, attribute: str) -> str:
    """An attribute of a module, imported by a process that works in `here`, or the error."""
    program = f"from counterpoint.environments.import_path import import_module as of; print(of({name!r}).{attribute})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip()


@pytest.mark.slow
def test_a_module_of_the_working_directory_is_found_last(tmp_path: Path) -> None:
    (tmp_path / "of_a_user.py").write_text("import random\nVALUE = 7, random.SystemRandom.__module__\n")
    (tmp_path / "random.py").write_text("raise SystemExit('hidden')\n")
    (tmp_path / "run.py").write_text("VALUE = 8\n")
    assert imported(tmp_path, "of_a_user", "VALUE") == "(7, 'random')"
    assert imported(tmp_path, "run", "VALUE") == "8", "a name of ours is free"


@pytest.mark.slow
def test_a_folder_of_ours_is_no_module_by_itself() -> None:
    assert "No module named 'transport'" in imported(CHECKOUT, "transport.records", "COLUMNS")


def test_an_old_name_of_ours_is_answered_with_the_new_one() -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        import_module("environments.tasks.reverse_text")
    assert "counterpoint.environments.tasks.reverse_text" in import_advice(
        "environments.tasks.reverse_text", error.value
    )
    assert "PYTHONPATH" in import_advice("of_nobody.tasks", ModuleNotFoundError("", name="of_nobody"))
