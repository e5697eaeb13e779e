"""Before a server starts: an environment of which nothing can succeed is refused, and what is only odd is a line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.environments.before_start import rehearse_runs
from counterpoint.models import build
from counterpoint.transport.errors import UserError
from tests.orchestrator.toy_model import make_toy_model

pytestmark = pytest.mark.slow

SUMS = """
from counterpoint.environments import Example

class Sums:
    group_scoring = False

    def __init__(self, fault="", marker=""):
        self.fault, self.marker = fault, marker

    def __len__(self):
        return 4

    def example(self, index):
        return Example(index, f"What is {index} + 1?", answer=str(index + 1))

    async def start(self, context):
        if self.fault == "start":
            raise OSError("the database is not there yet")

    async def rollout(self, example, model, state):
        turn = await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        state["text"] = model.chat.decode(turn.completion_ids.tolist())
        if self.fault == "exit":
            import os
            os._exit(7)

    async def score(self, example, rollout):
        print("noise on standard output")
        right = float(example.answer in rollout.state["text"])
        match self.fault:
            case "equal":
                return 0.5
            case "misspelt":
                return rigth
            case "none":
                return None
            case "none for wrong ones":
                return right or None
            case "pattern":
                return None.group(1)
        return right
"""


@pytest.fixture
def sums(tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a toy model, beside which the environment `own_sums:Sums` can be imported."""
    (tmp_path / "own_sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    return make_toy_model(tmp_path)


def job(file: Path, fault: str) -> JobConfig:
    kind = ["--orchestrator.environments.0.kind", "own_sums:Sums"]
    return load(JobConfig, file, [*kind, "--orchestrator.environments.0.args", f'{{"fault": "{fault}"}}'])


@pytest.mark.parametrize(
    ("fault", "reason"), [("none", r"NoReward: score returned None"), ("misspelt", r"NameError: name 'rigth'")]
)
def test_an_environment_of_which_nothing_can_succeed_is_refused(
    sums: Path, job_file: Path, fault: str, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"own_sums:Sums\): .* 3 of 3 rollouts failed: {reason}.*own_sums\.py:\d+"):
        rehearse_runs(job(job_file, fault), sums)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("equal", "own answer '1' has the reward 0.5"),
        ("none for wrong ones", "2 of 3 rollouts failed: NoReward"),
        ("pattern", "3 of 3 rollouts failed: AttributeError"),  # as where a pattern does not match a made-up answer
        ("start", "was not rehearsed: .*the database is not there yet"),
        ("exit", ""),
    ],
)
def test_what_is_only_odd_is_said_and_refuses_nothing(
    sums: Path, job_file: Path, capfd: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    rehearse_runs(job(job_file, fault), sums)
    shown = capfd.readouterr()
    assert shown.out == ""
    warnings = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(said)
    if said:
        assert re.search(said, warnings[0])


def test_a_dry_run_rehearses_with_a_model_that_is_here(
    sums: Path, job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "empty"))
    assert build.model_at_hand("tiny-dense") is None
    flags = ["--orchestrator.environments.0.kind", "own_sums:Sums"]
    arguments = ["--orchestrator.environments.0.args", '{"fault": "none"}']
    command = ["run", str(job_file), "--dry-run", "--model", "tiny-dense", *flags, *arguments]
    assert main(command) == 0
    assert "not rehearsed" in capsys.readouterr().err
    monkeypatch.setattr("counterpoint.cli.run.model_at_hand", lambda name: sums)
    assert main(command) == 2
    assert "NoReward" in capsys.readouterr().err
