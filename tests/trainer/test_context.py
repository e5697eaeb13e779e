"""Ranks that share rows by their tokens compute what one plain rank computes, with and without a model divided over ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.forked_ranks import launch
from tests.trainer.sharded_learner import SCENARIOS
from tests.trainer.test_sharding import assert_close

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "names"), [(2, list(SCENARIOS)), (4, ["dense-full", "moe-lora-two"])])
def test_ranks_that_share_rows_train_as_one(
    dense_directory: Path, moe_directory: Path, tmp_path: Path, ranks: int, names: list[str]
) -> None:
    launch(ranks, tmp_path, dense_directory, moe_directory, *names, module="context_learner")
    found = json.loads((tmp_path / "found.json").read_text())
    for name in names:
        plain, shared = found["plain"][name], found["shared"][name]
        assert_close(shared, plain, list(SCENARIOS[name][1]))
        assert all(line["one"]["grad_norm"] > 0 for line in plain["lines"])
        assert shared["elements"] == plain["elements"] / (4 if ranks == 4 else 1)
