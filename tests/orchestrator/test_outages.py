"""What is out for a run is said by its status, by the page, to systemd and by its log, with the reason and since when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.job.reading.job_facts import JobReader
from counterpoint.job.reading.status import read_status
from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig
from counterpoint.serve.readers.problems import problems_of
from counterpoint.transport.outages import OpenOutage
from counterpoint.transport.process.notify import NotifySocket
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference
from tests.support.polling import wait_until


def state(output_dir: Path) -> str:
    try:
        return read_status(output_dir).state_of("one")
    except (KeyError, ValueError):  # its directory is not there yet
        return ""


def outages_of(output_dir: Path) -> list[OpenOutage]:
    return read_status(output_dir).outages_of("one")


def problems(output_dir: Path) -> set[tuple[str, str, str]]:
    """Kind, severity and run of what the page shows of servers and trainer."""
    found = problems_of(JobReader(output_dir).read())
    return {(each.kind, each.severity, each.run) for each in found if each.kind in ("no-trainer", "not-serving")}


@pytest.mark.slow
def test_a_trainer_that_left_and_a_server_that_fails_are_shown_while_they_are_out(
    make_config: Callable[..., RunConfig], inference: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    config = make_config(steps=100_000)
    said: list[str] = []

    def says(words: str) -> bool:
        while (message := socket.receive()) is not None:
            said.append(message.get("STATUS", ""))
        return any(words in line for line in said[-3:])

    def operate() -> None:
        with ScriptedTrainer(config.output_dir, "one", 100_000) as trainer:
            trainer.wait_for_step(2)
            wait_until(lambda: state(config.output_dir) == "running", "a run that runs")
            assert (outages_of(config.output_dir), problems(config.output_dir)) == ([], set())
        left = time.time()
        wait_until(lambda: state(config.output_dir) == "no trainer", "the trainer's outage in the status")
        [outage] = outages_of(config.output_dir)
        assert outage.who.startswith("the trainer at ")
        assert "the trainer ends" in outage.reason, "what the wire sees afterwards says less"
        assert abs(outage.since - left) < 30
        assert problems(config.output_dir) == {("no-trainer", "error", "one")}
        wait_until(lambda: says("the trainer ends"), "the status for systemd")
        with ScriptedTrainer(config.output_dir, "one", 100_000, checkpoint=trainer.checkpoint):
            wait_until(lambda: state(config.output_dir) == "running", "a run that runs again")
            inference.healthy = False
            wait_until(lambda: state(config.output_dir) == "no server", "the server's outage in the status")
            assert problems(config.output_dir) == {("not-serving", "error", "one")}
            inference.healthy = True
            wait_until(lambda: state(config.output_dir) == "running", "a run that runs once more")
            wait_until(lambda: says(f"of {config.steps}") and "takes no traffic" not in said[-1], "systemd's status")
            (config.run_dir / "control" / "evicted.txt").write_text("the test is over")

    operator = threading.Thread(target=operate)
    operator.start()
    try:
        assert run(config, lambda: None) == 3
    finally:
        operator.join()
        socket.close()
