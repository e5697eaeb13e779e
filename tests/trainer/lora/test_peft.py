"""What a run publishes, loaded by PEFT: the same function as the adapter in the trainer, for every architecture at hand.

Without the conversion by names that `counterpoint/trainer/lora/peft_names.py` prepares the file for, PEFT loads those of mixtures
with dense or shared layers without an error, as another function: 0.3 to 1.2 nats off.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.architectures.peft_export import check_export, layer_names
from tests.trainer.lora.architectures import MIXTURES, OTHERS, make_tiny

ROUNDING = 1e-4
"""Nats, in float32; without an adapter, PEFT's model and the trainer's differ by up to 2e-6."""

REFUSED_BY_PEFT = {"out_proj", "conv1d"}
"""In models with a state space: their kernels would leave such an adapter out."""


def assert_same(directory: Path, targets: list[str]) -> None:
    check = check_export(directory, targets)
    assert check.difference < ROUNDING, targets
    assert check.effect > 100 * ROUNDING, f"{targets}: nothing is shown"


@pytest.mark.slow  # imports peft, and makes a model
@pytest.mark.parametrize("kind", OTHERS)
def test_an_adapter_on_all_layers_is_the_same_in_peft(kind: str, tmp_path: Path) -> None:
    directory = make_tiny(kind, tmp_path)
    names = layer_names(directory)
    if kind in ("mamba", "falcon_mamba", "falcon_h1", "nemotron_h"):
        with pytest.raises(ValueError, match="out_proj' is incompatible with Mamba-based models"):
            check_export(directory, names)
        names = [name for name in names if name not in REFUSED_BY_PEFT]
    assert_same(directory, names)


@pytest.mark.slow  # imports peft, and makes a model
@pytest.mark.parametrize("kind", MIXTURES)
def test_an_adapter_of_a_mixture_is_the_same_in_peft_whichever_of_its_layers_have_one(
    kind: str, tmp_path: Path
) -> None:
    directory = make_tiny(kind, tmp_path)
    names = layer_names(directory)
    shared = [name for name in names if name in ("gate_proj", "up_proj", "down_proj")]
    assert_same(directory, names)
    assert_same(directory, ["experts"])
    if shared:
        assert_same(directory, shared[:1])
        assert_same(directory, [*shared, "experts"])
