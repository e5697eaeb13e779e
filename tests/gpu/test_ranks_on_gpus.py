"""Ranks with a device of their own train as one CPU does: no collective call gets a tensor of the wrong device.

The device is always the one in the host's memory. Its collective calls take what NCCL takes, and torch finds none for the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.host_device import build, can_be_built
from tests.trainer.expert_learner import LORA
from tests.trainer.forked_ranks import launch
from tests.trainer.sharded_learner import SCENARIOS
from tests.trainer.test_sharding import assert_close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_be_built(), reason="there is no C++ compiler or no ninja to build a device with"),
]

NAMES = ["dense-full", "moe-lora-two"]


def train(directory: Path, learner: str, *arguments: object) -> None:
    """Has two ranks train on the device in the host's memory."""
    build()  # once, before both ranks would
    launch(2, directory, f"tests.trainer.{learner}", *arguments, module="tests.gpu.host_ranks")


@pytest.fixture(scope="module")
def found(dense_directory: Path, moe_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By what the ranks divide, and of one CPU; the first also fails on one rank, is saved and goes on."""
    directory, sharing = tmp_path_factory.mktemp("dividing"), tmp_path_factory.mktemp("sharing")
    train(directory, "sharded_learner", dense_directory, moe_directory, *NAMES, "failing", "resumed")
    found: dict[str, Any] = json.loads((directory / "found_2.json").read_text())
    train(sharing, "context_learner", dense_directory, moe_directory, *NAMES)
    return found | json.loads((sharing / "found.json").read_text())


@pytest.mark.parametrize("way", ["sharded", "shared"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_a_device_each_train_as_a_cpu(found: dict[str, Any], way: str, name: str) -> None:
    """Either the model is divided among them, or the rows."""
    assert_close(found[way][name], found["plain"][name], list(SCENARIOS[name][1]))


def test_a_row_that_does_not_fit_on_one_device_is_tried_in_pieces(found: dict[str, Any]) -> None:
    *lines, refused = found["failing"]["sharded"]["dense-full"]["lines"]
    assert len(lines) == 3
    assert refused["one"] == "training step 4: a row raised ValueError: cannot be computed"


def test_a_run_is_saved_by_all_ranks_while_they_train(found: dict[str, Any]) -> None:
    assert found["resumed-2"]["step"] == 2
    assert found["resumed-2"]["meanwhile"]["whole"] == [2]


def test_ranks_that_divide_experts_train_as_a_cpu(moe_directory: Path, tmp_path: Path) -> None:
    """Alone, with the rest of the model divided, and with shared rows."""
    train(tmp_path, "expert_learner", moe_directory, "cpu", LORA)
    found = json.loads((tmp_path / "found_2.json").read_text())
    for way in ("alone", "sharded", "context"):
        assert_close(found[way][LORA], found["plain"][LORA], list(SCENARIOS[LORA][1]))
