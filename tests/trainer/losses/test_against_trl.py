"""Every built-in loss that TRL 1.16 has, too, against TRL's own code: the value and both gradients, in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import divisor, token_weights
from tests.trainer.losses.cases import CASES
from tests.trainer.losses.tokens import OPTIONAL_INPUTS, make_tokens

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.trainer.losses.trl_losses"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_that_of_trl(name: str, expected: dict[str, Any]) -> None:
    tokens = make_tokens(CASES[name].spread)
    config = LossConfig.model_validate(CASES[name].loss)
    inputs = tokens.inputs()
    weights_P = token_weights(config, inputs)
    outputs, gradients = load_loss(config, OPTIONAL_INPUTS)(inputs, divisor(config, tokens.lengths), weights_P)
    weighted_P = outputs.loss_P.detach() if weights_P is None else outputs.loss_P.detach() * weights_P
    loss = float(weighted_P.sum()) / divisor(config, tokens.lengths)
    assert loss == pytest.approx(expected[name]["loss"], abs=1e-6)
    assert gradients.log_probabilities_P.tolist() == pytest.approx(expected[name]["by_log_probabilities"], abs=1e-6)
    assert max(map(abs, expected[name]["by_log_probabilities"])) > 0.01
    if config.entropy_coefficient:
        assert gradients.entropies_P is not None
        assert gradients.entropies_P.tolist() == pytest.approx(expected[name]["by_entropies"], abs=1e-6)
        assert max(map(abs, expected[name]["by_entropies"])) > 0.005
    else:
        assert gradients.entropies_P is None
        assert expected[name]["by_entropies"] is None
    if config.clip_low is not None:  # both sides of the clip are there
        assert 0.05 < float(outputs.masked_P.double().mean()) < 0.95
