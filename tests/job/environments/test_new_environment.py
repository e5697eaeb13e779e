"""`counterpoint env new`: what it writes works at once, and it overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.load import load_environment
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.environments.new_environment import write_environment
from counterpoint.transport.errors import UserError


def test_the_new_environment_loads_and_its_job_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, test, file = write_environment("loaded_sums", tmp_path / "new")
    assert [path.name for path in (module, test, file)] == ["loaded_sums.py", "test_loaded_sums.py", "loaded_sums.toml"]
    monkeypatch.syspath_prepend(str(module.parent))
    run = load(JobConfig, file, []).orchestrator
    (environment,) = run.environments
    (evaluated,) = run.evaluations[0].environments
    assert load_environment(evaluated).example(0) != load_environment(environment).example(0)
    assert len(load_environment(environment)) == 100
    assert (
        load_environment(EnvironmentConfig(name="a", kind="loaded_sums:LoadedSums", args={"examples": 7})).__len__()
        == 7
    )


@pytest.mark.slow
def test_the_new_test_passes(tmp_path: Path) -> None:
    _, test, _ = write_environment("some_sums", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", test.name]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("precious")
    with pytest.raises(UserError, match=r"test_mine\.py: there already"):
        write_environment("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]


def test_a_package_of_that_name_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    with pytest.raises(UserError, match=r"mine/__init__\.py: there already"):
        write_environment("mine", tmp_path)


@pytest.mark.parametrize("name", ["two words", "class", "Mine", "9lives", "../up", "json", "numpy", "counterpoint", ""])
def test_a_name_that_is_no_modules(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=repr(name)):
        write_environment(name, tmp_path)
    assert not list(tmp_path.iterdir())
