"""The trainer computes what transformers computes, for a tiny model of each kind of difference between architectures.

The table in `docs/models.md` has all kinds. A further kind is a line here.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counterpoint.trainer.model import attention
from tests.trainer.architectures.check import Outcome, check
from tests.trainer.architectures.tiny import save_model


def checked(kind: str, dtype: str, directory: Path) -> dict[str, Outcome]:
    """Returns what `check` says of a tiny model of that kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers, about sizes that no real model has
        save_model(kind, directory, getattr(torch, dtype))
        return check(directory, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3_moe", {"weights": "right", "rows": "packed", "prompts": "shared", "adapter": "right", "PEFT": "right"}),
        ("lfm2", {"weights": "right", "rows": "one sample each", "prompts": "each its own", "adapter": "right"}),
        ("gpt2", {"weights": "right", "rows": "packed", "prompts": "shared", "adapter": "refused"}),
        ("longcat_flash", {"weights": "right", "adapter": "right", "PEFT": "right"}),
        ("zamba", {"weights": "right", "rows": "one sample each", "adapter": "right", "PEFT": "right"}),
        ("doge", {"weights": "refused"}),
        (
            "qwen2_5_vl",
            {"weights": "right", "rows": "packed", "prompts": "shared", "adapter": "right", "PEFT": "right"},
        ),
        ("qwen3_5_moe", {"weights": "right", "adapter": "right", "PEFT": "right"}),
    ],
)
def test_models_are_what_they_are(kind: str, expected: dict[str, str], dtype: str, tmp_path: Path) -> None:
    outcomes = checked(kind, dtype, tmp_path)
    assert {aspect: outcomes[aspect].found for aspect in expected} == expected, outcomes


@pytest.mark.slow
def test_what_is_wrong_is_called_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here, the proof of attention sees the right one, and training another one."""
    exact = torch.nn.functional.scaled_dot_product_attention

    def skewed(query: Any, *arguments: Any, scale: float, **more: Any) -> Any:
        return exact(query, *arguments, scale=1.5 * scale if torch.is_grad_enabled() else scale, **more)

    monkeypatch.setattr(attention, "functional", SimpleNamespace(scaled_dot_product_attention=skewed))
    outcomes = checked("qwen3", "float32", tmp_path)
    assert outcomes["weights"].found == "wrong", outcomes
