"""A guest's file names by import path only what the operator's file allows: nothing else is imported, in any process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.import_path import only_imports
from counterpoint.environments.registry import load_here
from counterpoint.environments.workers.load import load_environment
from counterpoint.job.admin import join
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.layers import read_environment
from counterpoint.job.configuration.load import load
from counterpoint.job.join import allowed_imports, check_joins, named_imports
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.run.changes import ChangeRefused, apply
from counterpoint.run.config import AdvantageConfig, RunConfig
from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.load import load_loss
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.errors import UserError
from counterpoint.tune.runs.host_job import HostJob

PATH = "evil_guest_module:anything"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is there once the guest's module was imported, by whatever process."""
    left = tmp_path / "imported"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/evil_guest_module.py").write_text(
        f"open({str(left)!r}, 'w').close()\ndef anything(*given, **more): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "evil_guest_module", raising=False)
    return left


def environment(kind: str, **args: Any) -> Callable[[], object]:
    return lambda: load_here(EnvironmentConfig(name="task", kind=kind, args=args))


ROWS = {"rows": [{"question": "a", "answer": "b"}]}
LOADED: dict[str, Callable[[], object]] = {
    "an environment": environment(PATH),
    "a reward": environment("single-turn", data=ROWS, rubric=[{"kind": "function", "path": PATH}]),
    "a tool": environment("tools", data=ROWS, rubric=[{"kind": "exact"}], tools=[PATH]),
    "a tool in a table": environment(
        "tools", data=ROWS, rubric=[{"kind": "exact"}], tools=[{"kind": "function", "function": PATH}]
    ),
    "an agent's score": environment("agent", data=ROWS, command=["true"], score=PATH),
    "an advantage": lambda: load_advantage(AdvantageConfig(kind=PATH)),
    "a loss": lambda: load_loss(LossConfig(kind=PATH)),
}


@pytest.mark.parametrize("what", LOADED)
def test_a_guests_process_imports_what_is_allowed_and_nothing_else(what: str, imported: Path) -> None:
    with only_imports(["another:path"]), pytest.raises(ValueError, match=rf"{PATH}.*trainer.allowed_imports"):
        LOADED[what]()
    assert not imported.exists()
    with only_imports([PATH]), suppress(ValueError):  # it is no environment
        LOADED[what]()
    assert imported.exists()


@pytest.mark.slow
def test_workers_of_a_guests_environment_import_nothing_else_either(imported: Path) -> None:
    with only_imports([]), pytest.raises(ValueError, match=rf"{PATH}.*trainer.allowed_imports"):
        load_environment(EnvironmentConfig(name="task", kind=PATH, workers=1))
    assert not imported.exists()


@pytest.mark.parametrize(
    "ids",
    [
        {"id": PATH},
        {"id": "sums", "env": {"agents": [{"harness": {"id": PATH}}]}},
        *({"id": "sums", "taskset": {"task": {kind: {"a": {"fn": PATH}}}}} for kind in ("rewards", "metrics", "stops")),
    ],
)
def test_the_verifiers_library_loads_nothing_else_either(ids: dict[str, Any], imported: Path) -> None:
    pytest.importorskip("verifiers")
    with only_imports(["sums"]), pytest.raises(ValueError, match=rf"(id|fn) = '{PATH}'.*trainer.allowed_imports"):
        environment("verifiers", **ids)()
    assert not imported.exists()


def test_what_a_jobs_own_runs_name_needs_no_list(job_file: Path) -> None:
    loss = ("--orchestrator.training.loss.kind", "mine:loss")
    config = load(JobConfig, job_file, [*map("=".join, [loss])])
    assert config.trainer.allowed_imports == ["mine:loss"]
    given = load(JobConfig, job_file, ["=".join(loss), '--trainer.allowed_imports=["theirs:loss"]'])
    assert given.trainer.allowed_imports == ["mine:loss", "theirs:loss"]
    assert JobConfig.model_validate(given.model_dump(mode="json")).trainer == given.trainer
    assert load(JobConfig, job_file, []).trainer.allowed_imports == []


def test_a_guest_is_refused_for_what_the_job_does_not_name(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(
        JobConfig,
        job_file,
        [
            '--trainer.allowed_imports=["theirs:Task"]',
            "--orchestrator.advantage.kind=my:own",
            "--orchestrator.training.lora.rank=2",
        ],
    )
    (tmp_path / "job.json").write_text(json.dumps(job.table(), default=str))
    assert {"theirs:Task", "my:own"} <= allowed_imports(tmp_path)
    monkeypatch.setattr("counterpoint.job.join.is_running", lambda directory: True)
    for change, refused in (
        ({}, None),
        ({"environments": [{"name": "task", "kind": "theirs:Task"}], "advantage": {"kind": "my:own"}}, None),
        ({"environments": [{"name": "task", "kind": PATH}]}, PATH),
        ({"evaluations": [{"name": "held", "environments": [{"name": "task", "kind": PATH}]}]}, PATH),
        ({"advantage": {"kind": PATH}}, PATH),
        ({"training": {"lora": {"rank": 2}, "loss": {"kind": PATH}}}, PATH),
    ):
        values = {
            "run_id": "guest",
            "output_dir": tmp_path,
            "model": "m",
            "environments": [{"name": "task", "kind": "reverse-text"}],
            "training": {"lora": {"rank": 2}},
            "sampling": {"max_tokens": 16},
        }
        guest = RunConfig.model_validate(values | change)
        if refused is None:
            check_joins(guest, tmp_path)
        else:
            with pytest.raises(UserError, match=rf"{refused}.*trainer\.allowed_imports"):
                check_joins(guest, tmp_path)


@pytest.mark.slow
def test_a_guest_that_others_start_is_refused_before_its_code_is_imported(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's server joins it: also what stands in the arguments of a built-in kind is imported by no process."""
    replaced: dict[str, object] = {"require_job": None, "values_of_job": {}, "check_joins": None}
    for name, value in (replaced | {"allowed_imports": {"a:b"}}).items():
        monkeypatch.setattr(join, name, lambda *_, value=value: value)
    text = f"""
run_id = "guest"
output_dir = "{tmp_path}"
model = "m"
[[environments]]
name = "a"
kind = "single-turn"
args = {{ data = {{ rows = [{{ question = "a", answer = "b" }}] }}, rubric = [{{ kind = "function", path = "{PATH}" }}] }}
"""
    with pytest.raises(UserError, match=rf"{PATH}.*trainer\.allowed_imports"):
        join.join_run(tmp_path, text)
    assert not imported.exists()


def test_a_change_of_a_run_names_no_code_that_its_file_does_not(tmp_path: Path) -> None:
    environments = [{"name": "a", "kind": "reverse-text"}]
    values = {"run_id": "guest", "output_dir": tmp_path, "model": "m", "environments": environments}
    own = RunConfig.model_validate(values | {"advantage": {"kind": "my:own"}})
    assert apply(own, {"advantage.kind": "my:own", "training.learning_rate": 1.0}).advantage.kind == "my:own"
    with pytest.raises(ChangeRefused, match=f"advantage.kind = '{PATH}'"):
        apply(own, {"advantage.kind": PATH})


def test_a_tuner_lets_the_trials_of_its_job_import_what_its_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "environments": [{"kind": "my.tasks:Sums", "args": {"id": "gsm8k"}}],
        "training.loss.kind": {"choice": ["a:b", "grpo"]},
    }
    assert named_imports(table) == {"my.tasks:Sums", "gsm8k", "a:b"}
    assert named_imports({"rewards": {"a": {"fn": "mine/rewards.py:length"}}}) == {"mine/rewards.py:length"}
    started: dict[str, Any] = {}
    monkeypatch.setattr("counterpoint.tune.runs.host_job.Child", lambda *_, **given: started.update(given))
    HostJob(tmp_path / "job", tmp_path / "job.toml", ["a:b"]).start()
    monkeypatch.setenv(
        "COUNTERPOINT_TRAINER__ALLOWED_IMPORTS", started["environment"]["COUNTERPOINT_TRAINER__ALLOWED_IMPORTS"]
    )
    assert read_environment(JobConfig, keys_of(JobConfig)) == {"trainer": {"allowed_imports": ["a:b"]}}
