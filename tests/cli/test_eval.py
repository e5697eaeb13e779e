"""`counterpoint eval` against a server without a model, and what it refuses before anything is started."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tomli_w
from rich.console import Console

from counterpoint.cli.eval import evaluation_table
from counterpoint.cli.main import main
from counterpoint.inference.base import InferenceError
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.port_claim import claimed
from counterpoint.job.evaluation import server as evaluation_server
from counterpoint.job.evaluation.server import (
    LOG,
    NAMED_SERVER_SECONDS,
    at_servers,
    cause_in,
    free_port,
    server_of,
    server_running,
    unless_ended,
)
from counterpoint.job.evaluation.subject import find_checkpoint, subject_of
from counterpoint.orchestrator.evaluation.result import result_of
from counterpoint.orchestrator.evaluation.versions import adapter_name
from counterpoint.run.config import RunConfig
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.records import Rollout
from tests.orchestrator.toy_model import make_toy_model
from tests.support.children import start_instead
from tests.support.fake_inference import PROBE_TOKENS, FakeInference, probe_answer
from tests.support.polling import until
from tests.support.rollouts import make_rollout

EVALUATION = {
    "name": "toy-eval",
    "environments": [{"name": "held-out", "kind": "tests.orchestrator.toy_environment:Toy"}],
    "examples": 5,
    "rollouts_per_example": 2,
    "pass_at": [1, 2],
    "success": 0.5,
}


@pytest.fixture
def inference() -> Iterator[FakeInference]:
    with FakeInference() as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An orchestrator's file with one evaluation."""
    path = tmp_path / "orchestrator.toml"
    content = {
        "output_dir": str(tmp_path / "job"),
        "model": str(make_toy_model(tmp_path / "model")),
        "environments": [{"name": "toy", "kind": "tests.orchestrator.toy_environment:Toy"}],
        "sampling": {"max_tokens": 8},
        "evaluations": [EVALUATION],
        "training": {"lora": {"rank": 4}},
    }
    path.write_text(tomli_w.dumps(content))
    (tmp_path / "model" / "config.json").write_text("{}")
    return path


def adapter(directory: Path, version: int, *, probe: bool = True, **keys: Any) -> Path:
    """An adapter's directory: its description, with `keys`, and the header of two tensors."""
    described = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj"]} | keys
    tensors = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": [16, 0],
        "model.layers.0.self_attn.q_proj.lora_B.weight": [0, 16],
    }
    header = orjson.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    )
    with publish_directory(directory) as partial:
        (partial / "adapter_config.json").write_bytes(orjson.dumps(described))
        (partial / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        if probe:
            answer = probe_answer(version, PROBE_TOKENS)
            content = {"version": version, "token_ids": PROBE_TOKENS, "log_probabilities": answer}
            (partial / "probe.json").write_bytes(orjson.dumps(content))
    return directory


@pytest.mark.slow
def test_results_on_a_running_server(
    file: Path, tmp_path: Path, inference: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["eval", str(file), "--server", inference.url, "--output", str(output)]) == 0
    (line,) = [orjson.loads(line) for line in (output / "evaluations.jsonl").read_bytes().splitlines()]
    assert (line["step"], line["policy_version/min"]) == (None, None)
    assert line["servers"] == [inference.url]
    records = [orjson.loads(record) for record in (output / "toy-eval/rollouts.jsonl").read_bytes().splitlines()]
    assert len(records) == 10
    passed = sum(record["reward"] >= 0.5 for record in records) / 10
    assert line["metrics"]["pass@1"]["value"] == pytest.approx(passed)
    printed = capsys.readouterr().out
    assert "toy-eval" in printed
    assert "pass@2" in printed
    assert {request.model for request in inference.asked} == {str(tmp_path / "model")}
    assert main(["eval", str(file), "--server", inference.url, "--output", str(output)]) == 2, "it exists"
    below_a_file = output / "evaluations.jsonl" / "further"
    capsys.readouterr()
    assert main(["eval", str(file), "--server", inference.url, "--output", str(below_a_file)]) == 2
    assert f"--output {below_a_file}: {below_a_file.parent} is not a directory that" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("later", "step", "kept"), [(7, 7, 1), (9, None, 2)])
def test_what_a_live_runs_server_has_is_said_also_if_the_run_goes_on(
    file: Path,
    tmp_path: Path,
    inference: FakeInference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    later: int,
    step: int | None,
    kept: int,
) -> None:
    """The run's server has its seventh version at first, and another one once rollouts have been played."""

    def described(name: str | None) -> dict[str, Any]:
        version = later if inference.asked else 7
        return {"load": version + 1, "version": version, "owner": "run 'a'", "digest": f"{version:016x}"}

    monkeypatch.setattr(inference, "described", described)
    output = tmp_path / "out"
    with caplog.at_level(logging.INFO):
        assert main(["eval", str(file), "--server", inference.url, "--output", str(output)]) == 0
    assert "is healthy, with load 8: version 7, by run 'a' (digest 0000000000000007)" in caplog.text
    line = orjson.loads((output / "evaluations.jsonl").read_bytes())
    assert (line["step"], line["policy_version/min"], line["policy_version/max"]) == (step, 7, later)
    assert [(each["version"], each["digest"]) for each in line["weights"]] == [
        (version, f"{version:016x}") for version in (7, later)[:kept]
    ]


@pytest.mark.slow
def test_an_adapter_is_loaded_and_proven_at_a_running_server(
    file: Path, tmp_path: Path, inference: FakeInference
) -> None:
    output, steps = tmp_path / "out", tmp_path / "best"
    adapter(steps / "step_7", 7)
    arguments = ["eval", str(file), "--server", inference.url, "--checkpoint", str(steps), "--output", str(output)]
    assert main(arguments) == 0
    line = orjson.loads((output / "evaluations.jsonl").read_bytes())
    assert (line["step"], line["policy_version/max"], line["checkpoint"]) == (7, 7, str(steps / "step_7"))
    assert inference.versions == [7]
    assert [name.rpartition("-")[0] for name in inference.unloaded] == ["default.evaluation"]


@pytest.mark.slow
def test_a_server_that_is_gone_and_rollouts_that_all_fail(
    file: Path, tmp_path: Path, inference: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    inference.generate_status = 400
    arguments = ["eval", str(file), "--server", inference.url, "--output", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "error: evaluation toy-eval: no rollout completed: " in capsys.readouterr().err
    line = orjson.loads((tmp_path / "out/evaluations.jsonl").read_bytes())
    assert (line["rollouts/completed"], line["rollouts/failed"]) == (0, 10)
    assert line["metrics"] == {}
    inference.healthy = False
    gone = ["eval", str(file), "--server", inference.url, "--inference.startup_timeout_seconds", "0.2"]
    assert main([*gone, "--output", str(tmp_path / "other")]) == 1
    assert "no inference server is healthy" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_dry_run_refuses_a_checkpoint_that_is_not_there(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(file), "--checkpoint", str(tmp_path / "wrong"), "--dry-run"]) == 2
    assert "there is no such directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_the_server_does_not_have_is_refused(
    file: Path, tmp_path: Path, inference: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    inference.models = ["base", "default"]
    arguments = ["eval", str(file), "--server", inference.url, "--output", str(tmp_path / "out")]
    assert main([*arguments, "--model", "defualt"]) == 2
    assert "has no model 'defualt'; it has 'base', 'default'. Name one of them with --model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--model", "default"]) == 0


@pytest.mark.parametrize("inference_failed", [True, False])
@pytest.mark.parametrize("completed", [0, 1])
def test_a_result_without_a_completed_rollout_is_not_a_score_of_zero(inference_failed: bool, completed: int) -> None:
    config = EvaluationConfig.model_validate(EVALUATION)
    failure: dict[str, Any] = {"environment": "held-out", "error": "no answer", "inference_failed": inference_failed}
    rollouts = [make_rollout(index=index, **failure) for index in range(3 - completed)]
    rollouts += [make_rollout(index=9, environment="held-out", reward=0.0)] * completed
    result = result_of(config, {}, 3, rollouts, 0.0, 1.0, {})
    assert bool(result.line["metrics"]) is bool(completed)
    assert [name for name in result.metrics() if "pass@1" in name or "reward" in name] == [] or completed
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(evaluation_table([result]))
    assert ("pass@1" if completed else "failed  ") in console.export_text()
    assert ("failed; 3 of 3 rollouts failed" in result.in_words()) is not completed


def test_a_result_has_the_rewards_of_turns_by_their_number() -> None:
    config = EvaluationConfig.model_validate(EVALUATION)

    def attempt(example: int, index: int, *rewards: float, error: str | None = None) -> Rollout:
        turn_rewards = np.array(rewards, np.float32) if rewards else None
        return make_rollout(example, index, environment="held-out", turn_rewards=turn_rewards, error=error)

    rollouts = [
        attempt(0, 0, 1.0, 0.5), attempt(0, 1, 0.0), attempt(1, 0, *[0.25] * 9), attempt(1, 1),
        attempt(2, 0, 9.0, error="its loop failed"), attempt(2, 1, *[0.25] * 12),
    ]  # fmt: skip
    result = result_of(config, {}, 3, rollouts, 0.0, 1.0, {"held-out": (0.0, 1.0)})
    by_turn = {name: each for name, each in result.estimates.items() if "turn" in name}
    assert list(by_turn) == [f"held-out/reward/turn/{turns}/mean" for turns in [*range(1, 9), "9-16"]]
    values = [each.value for each in by_turn.values()]
    assert values == pytest.approx([(0.5 + 0.25 + 0.25) / 3, (0.5 + 0.25 + 0.25) / 3, *[0.25] * 7])
    assert all(0.0 <= (each.low or 0.0) <= each.value <= (each.high or 1.0) <= 1.0 for each in by_turn.values())
    assert "evaluation/toy-eval/held-out/reward/turn/9-16/mean/low" in result.metrics()
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(evaluation_table([result]))
    assert "held-out/reward/turn/1/mean" in console.export_text()
    plain = result_of(config, {}, 3, [attempt(0, 0), attempt(0, 1)], 0.0, 1.0, {})
    assert not any("turn" in name for name in plain.line["metrics"])


def test_a_server_that_is_said_to_run_is_not_awaited_for_long(tmp_path: Path) -> None:
    url, values = "http://127.0.0.1:1", {"environments": [{"name": "toy", "kind": "reverse-text"}]}
    run = RunConfig(output_dir=tmp_path, model="/models/ours", **values)
    assert at_servers(run, [url]).inference.startup_timeout_seconds == NAMED_SERVER_SECONDS
    patient = RunConfig(output_dir=tmp_path, model="/models/ours", inference={"startup_timeout_seconds": 99}, **values)
    assert at_servers(patient, [url]).inference.startup_timeout_seconds == 99


@pytest.mark.parametrize("moves", [False, True])
def test_the_jobs_identity_is_proven_to_its_own_servers_alone(moves: bool, tmp_path: Path) -> None:
    own, listed, key = "http://10.0.0.1:8000", tmp_path / "servers.txt", tmp_path / "servers.key"
    listed.write_text(f"{own}\n")
    where: dict[str, Any] = {"urls_file": listed} if moves else {"urls": [own]}
    run = RunConfig(
        output_dir=tmp_path,
        model="/models/ours",
        environments=[{"name": "toy", "kind": "reverse-text"}],
        inference={"identity_file": key, **where},
    )
    assert at_servers(run, [own]).inference.identity_file is None, "the job never ran"
    key.write_text("secret")
    assert at_servers(run, [own]).inference.identity_file == key
    assert at_servers(run, [own, "http://10.0.0.2:8000"]).inference.identity_file is None
    started = InferenceConfig(model=run.model)
    assert at_servers(run, [own], started).inference.identity_file is None, "another one at the port of the job's"
    listed.unlink()
    assert (at_servers(run, [own]).inference.identity_file is None) is moves


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "describes no server to start"),
        (["--server", "http://127.0.0.1:1", "--evaluation", "toyeval"], "there is no evaluation 'toyeval'"),
        (["--server", "ftp://nowhere"], "--server ftp://nowhere"),
        (["--server", "http://127.0.0.1:1", "--checkpoint", "/nowhere"], "/nowhere: there is no such directory"),
        (["--server", "http://127.0.0.1:1", "--stpes", "3"], "there is no key stpes"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_the_configuration(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["eval", str(file), "--server", "http://127.0.0.1:1", "--dry-run", "--sampling.temperature", "0.5"]) == 0
    )
    assert "temperature = 0.5" in capsys.readouterr().out


def test_which_file() -> None:
    assert main(["eval"]) == 2
    assert main(["eval", "--help"]) == 0


def test_the_server_of_each_kind_of_checkpoint(file: Path, tmp_path: Path) -> None:
    run = RunConfig(
        output_dir=tmp_path / "job",
        model=str(tmp_path / "model"),
        environments=[{"name": "toy", "kind": "reverse-text"}],
    )
    given = InferenceConfig(model=run.model)
    proven = find_checkpoint(adapter(tmp_path / "broadcast/step_3", 3))
    subject = subject_of(run, proven, None, [])
    assert subject.update is not None
    server = server_of(given, proven, subject, tmp_path)
    assert server.lora is not None
    assert (server.model, server.lora.max_rank, server.extra_args) == (run.model, 16, [])

    names = {subject_of(run, proven, None, ["http://127.0.0.1:1"]).name for _ in range(2)}
    assert len({*names, adapter_name(run.run_id)}) == 3, "one that was killed keeps its name from nobody"

    plain = find_checkpoint(adapter(tmp_path / "adapter", 3, probe=False))
    subject = subject_of(run, plain, None, [])
    assert (subject.update, subject.step) == (None, None)
    assert "--lora-modules" in server_of(given, plain, subject, tmp_path).extra_args
    with pytest.raises(UserError, match="a running server cannot be shown"):
        subject_of(run, plain, None, ["http://127.0.0.1:1"])

    full = tmp_path / "full" / "step_5"
    with publish_directory(full) as partial:
        (partial / "config.json").write_text("{}")
    whole = find_checkpoint(tmp_path / "full")
    subject = subject_of(run, whole, None, [])
    assert (subject.name, subject.step) == (str(full), 5)
    server = server_of(given, whole, subject, tmp_path)
    assert (server.model, server.lora) == (str(full), None)
    with pytest.raises(UserError, match="full weights would replace"):
        subject_of(run, whole, None, ["http://127.0.0.1:1"])
    with pytest.raises(UserError, match=r"step_7: there is no such directory; .*full has steps 5$"):
        find_checkpoint(tmp_path / "full" / "step_7")
    with pytest.raises(UserError, match=r"step_1: there is no such directory$"):
        find_checkpoint(tmp_path / "nowhere" / "step_1")
    with pytest.raises(UserError, match=r"nowhere: there is no such directory$"):
        find_checkpoint(tmp_path / "nowhere")
    (full / "STABLE").unlink()
    with pytest.raises(UserError, match="being written or removed"):
        find_checkpoint(full)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens = [1]"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern = {'q_proj': 4}"),
        ({"r": 8}, "of shape [16, 0], and its r is 8"),
        ({"r": "16"}, "r = '16'"),
        ({"target_modules": ["v_proj"]}, "target_modules = ['v_proj'] do not name"),
        ({"of_a_later_peft": 1}, "of_a_later_peft = 1"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
    ],
)
def test_an_adapter_that_the_server_would_take_for_another_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], said: str
) -> None:
    directory = adapter(tmp_path / "adapter", 3, probe=False, **keys)
    command = ["eval", str(file), "--server", "http://127.0.0.1:9", "--checkpoint", str(directory)]
    for words in ([*command, "--dry-run"], command):
        assert main(words) == 2
        assert f"--checkpoint {directory}: " in (error := capsys.readouterr().err)
        assert said in error
    assert find_checkpoint(adapter(tmp_path / "plain", 3, probe=False, lora_dropout=0.5)).rank == 16


@pytest.mark.slow
async def test_a_server_that_ends_ends_what_waits_for_it(tmp_path: Path) -> None:
    config = InferenceConfig(model=str(tmp_path / "none"), log_file=tmp_path / LOG)
    async with server_running(config, tmp_path, {}) as ended:
        with pytest.raises(InferenceError, match=rf"exit code 2.*{LOG}"):
            await unless_ended(asyncio.Event().wait(), ended, lambda: cause_in(tmp_path / LOG))


def test_a_port_that_is_in_use_is_not_taken() -> None:
    port = free_port("127.0.0.1", 0)
    assert free_port("127.0.0.1", port) == port
    with claimed("127.0.0.1", port):
        assert free_port("127.0.0.1", port) != port


@pytest.mark.slow
async def test_a_server_does_not_see_the_variables_of_a_jobs_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`inference.port` is a key of a job, and none of a server's file."""
    monkeypatch.setenv("COUNTERPOINT_INFERENCE__PORT", "8001")
    monkeypatch.setenv("COUNTERPOINT_CACHE", "models")
    file = tmp_path / "seen"
    program = f"import os, pathlib; pathlib.Path({str(file)!r}).write_text(chr(10).join(os.environ))"
    start_instead(monkeypatch, evaluation_server, lambda _: [sys.executable, "-c", program])
    async with server_running(InferenceConfig(model="of-no-matter"), tmp_path, {"ADDED": "1"}) as ended:
        assert await ended == 0
    seen = file.read_text().split()
    assert "COUNTERPOINT_INFERENCE__PORT" not in seen
    assert {"COUNTERPOINT_CACHE", "ADDED"} <= {*seen}


@pytest.mark.slow
async def test_a_server_that_runs_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command here is one that ignores SIGTERM; its guardian kills it."""
    monkeypatch.setattr("counterpoint.job.evaluation.server._STOP_SECONDS", 0.5)
    pid_file, waits = tmp_path / "pid", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
    program = f"import os, pathlib; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); {waits}"
    start_instead(monkeypatch, evaluation_server, lambda _: [sys.executable, "-c", program])
    async with server_running(InferenceConfig(model="of-no-matter"), tmp_path, {}) as ended:
        await until(lambda: pid_file.exists() and bool(pid_file.read_text()), "the server's process")
        assert await unless_ended(asyncio.sleep(0, "done"), ended, lambda: "") == "done"
    await until(ended.done, "what is known of its end")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
