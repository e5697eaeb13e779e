"""Ranks that divide a mixture's experts train as one plain rank does, whatever fails on one of them."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from counterpoint.inference.digest import digests_of
from counterpoint.trainer.broadcast import own_memory
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.model.experts import WEIGHTS
from counterpoint.trainer.model.load import load_model
from counterpoint.transport.messages import Acknowledged, Ready
from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.expert_learner import FULL, LONGEST, LORA, WAYS
from tests.trainer.forked_ranks import launch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.orchestrator_end import ended, feeder, log_path, send_signal, trainer_process, write_run
from tests.trainer.sharded_learner import FEW_STEPS, SCENARIOS, STEPS
from tests.trainer.test_sharding import assert_close, assert_published_whole

pytestmark = pytest.mark.slow

PART: dict[str, Any] = {"steps": 9, "checkpoint_interval": 2, "learning_rate": 1e-4}
"""The settings of a run that is stopped."""


@pytest.fixture(scope="module")
def found(moe_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What two ranks, a plain rank and four ranks have computed, by number of ranks."""
    directory = tmp_path_factory.mktemp("experts")
    for ranks in (2, 4):
        launch(ranks, directory, moe_directory, module="tests.trainer.expert_learner")
    return {ranks: json.loads((directory / f"found_{ranks}.json").read_text()) for ranks in (2, 4)}


@pytest.mark.parametrize(
    ("ranks", "way", "name"),
    [(ranks, way, name) for ranks, ways in WAYS.items() for way, (_, names) in ways.items() for name in names],
)
def test_ranks_with_a_part_of_the_experts_each_train_as_one_with_all_of_them(
    found: dict[Any, Any], moe_directory: Path, ranks: int, way: str, name: str
) -> None:
    divided, plain = found[ranks][way][name], found[2]["plain"][name]
    assert len(plain["lines"]) == (STEPS if name == FULL else FEW_STEPS)
    assert_close(divided, plain, list(SCENARIOS[name][1]))
    assert all(line["one"]["grad_norm"] > 0 and line["one"]["replayed_share"] > 0 for line in plain["lines"])
    whole, weights = plain["elements"], load_model(moe_directory, "float32", torch.device("cpu")).named_parameters()
    if way.startswith("sharded"):
        assert divided["elements"] == whole / ranks, "a rank holds its part of everything"
    else:
        assert divided["elements"] == whole - sum(
            weight.numel() // 2 for name, weight in weights if ".experts." in name
        )


def of_steps(result: dict[str, Any], *steps: int) -> dict[str, Any]:
    return result | {"lines": [result["lines"][step - 1] for step in steps]}


def test_passes_that_fail_at_the_owner_of_other_ranks_tokens_are_tried_in_pieces(found: dict[Any, Any]) -> None:
    own, plain = (of_steps(found[2][kind][FULL], 1, 2, 3, 5) for kind in ("failing", "failing-plain"))
    assert_close(own, plain, ["one"])


def test_a_sample_that_does_not_fit_at_its_experts_owner_costs_its_run_alone(found: dict[Any, Any]) -> None:
    """Whether that rank has samples of another run, or none at all."""
    for name in (FULL, LORA):
        assert found[2]["failing"][name]["lines"][3]["one"] == (
            f"training step 4: a sample of {LONGEST} tokens does not fit into memory: "
            "a rank that computes experts of its tokens lacks memory"
        )
    own, plain = (of_steps(found[2][kind][LORA], 4) for kind in ("failing", "failing-plain"))
    assert_close(own, plain | {"weights": {"two": {}}}, ["two"])


def test_no_run_is_to_blame_for_a_rank_without_memory(found: dict[Any, Any]) -> None:
    assert found[2]["without memory"].startswith("a rank lacks memory even for a pass of 2 made-up tokens")


def test_a_run_whose_row_raises_between_the_transfers_is_refused_and_the_other_is_not_affected(
    found: dict[Any, Any],
) -> None:
    own, plain = (of_steps(found[2][kind][LORA], 1, 2, 3, 5) for kind in ("failing", "failing-plain"))
    assert_close(own, plain, ["one"])
    assert own["lines"][3]["two"] == "training step 5: a row raised ValueError: cannot be computed"


def test_a_run_continues_on_other_ranks_and_groups_with_the_same_bits(found: dict[Any, Any]) -> None:
    """Two ranks that divide the experts alone, one plain rank, four sharded ones in two groups, and four in one group."""
    parts = [*found[2]["resumed"], *found[4]["resumed"]]
    lines = found[2]["plain"][FULL]["lines"]
    for before, after in pairwise(parts):
        assert after["loaded"] == before["weights"], "bit for bit"
        begin, end = before["step"], after["step"]
        assert begin < end <= STEPS
        assert_close(after, {"lines": lines[begin:end], "weights": {"one": {}}}, ["one"])
    assert [part["step"] for part in parts] == [2, 4, 6, 7]
    for part, former in zip(parts, ([], None, [2, 4], [2, 4, 6]), strict=True):
        if former is not None:
            assert_published_whole(part["meanwhile"], former, part["step"])


async def test_a_trainer_whose_ranks_divide_experts_publishes_all_of_them(moe_directory: Path, tmp_path: Path) -> None:
    write_run(make_run_config(tmp_path, moe_directory, **PART))
    config = TrainerConfig(
        output_dir=tmp_path, model=str(moe_directory), processes=2, expert_parallel=2, max_tokens=24, threads=1
    )
    alone = make_lone_run(tmp_path / "alone", moe_directory, **PART)
    for step in (1, 2):
        alone.train(make_batch(step, routed=True))
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            await end.train(*(make_batch(step, routed=True) for step in (1, 2)))
            send_signal(process, signal.SIGTERM)
            await end.until(Acknowledged, step=2)
        assert await ended(process) == 143, log_path(config).read_text()
    saved = tmp_path / "trainer" / "default" / "checkpoints" / "step_2"
    names = {path.name for path in saved.iterdir()}
    assert names == {"STABLE", "state.json", "state.safetensors", "state.rank_1.safetensors"}
    with safe_open(saved / "state.rank_1.safetensors", "pt") as other:
        assert {key.rpartition(".")[2] for key in other.keys()} == set(WEIGHTS), "the rest is in the first file"  # noqa: SIM118
    published = tmp_path / "run_default" / "broadcast" / "step_2"
    served = load_model(published, "float32", torch.device("cpu"))
    for name, weight in alone.weights().items():
        torch.testing.assert_close(served.get_parameter(name), weight, rtol=0, atol=1e-5)
    probe = json.loads((published / "probe.json").read_text())
    assert probe["digests"] == digests_of(own_memory(served.state_dict()))
