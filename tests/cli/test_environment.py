"""`counterpoint env`: its words, and its errors before any server starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from counterpoint.cli import environment
from counterpoint.cli.main import main
from counterpoint.job.environments import waiting
from counterpoint.job.environments.observe import PlayPlan
from tests.support.vllm_server import ServerProcess


def test_its_help_names_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--help"]) == 0
    assert "counterpoint env check JOB.toml" in capsys.readouterr().out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "chek"]) == 2
    assert "there is no command 'chek'; there are check and new" in capsys.readouterr().err


def test_a_new_environment_says_how_to_check_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "new", "my_task", "--directory", str(tmp_path)]) == 0
    assert f"cd {tmp_path} && counterpoint env check my_task.toml" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["singel-turn", "tools"])
def test_an_environment_that_cannot_be_loaded_is_refused_before_a_model_is_resolved(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "counterpoint.job.resolve_model.resolve_model", lambda name: pytest.fail("a model was resolved")
    )
    assert main(["env", "check", kind]) == 2
    assert "environment 'checked': " in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.slow
def test_a_new_environment_has_no_finding_and_is_told_how_to_train(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    adapter_server: ServerProcess,
) -> None:
    """At a running server: `tests/examples/test_tutorial.py` has such a check start one."""
    check = ["env", "check", "fresh_sums.toml", "--server", adapter_server.url]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the working directory is added
    assert main(["env", "new", "fresh_sums"]) == 0
    assert main([*check, "--json"]) == 0
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out.splitlines()[-1])}
    # The machine may be busy.
    others = [each for name, each in found.items() if name not in ("time", "event loop", "memory")]
    assert [each for each in others if each["level"] != "ok"] == []
    assert main([*check, "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("next: counterpoint run fresh_sums.toml\n")
    assert "filtered" not in said
    assert "trained" not in said


def test_a_job_has_the_arguments_of_its_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "new", "other_sums", "--directory", str(tmp_path)]) == 0
    file = str(tmp_path / "other_sums.toml")
    assert main(["env", "check", file, "--args", "{}"]) == 2
    assert "--args is for a KIND" in capsys.readouterr().err
    assert main(["env", "check", file, "--orchestrator.sampling.max_tokens", "9", "--dry-run"]) == 0
    assert "max_tokens = 9\n" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["[1]", "{"])
def test_arguments_that_are_no_table(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["env", "check", "reverse-text", "--args", given])
    assert "JSON" in capsys.readouterr().err


TASK = """
from counterpoint.environments.base import Example
from counterpoint.environments.data.load import load_rows


class Task:
    group_scoring = False

    def __init__(self, data):
        self._rows = load_rows(data)

    def __len__(self):
        return len(self._rows)

    def example(self, index):
        row = self._rows[index]
        return Example(index, row["question"], row["answer"])

    async def rollout(self, example, model, state): ...

    async def score(self, example, rollout): ...

    async def score_group(self, example, rollouts): ...
"""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "1 + 1"}, "cannot be made: KeyError: 'answer' (in example, "),
        ({"question": "1 + 1", "answer": 2}, "its answer is int ('2'); expected text"),
        ({"question": None, "answer": "2"}, "its prompt is NoneType ('None'); expected text"),
    ],
)
def test_a_bad_row_is_named_before_a_model_is_resolved(
    row: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "counterpoint.job.resolve_model.resolve_model", lambda name: pytest.fail("a model was resolved")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "task_of_rows", raising=False)
    (tmp_path / "task_of_rows.py").write_text(TASK)
    rows = [*[{"question": "2 + 1", "answer": "3"}] * 7, row]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    given = json.dumps({"data": {"path": str(tmp_path / "rows.jsonl")}})
    assert main(["env", "check", "task_of_rows:Task", "--args", given]) == 2
    assert (
        f"environment 'task_of_rows:Task': example 7 of 8{':' if 'its' in said else ''} {said}"
        in capsys.readouterr().err
    )


ENDLESS = """\
import time

from counterpoint.environments import Example


class Task:
    group_scoring = False

    def __init__(self, where):
        self._where = where
        self._wait("__init__")

    def _wait(self, name):
        while name == self._where:
            time.sleep(0.01)

    def __len__(self):
        return 3

    def example(self, index):
        self._wait("example")
        return Example(index, "1 + 1", "2")

    async def rollout(self, example, model, state): ...

    async def score(self, example, rollout): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["__init__", "example"])
def test_what_has_no_end_before_the_first_rollout_is_named(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "READING_SECONDS", 1.0)  # what has an end has it by then
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "endless_task", raising=False)
    (tmp_path / "endless_task.py").write_text(ENDLESS)
    assert main(["env", "check", "endless_task:Task", "--args", json.dumps({"where": where})]) == 2
    said = capsys.readouterr().err
    assert re.search(r"after [\d.]+ s .* goes on at Task\._wait \(.*endless_task\.py:1[45]\)", said)
    assert re.search(r"has not ended after 1 s \(in _wait, .*endless_task\.py:1[45]", said)


def test_a_server_that_ended_is_explained_by_its_reason_or_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "inference.log"
    log.write_text("INFO: all is well\nsegmentation fault\n")
    assert environment._why_ended(log).splitlines() == ["", "INFO: all is well", "segmentation fault"]
    with log.open("a") as file:
        file.write("ValueError: less memory than is asked for\nRuntimeError: failed. See root cause above.\n")
    assert environment._why_ended(log) == ": ValueError: less memory than is asked for"


@pytest.mark.parametrize(("text_config", "longest"), [(False, 32_768), (True, 32_768), (None, 4096)])
def test_the_context_of_a_server_that_is_not_ours_is_the_models(
    text_config: bool | None, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 5,000 tokens is not refused with a limit that the check has made up."""
    own = {} if text_config is None else {"max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": own} if text_config else own))
    plans: list[PlayPlan] = []

    async def observe(*given: object, **_keywords: object) -> None:
        plans.extend(each for each in given if isinstance(each, PlayPlan))
        raise ValueError("seen")

    monkeypatch.setattr("counterpoint.job.environments.observe.observe", observe)
    monkeypatch.setattr("counterpoint.job.resolve_model.resolve_model", lambda name: tmp_path)
    monkeypatch.setattr("counterpoint.inference.model_facts.read_bounds", lambda model: None)
    assert main(["env", "check", "reverse-text", "--server", "http://127.0.0.1:1"]) == 2
    assert [plan.context for plan in plans] == [longest]
