"""How a command finds its job: named with `--job`, or the only one at or below the working directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cli.arguments.job import job_of
from counterpoint.cli.main import main
from tests.support.past_jobs import make_job

ON_A_JOB = (["status"], ["logs"], ["show", "--step", "1"], ["servers"], ["stop", "absent"], ["pause", "absent"])
"""Commands that read a job, or refuse what is asked of a run that it does not have."""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(directory: Path) -> Path:
    """Makes a job of one run."""
    directory.mkdir(parents=True)
    make_job(directory)
    return directory


def answer_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(words)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("words", ON_A_JOB, ids=" ".join)
def test_a_command_takes_the_only_job_below_the_working_directory(
    at: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (at / "outputs").mkdir()
    without = answer_of(words, capsys)
    made(at / "outputs" / "one")
    (at / "outputs" / "no job").mkdir()
    named = answer_of([*words, "--job", "outputs/one"], capsys)
    code, shown, error = answer_of(words, capsys)
    assert error.splitlines()[0] == "--job outputs/one", "which job it is, is said"
    assert (code, shown, "".join(error.splitlines(keepends=True)[1:])) == named
    assert named != without


@pytest.mark.parametrize("words", ON_A_JOB, ids=" ".join)
def test_a_command_chooses_none_of_several_jobs(at: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    made(at / "outputs" / "one")
    made(at / "two")
    code, _, error = answer_of(words, capsys)
    assert code == 2
    assert "outputs/one, two" in error
    assert "--job DIRECTORY" in error


@pytest.mark.parametrize("mark", ["job.json", "cluster_job.json", "run_a/control/x", "trainer/metrics.jsonl"])
def test_each_kind_of_job_is_found_by_what_it_holds(at: Path, mark: str) -> None:
    file = at / "outputs" / "one" / mark
    file.parent.mkdir(parents=True)
    file.touch()
    assert job_of(argparse.Namespace(job=None)) == Path("outputs", "one")


def test_the_working_directory_goes_before_what_is_below_it(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = made(at / "one")
    made(job / "copies" / "two")
    monkeypatch.chdir(job)
    assert answer_of(["logs"], capsys) == answer_of(["logs", "--job", str(job)], capsys)


def test_a_link_to_a_job_is_no_other_job(at: Path) -> None:
    made(at / "outputs" / "one")
    (at / "outputs" / "newest").symlink_to("one")
    assert job_of(argparse.Namespace(job=None)).resolve() == at / "outputs" / "one"


def test_a_directory_that_may_not_be_read_is_passed_over(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(at / "one")
    (at / "theirs").mkdir()
    glob = Path.glob

    def refused(directory: Path, pattern: str) -> Iterator[Path]:
        if directory.name == "theirs":  # a stat within it fails where the directory can be listed, but not searched
            raise PermissionError(directory)
        return glob(directory, pattern)

    monkeypatch.setattr(Path, "glob", refused)
    assert job_of(argparse.Namespace(job=None)) == Path("one")


def test_a_run_of_a_named_job_is_stopped_and_not_a_job_of_the_same_name(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(at / "one")
    (at / "a").mkdir()
    (at / "a" / "cluster_job.json").touch()
    code, _, error = answer_of(["stop", "a", "--job", "one"], capsys)
    assert code == 2
    assert "cluster_job.json" not in error
    assert "one" in error


@pytest.mark.parametrize("command", ["status", "show", "track", "wait"])
def test_a_directory_that_stands_alone_names_the_job_unless_another_is_named(
    at: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    job = made(at / "one")
    made(at / "two")
    alone = answer_of([command, str(job)], capsys)
    assert alone == answer_of([command, "--job", str(job)], capsys)
    assert "2 jobs" not in alone[2]
    code, _, error = answer_of([command, str(job), "--job", str(at / "two")], capsys)
    assert code == 2
    assert str(job) in error
    assert str(at / "two") in error
