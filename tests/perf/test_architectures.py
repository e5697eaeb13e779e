"""The table of architectures says what is wrong, refused or crashes, one model without the others."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counterpoint.trainer.model import attention
from perf.architectures import __main__ as architectures
from perf.architectures.check import Outcome
from perf.architectures.table import Row, table


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
def test_models_are_what_they_are(kind: str, expected: dict[str, str], dtype: str) -> None:
    row = architectures.check_apart(kind, dtype, 300)
    found = {aspect: outcome.found for aspect, outcome in row.outcomes.items() if aspect in expected}
    assert found == expected, row


@pytest.mark.slow
def test_what_is_wrong_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, the proof of attention sees the right one, and training another one."""
    exact = torch.nn.functional.scaled_dot_product_attention

    def skewed(query: Any, *arguments: Any, scale: float, **more: Any) -> Any:
        return exact(query, *arguments, scale=1.5 * scale if torch.is_grad_enabled() else scale, **more)

    monkeypatch.setattr(attention, "functional", SimpleNamespace(scaled_dot_product_attention=skewed))
    row = architectures.check_apart("qwen3", "float32", 300)
    assert row.outcomes["weights"].found == "wrong", row
    assert row.worst == "wrong"


def _dies(*_: object) -> dict[str, Outcome]:
    os._exit(3)


def _hangs(*_: object) -> dict[str, Outcome]:
    time.sleep(3600)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "said"), [(_dies, "ended with 3"), (_hangs, "not ready after 1 s")])
def test_a_model_that_crashes_or_hangs_is_one_row(monkeypatch: pytest.MonkeyPatch, body: Any, said: str) -> None:
    monkeypatch.setattr(architectures, "save_model", lambda *_: None)
    monkeypatch.setattr(architectures, "check", body)
    row = architectures.check_apart("qwen3", "float32", 1)
    assert row.worst == "crashed"
    assert said in row.outcomes["weights"].detail


def test_a_table_has_a_row_for_each_model_and_the_reasons_below() -> None:
    right, refused = Outcome("right"), Outcome("refused", "OneForCausalLM cannot be trained: no\nmask")
    text = table(
        [
            Row("one", "float32", {"weights": refused}),
            Row("one", "bfloat16", {"weights": refused}),
            Row("two", "float32", {"weights": right, "PEFT": Outcome("wrong", "0.5 nats")}),
            Row("two", "bfloat16", {"weights": right}),
        ]
    )
    assert "| one | refused |  |  |  |  |" in text
    assert "| two | right |  |  |  | wrong (float32) |" in text
    assert table([Row(name, "float32", {"weights": right}) for name in ("b", "a")]).count("| b, a | right |") == 1
    assert "- weights refused: no mask: one\n- PEFT wrong: 0.5 nats: two" in text
