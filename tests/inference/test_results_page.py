"""The recipes of docs/results.md, executed as they stand there: only paths, the server's address and its key are the test's."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_model import log_probabilities, make_model
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
TOKENS = np.array(PROBE_TOKENS, dtype=np.int32)


def recipe(section: str) -> str:
    """The Python below a heading of the page."""
    _, found, after = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    assert found, section
    code = re.search(r"```python\n(.*?)```", after.partition("\n## ")[0], re.DOTALL)
    assert code is not None, section
    return code[1]


def executed(code: str, **instead: str) -> dict[str, Any]:
    """What the recipe leaves, with assignments replaced."""
    for name, value in instead.items():
        code, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", code, flags=re.MULTILINE)
        assert count == 1, name
    left: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft's own imports
        exec(compile(code, str(PAGE), "exec"), left)
    return left


@pytest.fixture
def place(lora_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds what the page names: the base model and an adapter."""
    (tmp_path / "models").mkdir()
    shutil.copytree(lora_server.config.model, tmp_path / "models" / "base")
    shutil.copytree(lora_server.directories[1], tmp_path / "outputs/job/run_default/broadcast/step_8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_weights_are_a_model_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "outputs/full/run_default/broadcast/step_8"
    trained = make_model(directory, moe=False, seed=3)
    monkeypatch.chdir(tmp_path)
    left = executed(recipe("transformers: all weights"))
    np.testing.assert_allclose(log_probabilities(left["model"], TOKENS), log_probabilities(trained, TOKENS), atol=1e-5)
    assert capsys.readouterr().out.startswith("Hello")


def test_an_adapter_is_one_of_peft_and_merges_into_its_base(lora_server: ServerProcess, place: Path) -> None:
    trained = log_probabilities(lora_server.models[1], TOKENS)
    adapted = executed(recipe("peft: an adapter"))["adapted"]
    np.testing.assert_allclose(log_probabilities(adapted, TOKENS), trained, atol=1e-5)
    executed(recipe("Merging an adapter into its base"))
    merged = executed(
        recipe("transformers: all weights").replace("outputs/full/run_default/broadcast/step_8", "models/merged")
    )["model"]
    np.testing.assert_allclose(log_probabilities(merged, TOKENS), trained, atol=1e-3)
