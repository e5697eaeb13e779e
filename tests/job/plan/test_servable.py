"""vLLM itself says before the start whether it serves a model; a model that it serves is asked about once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.plan import servable
from counterpoint.job.plan.servable import check_served
from tests.support.vision_model import make_vision_model


def write_config(directory: Path, **more: Any) -> InferenceConfig:
    (directory / "config.json").write_text(json.dumps({"architectures": ["BlipForConditionalGeneration"], **more}))
    return InferenceConfig(model=str(directory), dtype="float32", max_model_len=64)


def test_known_kinds_are_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable, "INSPECTION", "not.a.module")
    check_served(write_config(tmp_path, model_type="qwen3"))
    check_served(write_config(tmp_path))


@pytest.mark.parametrize(
    "cause",
    [
        "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_a_model_is_not_refused_for_what_a_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cause: str
) -> None:
    program = "import sys; sys.exit('Traceback (most recent call last):\\n' + sys.argv[1])"
    monkeypatch.setattr(servable, "server_command", lambda _: [sys.executable, "-c", program, cause, "-m", "replaced"])
    monkeypatch.setattr(servable, "_version", lambda _name: "1.0")
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "cache"))
    config = write_config(tmp_path, model_type="blip")
    check_served(config)
    assert not (tmp_path / "cache").exists()
    assert config.model in capsys.readouterr().err, "a user who waits is told for what"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_vllm_does_not_know_is_refused_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would not serve it: .*BlipForConditionalGeneration.* not supported"):
        check_served(write_config(tmp_path, model_type="blip"))


@pytest.mark.vllm
@pytest.mark.slow
def test_a_vision_language_model_is_asked_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "cache"))
    make_vision_model(tmp_path / "model")
    config = InferenceConfig(model=str(tmp_path / "model"), dtype="float32", max_model_len=64)
    check_served(config)
    assert len(list((tmp_path / "cache" / "served").iterdir())) == 1
    monkeypatch.setattr(servable, "Child", None)
    check_served(config)
    check_served(config.model_copy(update={"port": 9999, "identity_file": tmp_path / "not yet there"}))
