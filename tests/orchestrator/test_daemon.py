"""The whole daemon over the real wires: runs from start to end, faulty environments, signals, kills, a trainer that returns."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.rollouts.dump import open_dump
from counterpoint.orchestrator.run_directory import taken_over
from counterpoint.orchestrator.scheduling import giving_up
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.step.boundary import StepBoundary
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, load_newest, write_checkpoint
from counterpoint.orchestrator.step.routing_ahead import RoutingAhead
from counterpoint.orchestrator.step.step_metrics import completion_tokens
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.transport.files.atomic import published_steps, write_atomically
from counterpoint.transport.files.json_lines import append_lines
from counterpoint.transport.messages import PROTOCOL_VERSION, Evicted, Rejected
from counterpoint.transport.process.permanent_errors import PASSING
from counterpoint.transport.records import Batch, Rollout
from tests.orchestrator.daemons import STEPS, assert_whole, metrics_of, records_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference
from tests.support.polling import DEADLINE_SECONDS, until, wait_until
from tests.support.ports import taken_port

pytestmark = pytest.mark.slow


def test_a_run_says_in_its_lines_what_goes_wrong(make_config: Callable[..., RunConfig]) -> None:
    """It goes by the metrics of the trainer, too, which are in the job's directory."""
    config = make_config(steps=8)
    (config.output_dir / "trainer").mkdir(parents=True)
    trained = [{"run_id": "one", "step": step, "time": 1.0, "masked_share": 0.9} for step in range(1, 9)]
    append_lines(config.output_dir / "trainer" / "metrics.jsonl", trained)
    with ScriptedTrainer(config.output_dir, "one", 8):
        assert run(config, lambda: None) == 0
    found = [{each["sign"]: each["since"] for each in line["early_warnings"]} for line in metrics_of(config)]
    assert [each["masked"] for each in found] == [1] * 8


@pytest.mark.parametrize("new_event_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_run(
    make_config: Callable[..., RunConfig],
    inference: FakeInference,
    new_event_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config()
    ready = 0
    publish, ahead = RoutingAhead.publish, []

    def noted(self: RoutingAhead, path: Path, batch: Batch) -> bool:
        ahead.append(publish(self, path, batch))
        return ahead[-1]

    monkeypatch.setattr(RoutingAhead, "publish", noted)

    def on_ready() -> None:
        nonlocal ready
        ready += 1

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, on_ready, new_event_loop) == 0
        assert trainer.steps_trained == list(range(1, STEPS + 1))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert ready == 1
    assert len(ahead) == STEPS
    assert ahead[0], "the routing of the first step was written as its groups were finalized"
    assert_whole(config)
    for batch in trainer.trained:
        staleness = [batch.step - sample.policy_version for sample in batch.samples]
        assert min(staleness) >= 1
        assert max(staleness) <= config.schedule.staleness_limit
        assert len(batch.samples) >= 8
        rows = [sum(len(chunk) for chunk in chunks) for chunks in batch.routed_experts]
        assert rows == (np.diff(batch.sample_offsets) - 1).tolist()
    assert inference.versions == sorted(set(inference.versions))
    assert inference.versions[0] == 0
    assert inference.versions[-1] < STEPS  # nothing is generated with the weights of the last step
    line = metrics_of(config)[-1]
    assert {f"phase/{name}" for name in ("merge", "records", "commit", "malloc_trim")} <= set(line)
    assert {"reward/mean", "reward/toy/mean", "staleness/max", "event_loop_lag/p99", "memory/rss_bytes"} <= set(line)
    assert {"event_loop_late/n", "event_loop_late/callback", "event_loop_blame"} <= set(line)
    # Durable batches are gone, their records stay; the newest checkpoints stay.
    assert list((config.run_dir / "rollouts").glob("step_*/batch.bin")) == []
    assert published_steps(config.run_dir / "checkpoints") == [STEPS - 1, STEPS]
    assert all(isinstance(record["state"]["answer"], str) for record in records_of(config))
    assert all(
        record["turns"][0]["prompt"] == f"<s>user\nexample {record['example_index']}</s>\n<s>assistant\n"
        and record["state"]["answer"] in record["turns"][1]["completion"]
        for record in records_of(config)
    )
    assert "step 5/5" in (config.run_dir / "orchestrator.log").read_text()


def test_the_daemon_runs_on_uvloop(make_config: Callable[..., RunConfig]) -> None:
    """Not only where a test says so: environments play on the loop that the daemon makes by itself."""
    kind = "tests.orchestrator.toy_environment:Toy"
    config = make_config(steps=1, environments=[{"name": "toy", "kind": kind, "state_columns": ["loop"]}])
    with ScriptedTrainer(config.output_dir, "one", 1):
        assert run(config, lambda: None) == 0
    assert {record["state"]["loop"] for record in records_of(config)} == {"uvloop"}


def test_more_groups_than_one_event_starts_are_in_flight_at_once(
    make_config: Callable[..., RunConfig],
) -> None:
    schedule = ScheduleConfig(group_size=1, rollouts_per_step=100, max_inflight_rollouts=150)
    config = make_config(args={"turns": 1, "together": 150}, steps=2, schedule=schedule, filters=[])
    with ScriptedTrainer(config.output_dir, "one", 2):
        assert run(config, lambda: None) == 0
    assert_whole(config, 2)
    assert [line["rollouts/failed"] for line in metrics_of(config)] == [0, 0]


def test_an_environment_is_sampled_as_it_says(make_config: Callable[..., RunConfig], inference: FakeInference) -> None:
    toy = {"kind": "tests.orchestrator.toy_environment:Toy", "args": {"turns": 1}, "state_columns": ["answer"]}
    own = {"temperature": 0.5, "stop": ["."], "chat_template_kwargs": {"opening": "Hm"}}
    config = make_config(
        steps=1,
        environments=[{"name": "plain", **toy}, {"name": "own", **toy, "sampling": own}],
        sampling={"max_tokens": 8, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": ["!", "?"]},
        schedule=ScheduleConfig(group_size=4, rollouts_per_step=16, max_inflight_rollouts=32),
    )
    with ScriptedTrainer(config.output_dir, "one", 1) as trainer:
        assert run(config, lambda: None) == 0
    chat = Chat(config.model)
    asked = {chat.decode(each.prompt_ids.tolist()).rpartition("\n")[2]: each.sampling for each in inference.asked}
    run_wide = SamplingParameters(
        max_tokens=8, top_p=0.9, top_k=7, min_p=0.1, stop=["!", "?"], stop_token_ids=chat.stop_token_ids
    )
    assert asked == {"": run_wide, "Hm": run_wide.replaced(temperature=0.5, stop=(".",))}
    for record in records_of(config):
        sampled = run_wide if record["environment"] == "plain" else asked["Hm"]
        assert record["sampling_args"] == sampled.model_dump()
    (batch,) = trainer.trained
    assert {(info.environment, info.temperature) for info in batch.samples} == {("plain", 1.0), ("own", 0.5)}


@pytest.mark.parametrize("args", [{"turns": 1}, {"turns": 3, "group_scoring": True}], ids=["one turn", "group scoring"])
def test_kinds_of_environments(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, args: dict[str, Any]
) -> None:
    ahead: list[object] = []
    monkeypatch.setattr(RoutingAhead, "add", lambda self, rollouts: ahead.append(rollouts))
    config = make_config(args=args, dump_raw_rollouts=True, gather_chunk_size=3, use_process_pool=True)
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 0
    assert not ahead, "what a process merges has other arrays, so its record would be written twice"
    assert_whole(config)
    assert published_steps(config.run_dir / "raw_rollouts") == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        dump = open_dump(config.run_dir / f"raw_rollouts/step_{step}")
        assert (dump.header.run_id, dump.header.step, dump.header.gather_chunk_size) == ("one", step, 3)
        assert dump.header.group_scoring == (["toy"] if args.get("group_scoring") else [])
        records = records_of(config, f"step_{step}")
        assert [rollout.rollout_id for rollout in dump.rollouts()] == [record["rollout_id"] for record in records]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exception", "KeyError: 'the environment is broken' (in _break"),
        ("exit", "SystemExit"),
        ("gathered", "SystemExit: 3 (in _leave"),
        ("interrupt", "KeyboardInterrupt"),
        ("generator", "GeneratorExit"),
        ("unusual", "Unusual: neither an exception nor an exit"),
        ("nan", "NoReward: score returned nan (float); expected a finite number (in score, "),
        ("slow", "rollout_timeout_seconds = 1.5"),
        ("state", "not JSON-serialisable"),
        ("cancel", "cancelled itself"),
        ("self-cancel", "cancelled itself"),
    ],
)
def test_a_faulty_environment_costs_its_rollouts(make_config: Callable[..., RunConfig], fault: str, said: str) -> None:
    config = make_config(args={"fault": fault}, rollout_timeout_seconds=1.5 if fault == "slow" else 120)
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None) == 0
        assert trainer.steps_trained == list(range(1, STEPS + 1))
    failed = [record for record in records_of(config) if record["error"] is not None]
    assert failed
    assert all(said in record["error"] and record["example_index"] % 3 == 0 for record in failed)
    assert all(np.isfinite(line["reward/mean"]) for line in metrics_of(config))
    assert sum(line["rollouts/failed"] for line in metrics_of(config)) > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("broken", r"KeyError: 'always' \(in "),
        ("always nan", r"NoReward: score returned nan \(float\).* \(in score, "),
        ("always None", r"NoReward: score returned None .* \(in score, "),
    ],
)
def test_a_run_of_which_nothing_can_succeed_ends_with_the_reason(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setattr(giving_up, "SECONDS", 0.0)
    config = make_config(args={"fault": fault})
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 2
    log = (config.run_dir / "orchestrator.log").read_text()
    (line,) = [line for line in log.splitlines() if "nothing can succeed" in line]
    assert re.search(rf"all rollouts of the first \d+ groups failed, each for this reason: {reason}", line)
    assert "toy_environment.py:" in line
    assert log.count("rollout failed") == 1


def test_a_server_that_fails_is_no_failure_of_an_environment(
    make_config: Callable[..., RunConfig], inference: FakeInference
) -> None:
    inference.fail_every = 7
    config = make_config(inference={"urls": [inference.url], "health_interval_seconds": 0.1, "max_retries": 0})
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 0
    lines = metrics_of(config)
    assert sum(line["rollouts/inference_failed"] for line in lines) > 0
    assert sum(line["rollouts/failed"] for line in lines) == 0
    assert not any(name.startswith("failures/") for line in lines for name in line)
    failed = [record for record in records_of(config) if record["error"] is not None]
    assert {record["outcome"] for record in failed} == {"inference_failed"}
    assert all("out of memory" in record["error"] for record in failed)


def test_an_advantage_that_leaves_the_program_costs_its_groups(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(advantage={"kind": "tests.orchestrator.toy_environment:leaving"})
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None) == 0
        assert trainer.steps_trained == list(range(1, STEPS + 1))
    lost = [record for record in records_of(config) if record["example_index"] % 3 == 0]
    assert lost
    assert all("raised SystemExit: 3" in record["error"] for record in lost)


def test_advantages_of_a_step_are_relative_to_all_that_it_trains(make_config: Callable[..., RunConfig]) -> None:
    """As they are sent and as they are recorded."""
    config = make_config(advantage={"kind": "batch_standardised"}, filters=[])
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None) == 0
    assert len(trainer.trained) == STEPS
    for batch in trainer.trained:
        sent = {
            info.rollout_id: float(batch.advantages_T[first:last][batch.loss_mask_T[first:last] == 1].mean())
            for info, first, last in zip(batch.samples, batch.sample_offsets, batch.sample_offsets[1:], strict=False)
        }
        rewards = {info.rollout_id: info.reward for info in batch.samples}
        mean, deviation = np.mean(list(rewards.values())), np.std(list(rewards.values()))
        assert deviation > 0
        assert sent == pytest.approx({name: (reward - mean) / deviation for name, reward in rewards.items()}, abs=1e-5)
        recorded = {record["rollout_id"]: record["advantage"] for record in records_of(config, f"step_{batch.step}")}
        assert {name: recorded[name] for name in sent} == pytest.approx(sent, abs=1e-5)


def test_a_trainer_that_is_killed_gets_again_what_it_lacks(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=8)
    lives: list[ScriptedTrainer] = []

    def train() -> None:
        with ScriptedTrainer(config.output_dir, "one", 8, durable_every=3) as first:
            first.wait_for_step(5)
        lives.append(first)
        with ScriptedTrainer(config.output_dir, "one", 8, durable_every=3, checkpoint=first.checkpoint) as second:
            second.wait_for_step(8)
            finished.wait(60)
        lives.append(second)

    finished = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    assert run(config, lambda: None) == 0
    finished.set()
    thread.join(60)
    first, second = lives
    assert second.steps_trained == list(range(first.checkpoint + 1, 9))
    assert_whole(config, 8)
    for again in second.trained:
        for before in first.trained:
            if before.step == again.step:
                np.testing.assert_array_equal(before.token_ids_T, again.token_ids_T)
                np.testing.assert_array_equal(before.advantages_T, again.advantages_T)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (Rejected(1, "token 7 is outside the vocabulary"), 1, "outside the vocabulary"),
        (Evicted("over budget"), 3, "over budget"),
    ],
)
def test_what_the_trainer_refuses_ends_the_run(
    make_config: Callable[..., RunConfig], answer: Rejected | Evicted, code: int, said: str
) -> None:
    config = make_config()
    with ScriptedTrainer(config.output_dir, "one", STEPS, answer=lambda batch: answer):
        assert run(config, lambda: None) == code
    assert said in (config.run_dir / "orchestrator.log").read_text()


def test_a_trainer_of_another_version_is_a_configuration_to_mend(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.transport.codec.PROTOCOL_VERSION", 99)
    config = make_config()
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 2
    said = f"run 'one' has protocol {PROTOCOL_VERSION}, and this trainer has 99"
    assert said in (config.run_dir / "orchestrator.log").read_text()


@pytest.mark.parametrize(("name", "code"), [("evicted.txt", 3), ("config_validation_error.txt", 2)])
def test_a_verdict_in_control_ends_the_run(make_config: Callable[..., RunConfig], name: str, code: int) -> None:
    config = make_config()

    def refuse() -> None:
        write_atomically(config.run_dir / "control" / name, b"because")

    with ScriptedTrainer(config.output_dir, "one", STEPS, train_seconds=0.5):
        assert run(config, refuse) == code
    assert "because" in (config.run_dir / "orchestrator.log").read_text()


def test_a_verdict_on_a_former_configuration_does_not_end_a_resumed_run(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(resume=True)
    refusal = config.run_dir / "control" / "config_validation_error.txt"
    refusal.parent.mkdir(parents=True)
    refusal.write_text("rank = 99 was too much, which has been mended")
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 0
    assert not refusal.exists()


def test_a_run_whose_directory_is_deleted_ends_and_does_not_make_it_again(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()

    def delete() -> None:
        config.run_dir.rename(config.output_dir / "deleted")

    with ScriptedTrainer(config.output_dir, "one", STEPS, train_seconds=0.5):
        assert run(config, delete) == 3
    assert f"directory {config.run_dir} was deleted" in capsys.readouterr().err
    assert not (config.run_dir / "control").exists()
    assert not (config.run_dir / "checkpoints").exists()


def test_bad_configurations(make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(environments=[EnvironmentConfig(name="toy", kind="revers-text")])
    assert run(config, lambda: None) == 2
    assert "reverse-text" in capsys.readouterr().err
    written = config.run_dir / "control" / "orch.toml"
    assert not written.exists()
    assert run(config, lambda: None) == 2
    assert "reverse-text" in capsys.readouterr().err, "no run has begun there"
    written.touch()
    assert run(config, lambda: None) == 2
    said = capsys.readouterr().err
    assert said.startswith("counterpoint: error: ")
    assert "--resume (in a file: resume = true)" in said
    log = config.run_dir / "orchestrator.log"
    log.unlink()
    log.mkdir()
    assert run(config.model_copy(update={"resume": True}), lambda: None) == 2
    assert f"Is a directory: '{log}'" in capsys.readouterr().err


def test_what_may_be_free_at_the_next_attempt_is_no_bad_configuration(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with taken_port() as port:
        config = make_config(prometheus_port=port)
        assert run(config, lambda: None) == PASSING
    assert f"prometheus_port = {port}" in capsys.readouterr().err
    with taken_over(config.model_copy(update={"resume": True})):
        assert run(config.model_copy(update={"resume": True}), lambda: None) == PASSING
    assert "another orchestrator runs in it" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["made", "started"])
@pytest.mark.parametrize(("error", "code"), [("refused", PASSING), ("absent", 2)])
def test_a_service_that_does_not_answer_at_the_start_is_no_bad_configuration(
    make_config: Callable[..., RunConfig], when: str, error: str, code: int
) -> None:
    """Its supervisor then starts the run again; what a person has to correct is final."""
    unready = {"kind": "tests.orchestrator.toy_environment:Unready", "args": {"when": when, "error": error}}
    config = make_config(environments=[EnvironmentConfig(name="toy", **unready)])
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == code
    said = (config.run_dir / "orchestrator.log").read_text()
    assert "environment 'toy': " in said
    assert "Traceback" not in said


# --- signals and kills, in a process of its own ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_a_resume_finishes(make_config: Callable[..., RunConfig], number: signal.Signals) -> None:
    config = make_config()
    with ScriptedTrainer(config.output_dir, "one", STEPS, train_seconds=0.1) as trainer:
        with started(config) as process:
            trainer.wait_for_step(2)
            process.send_signal(number)
            assert process.wait(DEADLINE_SECONDS) == 128 + number
        assert "drained" in (config.run_dir / "orchestrator.log").read_text()
        resumed = config.model_copy(update={"resume": True})
        waiting = checkpoint.waiting if (checkpoint := load_newest(resumed)) is not None else []
        assert run(resumed, lambda: None) == 0
        assert trainer.steps_trained == list(range(1, STEPS + 1))
    assert_whole(config)
    restored = sum(line["tokens/restored"] for line in metrics_of(config))
    assert restored == completion_tokens(waiting), "what the resumed process did not generate"


def test_a_signal_while_the_trainer_is_awaited(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with started(config) as process:
        wait_until((config.run_dir / "control" / "orch.toml").exists, "the run's directory")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143


def test_a_trainer_that_does_not_come(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(trainer_timeout_seconds=0.2)
    assert run(config, lambda: None) == PASSING
    assert (
        "no trainer was ready for run 'one' within trainer_timeout_seconds = 0.2"
        in (config.run_dir / "orchestrator.log").read_text()
    )


def test_a_second_signal_ends_it_at_once(make_config: Callable[..., RunConfig], inference: FakeInference) -> None:
    config = make_config(args={"fault": "stubborn"}, rollout_timeout_seconds=3600, shutdown_timeout_seconds=3600)
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer, started(config) as process:
        trainer.wait_for_step(1)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: interrupted(process), "the daemon's end")
        assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGINT
    assert "a second signal (SIGINT): leaving at once" in (config.output_dir.parent / "stderr.txt").read_text()


def interrupted(process: subprocess.Popen[bytes]) -> bool:
    """Ctrl-C once more; whether the process has ended. One within a second of another signal is taken for the same."""
    process.send_signal(signal.SIGINT)
    return process.poll() is not None


def test_an_environment_that_will_not_end_is_left_behind(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(args={"fault": "stubborn"}, rollout_timeout_seconds=3600, shutdown_timeout_seconds=2)
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer, started(config) as process:
        trainer.wait_for_step(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    said = (config.output_dir.parent / "stderr.txt").read_text()
    assert "ignore their cancellation: rollout" in said
    assert "not ended within shutdown_timeout_seconds" in said
    checkpoint = load_newest(config)
    assert checkpoint is not None
    # Not what the last step committed, but what had finished since, too.
    assert (config.run_dir / "checkpoints" / f"step_{checkpoint.step}" / "waiting-1.bin").exists()


SLOW_DISK = """
import itertools, threading, time
import counterpoint.orchestrator.step.boundary as step
timer, timers = threading.Timer, itertools.count()
threading.Timer = lambda seconds, function: timer(seconds if next(timers) else 0.0, function)
write = step.write_checkpoint
def slowly(run_dir, checkpoint, *keep):
    if checkpoint.step == 3:
        (run_dir / "slow").touch()
        while not (run_dir / "go").exists():
            time.sleep(0.01)
    write(run_dir, checkpoint, *keep)
step.write_checkpoint = slowly
"""


def test_a_commit_in_progress_is_waited_for_beyond_the_deadline(
    make_config: Callable[..., RunConfig],
) -> None:
    """The deadline passes at once while step 3 is being committed, and begins anew afterwards."""
    config = make_config(shutdown_timeout_seconds=60)
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        with started(config, SLOW_DISK) as process:
            wait_until((config.run_dir / "slow").exists, "the commit of step 3")
            process.send_signal(signal.SIGTERM)
            stderr = config.output_dir.parent / "stderr.txt"
            committing = "a step is being committed"
            wait_until(
                lambda: committing in stderr.read_text() or process.poll() is not None, "the shutdown's deadline"
            )
            (config.run_dir / "go").touch()
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
        assert published_steps(config.run_dir / "checkpoints")[-1] == 3
        assert "drained; the run can be resumed after step 3" in (config.run_dir / "orchestrator.log").read_text()
        assert run(config.model_copy(update={"resume": True}), lambda: None) == 0
        assert trainer.steps_trained == list(range(1, STEPS + 1))
    assert_whole(config)


def test_a_batch_that_is_too_large_is_not_committed_and_the_run_goes_on_once_it_may_be(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(transport={"max_batch_bytes": 100})
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None) == 2
        said = (config.run_dir / "orchestrator.log").read_text()
        assert "this end takes at most 100 (transport.max_batch_bytes" in said
        assert "resume: nothing of this step is committed, and the run continues after step 0" in said
        assert published_steps(config.run_dir / "rollouts") == published_steps(config.run_dir / "checkpoints") == []
        assert run(make_config(resume=True), lambda: None) == 0
        assert trainer.steps_trained == list(range(1, STEPS + 1))
    assert_whole(config)


def test_a_commit_does_not_write_the_groups_that_are_ready(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would be as much as a batch, at each step again."""
    config = make_config()
    schedulers: list[RolloutScheduler] = []
    committed: list[StepCheckpoint] = []

    class Noticed(RolloutScheduler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            schedulers.append(self)

    merge, write = StepBoundary.merge, write_checkpoint

    async def merge_slowly(boundary: StepBoundary, step: int, rollouts: Sequence[Rollout]) -> tuple[Batch, int]:
        merged = await merge(boundary, step, rollouts)
        await until(lambda: step > 1 or bool(schedulers[0].ready_group_ids()), "a group that is ready")
        return merged

    def write_noticed(run_dir: Path, checkpoint: StepCheckpoint, *keep: Any) -> None:
        committed.append(checkpoint)
        write(run_dir, checkpoint, *keep)

    monkeypatch.setattr("counterpoint.orchestrator.components.RolloutScheduler", Noticed)
    monkeypatch.setattr(StepBoundary, "merge", merge_slowly)
    monkeypatch.setattr("counterpoint.orchestrator.step.boundary.write_checkpoint", write_noticed)
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None) == 0
    assert [checkpoint.step for checkpoint in committed] == list(range(1, STEPS + 1))
    assert committed[0].waiting == []
    assert_whole(config)


def test_threads_that_never_end_hold_up_neither_the_run_nor_its_end(
    make_config: Callable[..., RunConfig],
) -> None:
    config = make_config(args={"fault": "thread"}, rollout_timeout_seconds=1.0, shutdown_timeout_seconds=2, steps=8)
    with ScriptedTrainer(config.output_dir, "one", 8) as trainer:
        with started(config) as process:
            assert process.wait(240) == 0
        assert trainer.steps_trained == list(range(1, 9))
    assert_whole(config, 8)
    said = (config.output_dir.parent / "stderr.txt").read_text()
    assert "run one is done" in said
    assert "threads of environments" in said


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.04])
def test_sigkill_in_the_middle_of_a_step(make_config: Callable[..., RunConfig], delay: float) -> None:
    config = make_config(steps=8)
    with ScriptedTrainer(config.output_dir, "one", 8, durable_every=3, train_seconds=0.02) as trainer:
        for step in (2, 5):
            with started(config):
                trainer.wait_for_step(step)
                time.sleep(delay)
            config = config.model_copy(update={"resume": True})
        assert run(config, lambda: None) == 0
        assert trainer.steps_trained == list(range(1, 9))
    assert_whole(config, 8)
