"""Adapters of elsewhere: who may begin with them, and what is no adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.weights.imports import check_adapters, imported
from counterpoint.transport.errors import UserError


def described(directory: Path, **values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    text = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["model.layers.0.self_attn.q_proj", "v_proj", "q_proj"],
    } | values
    (directory / "adapter_config.json").write_text(json.dumps(text))
    return directory


def test_a_uri_names_an_adapter(tmp_path: Path) -> None:
    adapters = {"mine": described(tmp_path / "a")}
    check_adapters(adapters, 4)
    found = imported(adapters, "tinker://import/weights/mine")
    assert found is not None
    assert (found.rank, found.alpha, found.target_modules) == (4, 8.0, ["q_proj", "v_proj"])
    assert found.start_adapter == str(tmp_path / "a")
    assert imported(adapters, "tinker://s0:train:0/weights/mine") is None
    with pytest.raises(BadRequest, match="tinker://import/weights/mine"):
        imported(adapters, "tinker://import/weights/other")
    with pytest.raises(BadRequest, match=r"\[tinker\.adapters\]"):
        imported({}, "tinker://import/weights/other")


@pytest.mark.parametrize(
    "values",
    [
        {"r": "4"},
        {"target_modules": "a pattern"},
        {"r": 8},
        {"lora_alpha": None},
        {"init_lora_weights": "pissa"},
        {"alora_invocation_tokens": [9]},
        {"peft_type": "IA3"},
    ],
    ids=str,
)
def test_what_is_no_adapter_is_refused_before_the_start(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"tinker\.adapters\.mine"):
        check_adapters({"mine": described(tmp_path / "a", **values)}, 4)


def test_an_adapter_that_has_changed_since_the_start_is_refused_by_its_key(tmp_path: Path) -> None:
    adapters = {"mine": described(tmp_path / "a")}
    check_adapters(adapters, 4)
    described(tmp_path / "a", use_rslora=True)
    with pytest.raises(BadRequest, match="use_rslora"):
        imported(adapters, "tinker://import/weights/mine")


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tinker\.adapters\.mine"):
        check_adapters({"mine": tmp_path}, 4)
    with pytest.raises(BadRequest, match="cannot be read"):
        imported({"mine": tmp_path}, "tinker://import/weights/mine")
