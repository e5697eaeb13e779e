"""The run's directory: taken over or refused, rewound, and read for verdicts."""

from __future__ import annotations

import errno
import logging
import shutil
import tomllib
from pathlib import Path

import orjson
import pytest

from counterpoint.orchestrator import logging_setup, run_directory
from counterpoint.orchestrator.failure_report import report_failure
from counterpoint.orchestrator.logging_setup import logging_to, set_context
from counterpoint.orchestrator.run_directory import (
    ConfigurationError,
    RunEvictedError,
    check_control,
    finish_deletion,
    prune_rollouts,
    rewind,
    taken_over,
    write_config,
)
from counterpoint.transport.files.atomic import publish_directory, published_steps
from counterpoint.transport.process.permanent_errors import PASSING
from tests.orchestrator.step.test_checkpoint import make_config


def test_a_directory_with_a_run_is_refused_unless_resumed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    resumed = config.model_copy(update={"resume": True})
    with taken_over(config):
        with pytest.raises(OSError, match="another orchestrator runs in it"), taken_over(config):
            pytest.fail("somebody begins a run in it")
        write_config(config)
        with pytest.raises(ConfigurationError, match="resume = true"), taken_over(config):
            pytest.fail("it holds a run")
        with pytest.raises(OSError, match="another orchestrator runs in it"), taken_over(resumed):
            pytest.fail("somebody works in it")
    with taken_over(resumed):
        pass


def test_what_a_refused_configuration_leaves_is_no_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with taken_over(config):
        (config.run_dir / "orchestrator.log").write_text("refused")
        (config.run_dir / "decisions.jsonl").write_text("")
    with taken_over(config):
        write_config(config)
    with pytest.raises(ConfigurationError, match="already holds a run"), taken_over(config):
        pytest.fail("it has begun")


@pytest.mark.parametrize("run_id", ["metrics.jsonl", "runs.json", "trainer.log.1", "tokens", "checkpoints"])
def test_a_run_named_as_a_file_of_the_trainer_is_refused(tmp_path: Path, run_id: str) -> None:
    """The trainer has a directory of each run beside its own files, and could write no checkpoint."""
    with pytest.raises(ValueError, match=r"the name of a file in trainer/"):
        make_config(tmp_path, run_id=run_id)
    make_config(tmp_path, run_id="v1.jsonata")


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="output_dir = "), taken_over(make_config(tmp_path / "file")):
        pytest.fail("it is no directory")


def test_the_configuration_is_readable_by_the_trainer(tmp_path: Path) -> None:
    config = make_config(tmp_path, seed=7)
    with taken_over(config):
        pass
    (config.run_dir / "control" / "config_validation_error.txt").write_text("of a former life")
    write_config(config)
    written = tomllib.loads((config.run_dir / "control" / "orch.toml").read_text())
    assert type(config).model_validate(written) == config
    check_control(config.run_dir)


def test_verdicts(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with taken_over(config):
        pass
    (config.run_dir / "control" / "config_validation_error.txt").write_text("rank 3\n")
    with pytest.raises(ConfigurationError, match="rank 3"):
        check_control(config.run_dir)
    (config.run_dir / "control" / "evicted.txt").write_text("")
    with pytest.raises(RunEvictedError, match="no reason given"):
        check_control(config.run_dir)


def test_a_deleted_directory_is_noticed_and_stays_deleted(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with taken_over(config):
        write_config(config)
        finish_deletion(config.run_dir)
        assert config.run_dir.is_dir(), "it is not deleted, and nothing of it goes"
        shutil.rmtree(config.run_dir)
        with publish_directory(config.run_dir / "rollouts" / "step_1"):
            pass  # by a thread that has not noticed
        with pytest.raises(RunEvictedError, match="was deleted"):
            check_control(config.run_dir)
        finish_deletion(config.run_dir)
        assert not config.run_dir.exists()


def test_a_directory_whose_file_system_is_unmounted_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict would be final: no supervisor starts a run again that was deleted."""
    config = make_config(tmp_path)
    with taken_over(config):
        write_config(config)
        monkeypatch.setitem(run_directory._devices, config.run_dir, -1)
        shutil.rmtree(config.run_dir)
        with pytest.raises(OSError, match="not mounted") as lost:
            check_control(config.run_dir)
        assert report_failure(lost.value, config.run_dir) == PASSING


def test_rewinding(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        with publish_directory(tmp_path / "rollouts" / f"step_{step}"):
            pass
    (tmp_path / "rollouts" / ".step_4.partial").mkdir()
    rewind(tmp_path, 2)
    assert published_steps(tmp_path / "rollouts") == [1, 2]
    assert not (tmp_path / "rollouts" / ".step_4.partial").exists()


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_the_log_says_which_group(tmp_path: Path, log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "orchestrator.log"
    assert log_format in ("text", "json")
    with logging_to(path, "json" if log_format == "json" else "text"):
        set_context(group=7, rollout="7-1")
        logging.getLogger("somewhere").info("hello %s", "you")
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("somewhere").exception("it failed")
    text = path.read_text()
    assert "Traceback" in text
    assert "group=7" in capsys.readouterr().err
    if log_format == "json":
        first, second = (orjson.loads(line) for line in text.splitlines())
        assert first["message"] == "hello you"
        assert (first["group"], first["rollout"], first["level"]) == (7, "7-1", "INFO")
        assert "ValueError: broken" in second["exception"]


@pytest.mark.parametrize("name", ["orchestrator.log", "orchestrator_one.log"])
def test_a_job_has_each_line_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job keeps its orchestrators' output: the run's directory has no copy of it, unless as JSON."""
    (tmp_path / "run_one").mkdir()
    own = tmp_path / "run_one" / "orchestrator.log"
    with open(tmp_path / name, "a") as output:
        monkeypatch.setattr("sys.stderr", output)
        with logging_to(own, "text"):
            logging.getLogger("somewhere").info("hello")
        assert not own.exists()
        with logging_to(own, "json"):
            logging.getLogger("somewhere").info("hello")
    assert (tmp_path / name).read_text().count("hello") == 2
    assert orjson.loads(own.read_text())["message"] == "hello"
    with open(tmp_path / "elsewhere.log", "a") as output:
        monkeypatch.setattr("sys.stderr", output)
        with logging_to(own, "text"):
            logging.getLogger("somewhere").info("goodbye")
    assert own.read_text().count("goodbye") == 1


def test_old_rollouts_are_removed_but_not_what_the_trainer_may_ask_for(tmp_path: Path) -> None:
    for step in range(1, 11):
        with publish_directory(tmp_path / "rollouts" / f"step_{step}") as directory:
            (directory / "rollouts.jsonl").write_bytes(b"{}\n")
            if step >= 7:
                (directory / "batch.bin").write_bytes(b"")
    prune_rollouts(tmp_path, 10, 12)
    assert published_steps(tmp_path / "rollouts") == list(range(1, 11))
    prune_rollouts(tmp_path, 10, 2)
    assert published_steps(tmp_path / "rollouts") == [7, 8, 9, 10]
    (tmp_path / "rollouts/step_7/batch.bin").unlink()
    prune_rollouts(tmp_path, 10, 2)
    assert published_steps(tmp_path / "rollouts") == [8, 9, 10]
    (tmp_path / "rollouts/step_8/batch.bin").unlink()
    (tmp_path / "rollouts/step_9/batch.bin").unlink()
    prune_rollouts(tmp_path, 10, 2)
    assert published_steps(tmp_path / "rollouts") == [9, 10]


def test_old_rollouts_that_cannot_be_removed_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where somebody reads them over NFS, or has put a file of their own beside them."""
    for step in range(1, 4):
        with publish_directory(tmp_path / "rollouts" / f"step_{step}"):
            pass

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr("counterpoint.orchestrator.run_directory.remove_directory", refuse)
    prune_rollouts(tmp_path, 3, 1)
    (record,) = caplog.records
    assert "step_2" in record.getMessage()
    monkeypatch.undo()
    prune_rollouts(tmp_path, 3, 1)
    assert published_steps(tmp_path / "rollouts") == [3]


def test_a_full_log_is_put_aside_and_the_oldest_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_setup, "LOG_BYTES", 2000)
    path = tmp_path / "orchestrator.log"
    with logging_to(path, "text"):
        for number in range(400):
            logging.getLogger("test").info("line %d of some length", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["orchestrator.log", *(f"orchestrator.log.{n}" for n in range(1, 5))]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert "line 399 " in path.read_text()
