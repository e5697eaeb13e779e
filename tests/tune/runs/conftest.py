"""A job that only seems to run, and an executor whose trials' orchestrators pretend."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.config import JobConfig
from counterpoint.job.processes_file import ProcessesFile
from counterpoint.transport.files.lock import take_lock
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.executor import Event
from counterpoint.tune.runs.executor import RunTrialExecutor
from counterpoint.tune.runs.host_job import HostJob
from counterpoint.tune.runs.varied_run import VariedRun
from counterpoint.tune.trial import Trial
from tests.support.polling import DEADLINE_SECONDS

BASE: dict[str, Any] = {
    "steps": 6,
    "environments": [{"name": "reverse", "kind": "reverse-text"}],
    "sampling": {"max_tokens": 32},
    "training": {"learning_rate": 0.001, "lora": {"rank": 4}},
    "shutdown_timeout_seconds": 1.0,
}


class PretendedJob:
    """A job with two slots that seems to run, and an executor for it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.output = directory, directory / "job"
        job = {
            "output_dir": str(self.output),
            "model": "some-model",
            "stay": True,
            "inference": {"max_model_len": 256},
            "trainer": {"max_tokens": 1024, "max_runs": 2},
            "orchestrator": {"training": {"lora": {"rank": 4}}},
        }
        self.output.mkdir()
        (self.output / "job.json").write_text(JobConfig.model_validate(job).model_dump_json())
        self.show("ready")
        self.lock: int | None = take_lock(self.output / "job.lock", "")
        self.executor = self.another_executor()
        self.events: list[Event] = []

    def another_executor(self) -> RunTrialExecutor:
        return RunTrialExecutor(HostJob(self.output), VariedRun("exp", self.output, BASE))

    def show(self, trainer: str, **others: str) -> None:
        states = {"trainer": trainer, **others}
        workers = [WorkerView(name, State(state), since=0.0, pid=None, status="") for name, state in states.items()]
        ProcessesFile(self.output).write(State.RUNNING, workers)

    def end(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def trial(self, trial_id: str, **config: Any) -> Trial:
        return Trial("run", config, trial_id, local_dir=str(self.directory / "experiment"))

    def direct(self, trial_id: str, name: str, text: str = "") -> None:
        control = self.output / f"run_exp.{trial_id}" / "control"
        control.mkdir(parents=True, exist_ok=True)
        (control / f"{name}.new").write_text(text)
        (control / f"{name}.new").replace(control / name)

    def until(self, wanted: type[Event], trial: Trial, executor: RunTrialExecutor | None = None) -> Any:
        """Returns the next event of the trial, which must be of this class; others' events are kept in `events`."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            for event in [event for event in self.events if event.trial_id == trial.trial_id]:
                self.events.remove(event)
                assert isinstance(event, wanted), event
                return event
            self.events += asyncio.run((executor or self.executor).next_events(1.0))
        raise AssertionError(f"waited in vain for {wanted.__name__} of {trial}: {self.events}")

    def checkpoint(self, trial: Trial, iteration: int) -> Checkpoint:
        return Checkpoint(trial.trial_id, iteration, f"{trial.logdir}/checkpoint_{iteration}")

    def orchestrators(self) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
                if "fake_orchestrator" in command and str(self.output) in command:
                    found.append(command)
        return found


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedJob]:
    program = (sys.executable, "-m", "tests.tune.runs.fake_orchestrator")
    monkeypatch.setattr("counterpoint.job.admin.orchestrator_process.PROGRAM", program)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    job = PretendedJob(tmp_path)
    yield job
    asyncio.run(job.executor.close())
    job.end()
