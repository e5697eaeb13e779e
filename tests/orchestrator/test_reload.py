"""SIGHUP to a lone orchestrator, a real process: its file is read again, what may change does, and the rest is reported."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.job.configuration.load import to_toml
from counterpoint.run.changes import read_journal
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Batch
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.polling import DEADLINE_SECONDS, wait_until


@pytest.mark.slow
def test_a_hangup_reads_the_file_again_and_reports_what_cannot_change(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=8)
    file, log = config.output_dir.parent / "run.toml", config.run_dir / "orchestrator.log"
    file.write_text(to_toml(config))
    (Path(config.model) / "config.json").write_text("{}")  # the command looks for it, and the daemon does not
    released = threading.Event()

    def hold(batch: Batch) -> None:
        assert batch.step < 3 or released.wait(60)

    def said(words: str) -> None:
        wait_until(lambda: words in log.read_text(), f"{words!r} in the log", details=log.read_text)

    command = [sys.executable, "-m", "counterpoint.cli.main", "orchestrator", str(file), "--sampling.top_k", "7"]
    with (
        ScriptedTrainer(config.output_dir, "one", 8, answer=hold) as trainer,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process,
    ):
        try:
            trainer.wait_for_step(2)
            edited = config.sampling.model_copy(update={"temperature": 0.5, "top_k": 9})
            file.write_text(to_toml(config.model_copy(update={"sampling": edited, "steps": 12})))
            process.send_signal(signal.SIGHUP)
            said("sampling.temperature = 0.5; not applied: run one: steps: it holds from the next start with --resume")
            assert "top_k" not in log.read_text(), "the flag has the last word"
            file.write_text("steps = ")
            process.send_signal(signal.SIGHUP)
            said("the file cannot be read, and nothing has changed")
            released.set()
            trainer.wait_for_step(8)
            assert process.wait(DEADLINE_SECONDS) == 0
        finally:
            released.set()
            process.kill()
    (change,) = read_journal(config.run_dir)
    assert change.changes == {"sampling.temperature": 0.5}
    assert {sample.temperature for sample in trainer.trained[-1].samples} == {0.5}
