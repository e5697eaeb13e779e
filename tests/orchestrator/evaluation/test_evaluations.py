"""Evaluations beside training, in the whole daemon over the real wires: results, kept weights, resumes, faulty environments."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import uvloop

import counterpoint.orchestrator.ending
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.evaluation import weights
from counterpoint.orchestrator.evaluation.evaluations import Evaluations
from counterpoint.orchestrator.evaluation.versions import adapter_name
from counterpoint.orchestrator.rollouts.players import GroupsPool
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.atomic import STABLE, publish_directory, published_steps
from tests.orchestrator.daemons import STEPS, assert_whole, metrics_of, records_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference
from tests.support.polling import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.slow

TOY = "tests.orchestrator.toy_environment:Toy"
LORA = {"lora": {"rank": 4}}


def evaluation(**fields: Any) -> dict[str, Any]:
    environment = {"name": "held-out", "kind": TOY, "args": fields.pop("args", {}), "state_columns": ["answer"]}
    values = {
        "name": "toy-eval",
        "environments": [environment],
        "interval": 2,
        "examples": 6,
        "rollouts_per_example": 2,
        "pass_at": [1, 2],
        "success": 0.5,
    }
    return values | fields


def lines_of(config: RunConfig) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (config.run_dir / "evaluations.jsonl").read_bytes().splitlines()]


def test_evaluations_beside_training(make_config: Callable[..., RunConfig], inference: FakeInference) -> None:
    config = make_config(evaluations=[evaluation(keep_best="pass@1", sampling={"temperature": 0.5})], training=LORA)
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None, uvloop.new_event_loop) == 0
    assert_whole(config)
    lines = lines_of(config)
    steps = [line["step"] for line in lines]
    assert steps[0] == 0
    assert steps[-1] == STEPS
    assert steps == sorted(set(steps))
    for line in lines:
        assert line["policy_version/min"] == line["policy_version/max"] == line["step"]
        assert line["rollouts/completed"] == 12
        assert line["rollouts/failed"] == 0
        assert line["examples"] == 6
        assert line["sampling"]["held-out"]["temperature"] == 0.5
        assert line["metrics"]["pass@1"]["value"] == line["metrics"]["held-out/pass@1"]["value"]
        records = (
            (config.run_dir / f"evaluations/toy-eval/step_{line['step']}/rollouts.jsonl").read_bytes().splitlines()
        )
        rewards = [orjson.loads(record)["reward"] for record in records]
        assert len(rewards) == 12
        assert sum(reward >= 0.5 for reward in rewards) / 12 == pytest.approx(line["metrics"]["pass@1"]["value"])
        assert sum(rewards) / 12 == pytest.approx(line["metrics"]["reward/mean"]["value"])
    # Nothing of it is trained or in the metrics of training.
    assert {record["environment"] for record in records_of(config)} == {"toy"}
    assert all(sample for batch in trainer.trained for sample in batch.samples)
    named = [name for line in metrics_of(config) for name in line if name.startswith("evaluation/")]
    assert "evaluation/toy-eval/pass@1/low" in named
    # The adapter of an evaluation is one of its own, and is gone afterwards.
    asked = {request.model for request in inference.asked}
    assert asked == {"one", adapter_name("one")}
    assert adapter_name("one") in inference.unloaded
    # The best weights are kept, those of other evaluated steps are not.
    (best,) = published_steps(config.run_dir / "best")
    kept = orjson.loads((config.run_dir / f"best/step_{best}/best.json").read_bytes())
    assert kept["score"] == max(line["metrics"]["pass@1"]["value"] for line in lines)
    assert kept["step"] == best
    assert (config.run_dir / f"best/step_{best}/probe.json").is_file()
    assert list((config.run_dir / "evaluations/toy-eval/weights").iterdir()) == []


def test_full_weights_are_evaluated_as_they_are_served(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(evaluations=[evaluation(keep_best="reward/mean", share=0.05)])
    with ScriptedTrainer(config.output_dir, "one", STEPS):
        assert run(config, lambda: None, uvloop.new_event_loop) == 0
    assert_whole(config)
    lines = lines_of(config)
    assert lines[-1]["step"] == STEPS
    for line in lines:
        assert line["step"] <= line["policy_version/min"] <= line["policy_version/max"] <= STEPS
    assert lines[-1]["policy_version/min"] == STEPS
    (best,) = published_steps(config.run_dir / "best")
    assert (config.run_dir / f"best/step_{best}" / STABLE).exists()


@pytest.mark.parametrize("group_scoring", [False, True])
def test_failed_rollouts_are_counted_and_no_success(make_config: Callable[..., RunConfig], group_scoring: bool) -> None:
    args = {"fault": "exception", "group_scoring": group_scoring}
    config = make_config(
        steps=1, evaluations=[evaluation(args=args, examples=None, success=0.0, keep_best="pass@1")], training=LORA
    )
    with ScriptedTrainer(config.output_dir, "one", 1):
        assert run(config, lambda: None, uvloop.new_event_loop) == 0
    for line in lines_of(config):
        failed = 2 * len(range(0, 50, 3))
        assert line["rollouts/failed"] == failed
        assert line["rollouts/completed"] == 100 - failed
        assert line["metrics"]["pass@1"]["value"] == pytest.approx(1 - failed / 100)
        assert sum(line["failures"].values()) == failed
    assert published_steps(config.run_dir / "best") == [], "more than a tenth failed"


def test_a_run_that_waits_for_its_last_evaluation_says_how_far_it_is(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("counterpoint.transport.process.notify.notify", lambda text: not said.append(text))  # type: ignore[func-returns-value]
    config = make_config(steps=1, evaluations=[evaluation()], training=LORA)
    with ScriptedTrainer(config.output_dir, "one", 1):
        assert run(config, lambda: None, uvloop.new_event_loop) == 0
    parts = [text.removeprefix("STATUS=").rpartition("; ")[2] for text in said if "evaluation toy-eval of step" in text]
    told = [text for text, _ in itertools.groupby(parts)]  # what stands before it may change meanwhile
    counts = [(step, ended) for step in (0, 1) for ended in range(13)]
    assert told == [f"evaluation toy-eval of step {step}: {ended} of 12 rollouts have ended" for step, ended in counts]
    assert any(text.startswith("STATUS=step 1 of 1; evaluation toy-eval of step 1: 12 of 12") for text in said)


def evaluations_of(config: RunConfig) -> Evaluations:
    """Those of a run that configures none."""
    return Evaluations(
        config,
        [],
        cast(GroupsPool, None),
        cast(InferencePool, None),
        handle=lambda event: None,
        publish=lambda line: None,
        on_progress=lambda: None,
        say=lambda words: None,
    )


async def test_nothing_of_a_version_is_kept_where_nothing_is_evaluated(make_config: Callable[..., RunConfig]) -> None:
    """Not even a number a step, over a million steps."""
    evaluations = evaluations_of(make_config())
    await evaluations.run()
    for version in range(100):  # so that what is made once is made
        evaluations.policy_updated(version)
    tracemalloc.start()
    try:
        for version in range(1000, 11_000):
            evaluations.policy_updated(version)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10_000


async def test_weights_are_held_once_where_an_evaluation_begins_while_they_are_linked(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would remove, for a moment, what the first has published and begins to read."""
    config = make_config(training=LORA)
    with publish_directory(config.run_dir / "broadcast" / "step_1") as partial:
        (partial / "probe.json").write_text("{}")
    evaluations = evaluations_of(config)
    linked: list[Path] = []
    link = weights._link

    def slow(source: Path, target: Path, files: dict[str, bytes]) -> None:
        linked.append(target)
        time.sleep(0.1)
        link(source, target, files)

    monkeypatch.setattr(weights, "_link", slow)
    first, second = await asyncio.gather(evaluations._hold("toy", 1), evaluations._hold("toy", 1))
    assert first == second
    assert first is not None
    assert (first / "probe.json").exists()
    assert len(linked) == 1


def test_an_interrupted_evaluation_is_played_again(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The evaluation waits for more rollouts at once than it gets, and is drained; resumed without that, it ends."""
    hanging = evaluation(args={"together": 10_000}, interval=100)
    config = make_config(evaluations=[hanging], training=LORA)
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer, started(config) as process:
        wait_until(
            lambda: len(metrics_of(config)) >= 2 if (config.run_dir / "metrics.jsonl").exists() else False, "steps"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    assert not (config.run_dir / "evaluations.jsonl").exists()
    assert published_steps(config.run_dir / "evaluations/toy-eval/weights")
    resumed = make_config(evaluations=[evaluation(interval=100)], training=LORA, resume=True)
    with ScriptedTrainer(config.output_dir, "one", STEPS, checkpoint=trainer.checkpoint):
        assert run(resumed, lambda: None, uvloop.new_event_loop) == 0
    assert_whole(config)
    assert [line["step"] for line in lines_of(config)] == [0, STEPS]
    # A run whose steps are all committed plays what is missing.
    (config.run_dir / "evaluations.jsonl").unlink()
    with ScriptedTrainer(config.output_dir, "one", STEPS, checkpoint=STEPS):
        assert run(resumed, lambda: None, uvloop.new_event_loop) == 0
    assert [line["step"] for line in lines_of(config)] == [STEPS]


@pytest.mark.parametrize("training", [LORA, {}], ids=["adapter", "full"])
def test_a_resume_evaluates_the_last_version_although_the_trainer_has_left(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, training: dict[str, Any]
) -> None:
    monkeypatch.setattr(counterpoint.orchestrator.ending, "SILENCE_SECONDS", 0.1)
    config = make_config(steps=1, evaluations=[evaluation(interval=100)], training=training)
    with ScriptedTrainer(config.output_dir, "one", 1):
        assert run(config, lambda: None, uvloop.new_event_loop) == 0
    with publish_directory(config.output_dir / "trainer" / "one" / "checkpoints" / "step_1"):
        pass
    # As after a kill during the last evaluation.
    file = config.run_dir / "evaluations.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    for _ in range(2):  # The second resume finds nothing to do.
        assert run(config.model_copy(update={"resume": True}), lambda: None, uvloop.new_event_loop) == 0
        assert [line["step"] for line in lines_of(config)] == [0, 1]
