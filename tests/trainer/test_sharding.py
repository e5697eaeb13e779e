"""Training with a model that is divided over ranks: the same results as one plain rank, whatever fails on one of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from counterpoint.inference.digest import digests_of
from counterpoint.trainer.broadcast import own_memory
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Acknowledged, Ready
from counterpoint.transport.process.launch import descendants
from tests.support.polling import until
from tests.trainer.conftest import VOCABULARY, make_batch, make_run_config
from tests.trainer.forked_ranks import launch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.orchestrator_end import (
    ended,
    feeder,
    log_path,
    metrics_lines,
    send_signal,
    trainer_process,
    write_run,
)
from tests.trainer.sharded_learner import RESUMED, SCENARIOS, STEPS
from tests.trainer.test_ranks import process_of_rank, until_gone

pytestmark = pytest.mark.slow

TIMES = {"tokens_per_second", "phase/train"}

SEVERAL = {2: list(SCENARIOS), 4: ["dense-full-reference"]}
"""What is trained, by number of ranks. Four hold a quarter of the weights each, and continue a mixture (`RESUMED`). Mixtures and
adapters are trained on four in `test_experts.py`, with shared rows and divided experts."""


@pytest.fixture(scope="module")
def found(dense_directory: Path, moe_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks and one plain rank have computed, in one launch, and four ranks in another, which also continue."""
    directory = tmp_path_factory.mktemp("sharded")
    launch(2, directory, dense_directory, moe_directory, module="tests.trainer.sharded_learner")
    launch(4, directory, dense_directory, moe_directory, *SEVERAL[4], "resumed", module="tests.trainer.sharded_learner")
    result: dict[str, Any] = json.loads((directory / "found_2.json").read_text())
    four = json.loads((directory / "found_4.json").read_text())
    return result | {"sharded-4": four["sharded"], "resumed-4": four["resumed-4"]}


def assert_published_whole(meanwhile: dict[str, Any], former: list[int], step: int) -> None:
    """What `go_on_while_others_write` has found; `former`: the steps that were published before."""
    assert meanwhile == {
        "trained": step + 1,
        "half": former,
        "whole": [*former, step],
        "fault": "rank 1 cannot write its part of a checkpoint: [Errno 28] No space left on device",
        "left": sorted(f"step_{each}" for each in [*former, step]),
    }


def assert_close(own: dict[str, Any], plain: dict[str, Any], runs: list[str]) -> None:
    """Metrics of every step, and weights in the end, within 1e-5."""
    for line, expected in zip(own["lines"], plain["lines"], strict=True):
        for run_id in runs:
            names = expected[run_id].keys() - TIMES
            assert {name: line[run_id][name] for name in names} == pytest.approx(
                {name: expected[run_id][name] for name in names}, rel=1e-5, abs=1e-5
            )
    for run_id in runs:
        for name, values in plain["weights"][run_id].items():
            assert own["weights"][run_id][name] == pytest.approx(values, rel=0, abs=1e-5), name


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in SEVERAL.items() for name in names])
def test_ranks_with_a_part_of_the_model_each_train_as_one_with_all_of_it(
    found: dict[str, Any], ranks: int, name: str
) -> None:
    sharded, plain = found["sharded" if ranks == 2 else f"sharded-{ranks}"][name], found["plain"][name]
    assert_close(sharded, plain, list(SCENARIOS[name][1]))
    assert sharded["elements"] == plain["elements"] / ranks, "a rank holds its part of the weights"
    assert sharded["reference_elements"] == [each / ranks for each in plain["reference_elements"]]
    assert all(line["one"]["grad_norm"] > 0 for line in plain["lines"])


def test_a_tied_weight_is_trained_where_it_is_embedded_too_if_ranks_have_unequal_parts_of_it(
    dense_directory: Path, moe_directory: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(dense_directory, vocab_size=VOCABULARY + 1)
    assert config.tie_word_embeddings
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "odd")
    launch(2, tmp_path, tmp_path / "odd", moe_directory, "dense-full", module="tests.trainer.sharded_learner")
    found = json.loads((tmp_path / "found_2.json").read_text())
    assert_close(found["sharded"]["dense-full"], found["plain"]["dense-full"], ["one"])


def test_a_row_that_does_not_fit_on_one_rank_is_tried_in_pieces_beside_the_others(found: dict[str, Any]) -> None:
    own, plain = (found["failing"][kind]["dense-full"] for kind in ("sharded", "plain"))
    *lines, refused = own["lines"]
    assert_close(own | {"lines": lines}, plain, ["one"])
    assert refused["one"] == "training step 4: a row raised ValueError: cannot be computed"


def test_a_run_whose_row_raises_on_one_rank_is_refused_and_the_other_is_not_affected(found: dict[str, Any]) -> None:
    own, plain = (found["failing"][kind]["moe-lora-two"] for kind in ("sharded", "plain"))
    assert_close(own, plain, ["one"])
    assert own["lines"][3]["two"] == "training step 4: a row raised ValueError: cannot be computed"


def test_a_reference_that_one_rank_cannot_load_refuses_its_run_and_no_other(found: dict[str, Any]) -> None:
    assert found["refused"]["failure"].endswith("cannot be loaded: MemoryError: no room")
    assert [line["two"]["grad_norm"] > 0 for line in found["refused"]["lines"]] == [True, True]


def test_a_step_that_one_rank_has_no_memory_to_open_costs_its_run_alone(found: dict[str, Any]) -> None:
    assert found["not opened"]["faults"] == ["opening step 1 failed: MemoryError: no room"] * 3
    assert [line["two"]["grad_norm"] > 0 for line in found["not opened"]["lines"]] == [True, True]


def test_a_run_continues_on_another_number_of_ranks_with_the_same_bits(found: dict[str, Any]) -> None:
    """Two ranks, then one that is not sharded, then four."""
    plain = found["plain"][RESUMED]["lines"]
    for before, after in (("resumed-2", "resumed-1"), ("resumed-1", "resumed-4")):
        assert found[after]["loaded"] == found[before]["weights"], "bit for bit"
        begin, end = found[before]["step"], found[after]["step"]
        assert begin < end <= STEPS
        expected = {"lines": plain[begin:end], "weights": {"one": {}}}
        assert_close(found[after], expected, ["one"])
    assert found["resumed-4"]["weights"] != found["resumed-4"]["loaded"]


def test_training_goes_on_while_others_write_and_only_whole_checkpoints_are_published(found: dict[str, Any]) -> None:
    """Nothing is published while half of a slice is on the disk of another rank, nor when that is full."""
    assert_published_whole(found["resumed-2"]["meanwhile"], [], 2)
    assert_published_whole(found["resumed-4"]["meanwhile"], [2, 4], 6)


async def test_a_sharded_trainer_publishes_whole_weights_and_continues_after_a_rank_was_killed(
    moe_directory: Path, tmp_path: Path
) -> None:
    training: dict[str, Any] = {"steps": 9, "checkpoint_interval": 2, "learning_rate": 1e-4}
    write_run(make_run_config(tmp_path, moe_directory, **training))
    config = TrainerConfig(
        output_dir=tmp_path, model=str(moe_directory), processes=2, sharding=True, max_tokens=24, threads=1
    )
    alone = make_lone_run(tmp_path / "alone", moe_directory, **training)
    expected = [alone.train(make_batch(step, routed=True)) for step in (1, 2, 3, 4)]
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            await end.train(*(make_batch(step, routed=True) for step in (1, 2, 3)))
            await until(
                lambda: len(published_steps(tmp_path / "trainer" / "default" / "checkpoints")) == 1, "a checkpoint"
            )
            children = descendants(process.pid or 0)
            os.kill(await asyncio.to_thread(process_of_rank, children, 1), signal.SIGKILL)
            assert await ended(process) == 1
        await until_gone(children)
    assert "a rank of the trainer died" in log_path(config).read_text()
    files = {path.name for path in (tmp_path / "trainer/default/checkpoints/step_2").iterdir()}
    assert files == {"STABLE", "state.json", "state.safetensors", "state.rank_1.safetensors"}
    config = config.model_copy(update={"resume": True})
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=3)
            await end.train(*(make_batch(step, routed=True) for step in (3, 4)))
            send_signal(process, signal.SIGTERM)
            await end.until(Acknowledged, step=4)
        assert await ended(process) == 143, log_path(config).read_text()
    for line, metrics in zip(metrics_lines(tmp_path), expected, strict=True):
        for name in (
            "loss",
            "entropy",
            "mismatch_kl",
            "grad_norm",
            "loss/guess",
            "replayed_share",
            "tokens",
            "samples",
        ):
            assert line[name] == pytest.approx(metrics[name], abs=1e-5), name
    published = tmp_path / "run_default" / "broadcast" / "step_4"
    assert "distributed" not in (published / "config.json").read_text()
    served = load_model(published, "float32", torch.device("cpu"))
    for name, weight in alone.weights().items():
        torch.testing.assert_close(served.get_parameter(name), weight, rtol=0, atol=1e-5, check_device=False)
    probe, digests = json.loads((published / "probe.json").read_text()), digests_of(own_memory(served.state_dict()))
    assert probe["digests"] == digests
    tokens_T = torch.tensor(probe["token_ids"])
    positions_T = torch.arange(len(tokens_T))
    values_P, _ = log_probabilities(served, tokens_T, positions_T, [len(tokens_T)], positions_T[:-1], tokens_T[1:], 1.0)
    assert values_P.tolist() == pytest.approx(probe["log_probabilities"], abs=1e-5)
