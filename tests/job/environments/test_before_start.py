"""Before a server starts: an environment of which nothing can succeed is refused, and what is only odd is a line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cli.main import main
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.environments.before_start import rehearse_runs
from counterpoint.job.resolve_model import resolve_model
from counterpoint.models import build
from counterpoint.transport.errors import UserError
from tests.orchestrator.toy_model import make_toy_model
from tests.support.ports import free_port

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


def test_a_run_rehearses_with_a_model_that_it_names(
    sums: Path, job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sums` has the environment; the model is one that is built, so that its name is no directory."""
    monkeypatch.setattr("counterpoint.cli.run.claim_directory", lambda *_: pytest.fail("it begins"))
    flags = ["--orchestrator.environments.0.kind", "own_sums:Sums"]
    arguments = ["--orchestrator.environments.0.args", '{"fault": "none"}', "--inference.port", str(free_port())]
    assert main(["run", str(job_file), "--model", "tiny-dense", *flags, *arguments]) == 2
    assert "3 of 3 rollouts failed: NoReward" in capsys.readouterr().err


OWN_SCORES = """
def always_none(example, completion, state):
    return None

async def later_none(example, completion, state):
    return None

def misspelt(example, completion, state):
    return rigth

def right(example, completion, state):
    return float(completion == example.answer)

def none_for_wrong_ones(example, completion, state):
    return 1.0 if completion == example.answer else None
"""


@pytest.fixture
def rows(sums: Path, tmp_path: Path) -> list[str]:
    """Flags for an environment of rows, after the directory of a toy model; a rubric is to follow."""
    (tmp_path / "own_scores.py").write_text(OWN_SCORES)
    return ["--orchestrator.environments.0.kind", "single-turn", "--orchestrator.environments.0.args"]


def args_of(*parts: dict[str, Any], **more: Any) -> str:
    return json.dumps({"data": {"rows": [{"question": "1 + 1?", "answer": "2"}]}, "rubric": parts} | more)


def function(name: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "function", "path": f"own_scores:{name}"} | keys


JUDGE = {"kind": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "nobody"}


@pytest.mark.parametrize(
    ("name", "isolation", "reason"),
    [
        ("always_none", "thread", r"NoReward: part 'function': own_scores:always_none returned None"),
        ("always_none", "process", r"NoReward: part 'function': own_scores:always_none returned None"),
        ("later_none", "thread", r"NoReward: part 'function': own_scores:later_none returned None"),
        ("misspelt", "thread", r"NameError: name 'rigth'"),
        ("misspelt", "process", r"own_scores:misspelt raised NameError: name 'rigth'"),
    ],
)
def test_rows_that_a_function_never_scores_are_refused(
    rows: list[str], sums: Path, job_file: Path, name: str, isolation: str, reason: str
) -> None:
    given = args_of({"kind": "exact"}, function(name, isolation=isolation), JUDGE)
    with pytest.raises(UserError, match=rf"\(single-turn\): .* 3 of 3 rollouts failed: .*{reason}"):
        rehearse_runs(load(JobConfig, job_file, [*rows, given]), sums)


def test_rows_with_tools_are_played_without_servers_of_tools(rows: list[str], job_file: Path) -> None:
    rows[1] = "tools"
    given = args_of(function("always_none"), tools=["calculator", {"kind": "mcp", "command": ["/nowhere"]}])
    with pytest.raises(UserError, match=r"\(tools\): .* 3 of 3 rollouts failed: NoReward: .*always_none returned None"):
        rehearse_runs(load(JobConfig, job_file, [*rows, given]), resolve_model("tiny-dense"))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([function("right")], ""),
        ([function("right", weight=0)], "own answer '2' has the reward 0, as"),
        ([function("right", weight=0), JUDGE], ""),
        ([function("none_for_wrong_ones")], "2 of 3 rollouts failed: NoReward"),
        ([JUDGE], ""),
        ([{"kind": "regex", "pattern": "never"}], ""),
    ],
)
def test_of_rows_what_is_only_odd_is_said(
    rows: list[str],
    sums: Path,
    job_file: Path,
    capfd: pytest.CaptureFixture[str],
    parts: list[dict[str, Any]],
    said: str,
) -> None:
    rehearse_runs(load(JobConfig, job_file, [*rows, args_of(*parts)]), sums)
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)


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
