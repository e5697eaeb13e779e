"""`make test` plays each promise of the README with real processes, and it and `make test-rest` are every test once."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import BENCHMARKS, LONGEST
from tests.test_imports import REPOSITORY

PROMISES = {
    "vLLM computes with the weights that were proven, and its routing is the trainer's",
    "any process may be killed, and each step is trained once",
    "many runs share one trainer and one fleet",
    "the unmodified Tinker SDK trains",
    "an agent that knows an OpenAI base URL is trained token for token",
    "each target of a sweep runs once",
    "a tuner that is killed repeats no result",
    "a cluster's workers are killed, and each record counts once",
    "a run is watched and changed in a browser",
}
"""Each is the name of the marker `promise` on one test or several."""


def test_each_promise_has_a_test_that_takes_long() -> None:
    found = Counter[str]()
    for path in (REPOSITORY / "tests").glob("*/**/test_*.py"):
        text = path.read_text()
        names = re.findall(r'pytest\.mark\.promise\("(.*?)"\)', text)
        found.update(names)
        assert not names or "pytest.mark.slow" in text, f"{path}: `make test` plays what is fast anyhow"
    assert found.keys() == PROMISES


def test_the_parts_of_all_tests_are_each_others_complement() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(r"^PROMISED := promise or not \(slow or vllm\)$", makefile, re.MULTILINE)
    recipes = dict(re.findall(r"^(test[\w-]*): .*\n\t\$\(PYTEST\)(.*) \$\(ARGS\)$", makefile, re.MULTILINE))
    assert recipes == {"test": ' -m "$(PROMISED)"', "test-rest": ' -m "not ($(PROMISED))"', "test-all": ""}


def test_files_that_begin_first_and_last_are_there() -> None:
    assert [file for file in (*LONGEST, BENCHMARKS) if not (REPOSITORY / file).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_the_readme_begins_with_two_commands() -> None:
    block = (REPOSITORY / "README.md").read_text().split("```")[1]
    assert re.findall(r"^(.+?) *#", block, re.MULTILINE) == ["make demo", "make test"]


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("first", "second", "code", "last", "reruns"),
    [
        (
            "8700 passed, 3600 deselected, 1 rerun in 500.25s (0:08:20)",
            "3 failed, 3600 passed, 80 skipped, 2 rerun, 2 errors in 900.5s (0:15:00)",
            2,
            "3 failed, 12300 passed, 80 skipped, 2 error, 3 rerun in 1400.75s",
            [3, 2],
        ),
        ("1 failed, 1 passed, 3 rerun in 1.00s", "2 passed in 1.00s", 2, "1 failed, 3 passed, 3 rerun in 2.00s", [3, 0]),
        ("5 passed in 1.00s", "2 passed in 1.00s", 0, "7 passed in 2.00s", [3, 3]),
        ("5 passed in 1.00s", "Killed", 1, "pytest did not finish", [3, 3]),
    ],
)  # fmt: skip
def test_continuous_integration_counts_both_parts_and_plays_three_at_most_again(
    first: str, second: str, code: int, last: str, reruns: list[int], tmp_path: Path
) -> None:
    """Plays `.ci/run` with a `make` that prints pytest's last lines."""
    for script in (REPOSITORY / ".ci").iterdir():
        executable(tmp_path / ".ci" / script.name, "exit 0")
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci" / "run")
    for part, line in (("test", first), ("test-rest", second)):
        failed = int("failed" in line or "Killed" in line) * 2
        (tmp_path / part).write_text(f"echo '{line}'; exit {failed}\n")
    executable(tmp_path / "bin" / "make", 'echo "$@" >> called; if [ -f "$1" ]; then . "./$1"; fi')
    variables = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    played = subprocess.run([tmp_path / ".ci" / "run"], env=variables, capture_output=True, text=True, check=False)
    assert (played.returncode, played.stdout.splitlines()[-1]) == (code, last), played.stderr
    called = (tmp_path / "called").read_text()
    assert re.findall(r"^test.* --max-suite-reruns (\d)", called, re.MULTILINE) == list(map(str, reruns))
