"""`counterpoint logs`: finding a log, its last lines, and following it."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.cli.logs import main as logs
from counterpoint.job.reading.log_files import appended, log_files_in
from counterpoint.transport.errors import UserError
from tests.support.past_jobs import make_job


@pytest.fixture
def job(past: Path) -> Path:
    """A job of one run, with a guest."""
    make_job(past)
    (past / "trainer" / "trainer.log").write_text("of the trainer\n")
    (past / "orchestrator.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (past / "inference_0.log").write_text("of vLLM\n")
    return past


def test_a_log_is_found_by_role_and_by_run(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(["test", "--job", str(job), "--lines", "2"]) == 0
    assert capsys.readouterr().out == "line 98\nline 99\n"
    assert logs(["trainer", "--job", str(job)]) == 0
    assert capsys.readouterr().out == "of the trainer\n"
    with pytest.raises(UserError, match=r"'trainr' in .*: inference_0, orchestrator, trainer, test"):
        logs(["trainr", "--job", str(job)])
    assert logs(["--job", str(job)]) == 0
    assert "inference_0, orchestrator, trainer, test" in capsys.readouterr().out


def test_as_many_lines_of_a_log_are_shown_as_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trainer.log").write_text("".join(f"{number} {'x' * 200}\n" for number in range(1000)))
    for count in (0, 1, 900, 2000, 10**30):
        assert logs(["trainer", "--job", str(tmp_path), "--lines", str(count)]) == 0
        shown = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
        assert shown == [str(number) for number in range(max(0, 1000 - count), 1000)]
    with pytest.raises(SystemExit, match="2"):
        logs(["trainer", "--job", str(tmp_path), "--lines", "-1"])
    assert "--lines: '-1': expected a whole number of at least 0" in capsys.readouterr().err


def test_logs_are_asked_for_where_there_is_no_job(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no log; --job names the job's directory"):
        logs(["--job", str(tmp_path)])


def test_each_of_several_runs_has_its_own_log(job: Path) -> None:
    for name in ("orchestrator_other.log", "run_other/orchestrator.log", "run_guest/orchestrator.log"):
        (job / name).parent.mkdir(exist_ok=True)
        (job / name).write_text(name)
    found = {run_id: str(path.relative_to(job)) for run_id, path in log_files_in(job).items()}
    assert found["other"] == "orchestrator_other.log"
    assert found["guest"] == "run_guest/orchestrator.log"
    assert found["test"] == "orchestrator.log"


@pytest.mark.parametrize(
    "content", ["{}", '{"orchestrator": null}', '{"orchestrator": {"run_id": ["test"], "steps": 20}}']
)
def test_a_damaged_job_is_named(job: Path, content: str) -> None:
    (job / "job.json").write_text(content)
    for words in ([], ["test"]):
        with pytest.raises(UserError, match=r"/out/job.json is damaged: .*orchestrator"):
            logs([*words, "--job", str(job)])


def test_a_log_is_followed_as_it_grows_and_is_rotated(tmp_path: Path) -> None:
    log_file = tmp_path / "a.log"
    log_file.write_bytes(b"before\n")
    seen = appended(log_file, log_file.stat().st_size)
    assert next(seen) == b""
    with log_file.open("ab") as file:
        file.write(b"more\n")
    assert next(seen) == b"more\n"
    log_file.rename(tmp_path / "a.log.1")
    assert next(seen) == b""
    log_file.write_bytes(b"a new file, longer than the old one\n")
    assert next(seen) == b"a new file, longer than the old one\n"
    log_file.write_bytes(b"cut\n")
    assert next(seen) == b"cut\n"
    assert next(seen) == b""
