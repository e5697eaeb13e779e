"""Files of a user hide nothing of ours, whatever their names: the first commands work beside them."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

import counterpoint
from tests.support.vllm_server import ServerProcess

COMMAND = Path(sys.executable).with_name("counterpoint")
OURS = sorted(found.name for found in pkgutil.iter_modules(counterpoint.__path__))
PYTHONS = ["random", "json", "types", "logging", "select", "queue", "secrets", "statistics", "tokenize", "code"]
EVALUATION = """
[[orchestrator.evaluations]]
name = "held_out"
environments = [{ name = "my_sums", kind = "my_sums:MySums" }]
examples = 2
interval = 2
"""
LIBRARIES = ["numpy", "torch", "vllm", "transformers", "aiohttp", "pydantic", "zmq", "orjson", "rich", "safetensors"]


def litter(directory: Path, *names: str) -> None:
    """Puts files and folders of these names into a directory, each of which ends whoever imports it."""
    for name in names:
        for file in (directory / name / "__init__.py", directory / f"{name}.py"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"raise SystemExit('the {name} of a user was imported')\n")


@pytest.mark.slow
@pytest.mark.vllm
def test_the_first_commands_work_beside_files_of_any_name(tmp_path: Path, adapter_server: ServerProcess) -> None:
    """A check starts a vLLM as an evaluation does, which has a running one here; a job starts its own otherwise."""
    here, on_the_path = tmp_path / "here", tmp_path / "on_the_path"
    litter(here, *OURS, "counterpoint", *PYTHONS, *LIBRARIES)
    litter(on_the_path, *OURS)
    environment = os.environ | {"PYTHONPATH": str(on_the_path)}

    def counterpoint_(*words: str) -> str:
        done = subprocess.run(
            [COMMAND, *words], cwd=here, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    counterpoint_("env", "new", "my_sums")
    counterpoint_("env", "check", "my_sums:MySums")
    with (here / "my_sums.toml").open("a") as job:
        job.write(EVALUATION)
    counterpoint_("run", "my_sums.toml", "--orchestrator.steps", "2")
    counterpoint_("eval", "my_sums.toml", "--server", adapter_server.url, "--output", "evaluated")
    with subprocess.Popen(
        [COMMAND, "serve", "outputs/my_sums", "--port", "0"],
        cwd=here,
        env=environment,
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
    ) as page:
        assert page.stdout is not None
        assert "http://" in page.stdout.readline()
        page.terminate()


@pytest.mark.parametrize("name", ["random", "numpy", "counterpoint", "pytest"])
def test_an_environment_cannot_have_a_name_that_is_taken(tmp_path: Path, name: str) -> None:
    done = subprocess.run([COMMAND, "env", "new", name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert repr(name) in done.stderr
    assert not [*tmp_path.iterdir()]
