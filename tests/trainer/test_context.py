"""Ranks that share rows by their tokens compute what one plain rank computes, with and without a model divided over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.context_learner import NAMES, REFERENCE
from tests.trainer.forked_ranks import launch
from tests.trainer.sharded_learner import SCENARIOS
from tests.trainer.test_sharding import assert_close

pytestmark = pytest.mark.slow


SEVERAL = {2: NAMES, 4: ["dense-full"]}
"""What is trained, by number of ranks: of four, in two groups, also a mixture and adapters in `test_experts.py`."""


@pytest.fixture(scope="module")
def found(dense_directory: Path, moe_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What two ranks, four ranks and a plain one have computed, by number of ranks."""
    results = {}
    for ranks, names in ((2, []), (4, SEVERAL[4])):
        directory = tmp_path_factory.mktemp(f"context_{ranks}")
        launch(ranks, directory, dense_directory, moe_directory, *names, module="tests.trainer.context_learner")
        results[ranks] = json.loads((directory / "found.json").read_text())
    return results


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in SEVERAL.items() for name in names])
def test_ranks_that_share_rows_train_as_one(found: dict[int, Any], ranks: int, name: str) -> None:
    plain, shared = found[2]["plain"][name], found[ranks]["shared"][name]
    assert_close(shared, plain, list(SCENARIOS[name][1]))
    assert all(line["one"]["grad_norm"] > 0 for line in plain["lines"])
    assert shared["elements"] == plain["elements"] / (4 if ranks == 4 else 1)


def test_a_row_that_lacks_memory_on_one_of_its_ranks_is_tried_in_pieces_on_all(found: dict[int, Any]) -> None:
    own, plain = (found[2][kind]["dense-full"] for kind in ("failing", "failing-plain"))
    *lines, refused = own["lines"]
    assert_close(own | {"lines": lines}, plain, ["one"])
    assert refused["one"] == "training step 4: a row raised ValueError: cannot be computed"


def test_a_sample_that_lacks_memory_on_one_of_its_ranks_costs_its_run_alone(found: dict[int, Any]) -> None:
    own, plain = (found[2][kind]["moe-lora-two"] for kind in ("failing", "failing-plain"))
    assert_close(own, plain, ["one"])
    assert own["lines"][3]["two"].startswith("training step 4: a sample of 5 tokens does not fit into memory: Runtime")


def test_a_reference_that_lacks_memory_on_one_of_the_ranks_is_asked_in_pieces(found: dict[int, Any]) -> None:
    own, plain = found[2]["failing"][REFERENCE], found[2]["plain"][REFERENCE]
    assert_close(own | {"weights": {"one": {}}}, {"lines": plain["lines"][:2], "weights": {"one": {}}}, ["one"])
