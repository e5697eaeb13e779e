"""The table of bias in docs/algorithms.md is what the program finds, and has every built-in advantage and loss."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from counterpoint.orchestrator.step.advantages import BUILT_IN
from counterpoint.run.loss import KINDS
from perf.bias.__main__ import main
from perf.bias.rows import ADVANTAGES, LOSSES, SELECTIONS, UNBIASED_LOSS, LossRow
from perf.bias.table import TABLES, Row, cell
from perf.bias.update import Selection

DOCUMENTED = (Path(__file__).parents[3] / "docs/algorithms.md").read_text().splitlines()

WITHOUT_A_REWARD = {"distillation", "sft"}
"""Losses that follow a teacher, or given tokens."""


def test_every_built_in_has_a_row() -> None:
    """A new one needs its row in perf/bias/rows.py, and in docs/algorithms.md what `python -m perf.bias --markdown` prints."""
    assert set(ADVANTAGES) == set(BUILT_IN)
    assert {row.keys["kind"] for row in LOSSES} == set(KINDS) - WITHOUT_A_REWARD


@pytest.mark.parametrize(
    ("advantage", "loss", "staleness", "selection", "expected"),
    [
        ("leave_one_out", {"kind": "dr_grpo"}, 0, "all", "unbiased"),
        ("group_mean", {"kind": "dr_grpo"}, 0, "all", "scaled: 1/2"),
        ("standardised", {"kind": "dr_grpo"}, 0, "all", "biased: 1/10 to 1"),
        ("leave_one_out", {"kind": "grpo"}, 0, "all", "biased: 79/480 to 7/8"),
        ("leave_one_out", {"kind": "dr_grpo"}, 1, "all", "biased: -23/10 to 3/2"),
        ("leave_one_out", {"kind": "dr_grpo"}, 0, "zero", "scaled: 4096/2043"),
        ("batch_standardised", {"kind": "dr_grpo"}, 0, "zero", "refused"),
    ],
)
def test_cells(advantage: str, loss: dict[str, str], staleness: int, selection: Selection, expected: str) -> None:
    assert cell(advantage, LossRow(loss), staleness, selection) == expected


@pytest.mark.slow
@pytest.mark.parametrize("row", list(chain(*TABLES.values())), ids=lambda row: row.label)
def test_a_documented_row(row: Row) -> None:
    assert str(row) in DOCUMENTED


OWN = """
import torch
from counterpoint.advantages import AdvantageInputs, AdvantageOutputs
from counterpoint.losses import LossInputs, LossOutputs


def reward_itself(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(inputs.rewards.tolist())


def without_ratio(inputs: LossInputs) -> LossOutputs:
    loss_P = -inputs.advantages_P * inputs.trainer_log_probabilities_P
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_bias.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_bias"


@pytest.mark.slow
def test_functions_of_a_user(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{module}:reward_itself"]) == main([f"{module}:without_ratio"]) == 0
    lines = capsys.readouterr().out.splitlines()
    loss = 'own_bias:without_ratio, normalisation = "sample"'
    assert len(lines) == 2 * 3 * len(SELECTIONS)
    assert f"own_bias:reward_itself | {UNBIASED_LOSS.label.replace('`', '')} | staleness 2 | all | unbiased" in lines
    assert f"leave_one_out | {loss} | staleness 0 | all | unbiased" in lines
    assert f"leave_one_out | {loss} | staleness 1 | all | biased: -4/3 to 48/47" in lines


def test_a_function_that_is_neither_is_refused(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"{module}:neither"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "own_bias:neither: it is no advantage" in said
    assert "no loss" in said
