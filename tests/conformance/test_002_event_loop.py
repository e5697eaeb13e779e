"""Document 002, the event loop: its configuration, its commands, its metrics and its rules, by the document's names."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import orjson
import pytest

from counterpoint.advantages import AdvantageInputs, AdvantageOutputs
from counterpoint.cli.main import main
from counterpoint.environments.config import ALL, EnvironmentConfig
from counterpoint.environments.workers.load import load_environment
from counterpoint.inference.base import ServerFailure
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.job.tracking.feed import Feed
from counterpoint.orchestrator import EventLoopLagMonitor, LagDistribution
from counterpoint.orchestrator.rollouts.dump import write_dump
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.run.config import AdvantageConfig, LagConfig, RunConfig
from tests.support.rollouts import make_group

CONFIGURATION = """
[orchestrator]
dump_raw_rollouts = true
gather_chunk_size = 128
"""

LAG = [f"event_loop_lag/{name}" for name in ("max", "mean", "median", "min", "n", "p90", "p99")]


def test_the_printed_configuration_is_read() -> None:
    section = tomllib.loads(CONFIGURATION)["orchestrator"]
    environments = [{"name": "words", "kind": "reverse-text"}]
    config = RunConfig.model_validate({"output_dir": "out", "model": "m", "environments": environments, **section})
    assert (config.dump_raw_rollouts, config.gather_chunk_size, config.use_process_pool) == (True, 128, False)
    assert RunConfig.model_fields["gather_chunk_size"].default is None


@pytest.mark.parametrize("named", ["--dump NOWHERE", "--dump=NOWHERE"])
def test_a_dump_is_named_in_either_way(capsys: pytest.CaptureFixture[str], named: str) -> None:
    assert main(f"attribute {named}".split()) == 2
    assert "NOWHERE does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_the_printed_command_attributes_the_lag_of_a_dump_to_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "raw_rollouts" / "step_8"
    shape = Shape(rollouts=8, turns=2, tokens=200, layers=2, top_k=2, experts=8)
    write_dump(dump, header_of(shape), synthetic_rollouts(shape))
    options = "--gather-chunk-size 128 --synthetic-traffic 200 --quick --json"
    assert main(f"attribute --dump={dump} {options}".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["phase"] for row in found] == ["finalize", "merge", "records", "commit", "malloc_trim"]
    assert all(row["alone"]["event_loop_lag"]["n"] > 0 for row in found)


def test_lag_is_sampled_ten_times_a_second_and_has_a_99th_percentile() -> None:
    assert LagConfig().interval_seconds == 0.1
    assert EventLoopLagMonitor().take().n >= 1
    assert sorted(LagDistribution.of([0.0] * 99 + [0.05], 0.1).metrics()) == LAG
    assert LagConfig().warn_p99_seconds < math.inf


def test_trackers_have_the_lag_and_the_metrics_of_the_trainer_by_their_names() -> None:
    feed = Feed("a", orchestrated=True)
    lag = LagDistribution.of([0.001, 0.2], 0.1).metrics()
    feed.add_shipped(orjson.dumps({"step": 1, "time": 1.0, **lag}))
    trained = {"step": 1, "time": 2.0, "entropy/all": 0.5, "entropy/words": 0.5, "mismatch_kl/all": 0.1}
    feed.add_trained(orjson.dumps(trained), trained)
    (row,) = feed.rows(over=False)
    of_trainer = ["trainer/entropy/all", "trainer/entropy/words", "trainer/mismatch_kl/all"]
    assert sorted(row.values) == [*LAG, *of_trainer]
    assert row.values["event_loop_lag/p99"] == lag["event_loop_lag/p99"]


def test_all_is_the_name_of_no_environment() -> None:
    with pytest.raises(ValueError, match=f"'{ALL}' stands for all environments together"):
        EnvironmentConfig(name="all", kind="reverse-text")


def advantage_fn(inputs: AdvantageInputs) -> AdvantageOutputs:
    """As in the document: one group in, a list of floats out."""
    rewards = [rollout.reward or 0.0 for rollout in inputs.rollouts]
    return AdvantageOutputs(advantages=[reward - min(rewards) for reward in rewards])


def test_an_advantage_function_gets_one_group_of_any_size_and_returns_a_list() -> None:
    advantage = load_advantage(AdvantageConfig(kind=f"{__name__}:advantage_fn"))
    assert advantage.compute(make_group([1.0, 3.0, 2.0])) == [0.0, 2.0, 1.0]
    assert advantage.compute(make_group([3.0])) == [0.0]


def test_an_unknown_state_column_is_an_error_at_the_start() -> None:
    config = EnvironmentConfig(name="words", kind="reverse-text", state_columns=["answer", "anwser"])
    with pytest.raises(ValueError, match="its state has no 'anwser'; did you mean 'answer'"):
        load_environment(config)


def test_columns_that_are_always_saved_may_be_named_and_none_is_saved_twice() -> None:
    columns = ["trajectory", "answer", "sampling_args", "answer"]
    config = EnvironmentConfig(name="words", kind="reverse-text", state_columns=columns)
    assert config.state_columns == ["answer"]


def test_an_answer_without_token_ids_is_refused_before_anything_could_need_them() -> None:
    choice = {"text": "abc", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.1]}}
    client = OpenAIClient("http://127.0.0.1:1", HttpSessions(PoolConfig(urls=["http://127.0.0.1:1"])))
    with pytest.raises(ServerFailure, match="without token ids"):
        client._parse(orjson.dumps({"choices": [choice]}), 0)
