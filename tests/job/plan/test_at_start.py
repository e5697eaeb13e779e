"""A job that starts chooses the layers that are computed again, by the memory of a GPU that a pretended `nvidia-smi` names."""

from __future__ import annotations

import io
import os
import re
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3Config

from counterpoint.cli.plan import main as plan
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.plan import at_start
from counterpoint.job.plan.at_start import with_choice
from counterpoint.job.plan.trainer_memory import rank_parts
from counterpoint.job.write_job import write_job

LAYERS = 6


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer."""
    monkeypatch.setattr(at_start, "CHOOSE_SECONDS", 600.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=True,
    ).save_pretrained(directory)
    return directory


def job_of(tmp_path: Path, model: Path, device: str = "cuda", **trainer: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "output_dir": tmp_path / "out",
            "model": str(model),
            "inference": {"max_model_len": 1024},
            "trainer": {"device": device, "max_tokens": 16384, "compile": False, **trainer},
            "gpus": {"inference": [0], "trainer": [1]},
            "orchestrator": {"environments": [{"name": "reverse", "kind": "reverse-text"}]},
        }
    )


def needed(job: JobConfig, layers: bool | int, memory: int) -> int:
    trainer = job.trainer.model_copy(update={"activation_checkpointing": layers})
    runs = [run.training for run in job.every_run]
    return sum(rank_parts(Path(job.model), trainer, runs, trainer.max_tokens, memory).values())


def run_here(_name: str, _command: list[str], _seconds: float, *, given: bytes, **_: Any) -> SimpleNamespace:
    """Runs the child's program in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as said:
        patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        at_start.main()
    return SimpleNamespace(code=0, output=said.getvalue())


def give_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> None:
    """Gives cards of which programs may use so much, beside what the driver keeps."""
    give_nvidia_smi(tmp_path, monkeypatch, *(f"{each + 551}, 551, [N/A]" for each in mebibytes))


def give_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    nvidia = tmp_path / "bin" / "nvidia-smi"
    nvidia.parent.mkdir(exist_ok=True)
    nvidia.write_text("#!/bin/sh\n" + "".join(f'echo "{each}"\n' for each in lines))
    nvidia.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvidia.parent}:{os.environ['PATH']}")


@pytest.mark.slow
def test_as_few_layers_are_computed_again_as_suffice(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, model)
    large = 2**36
    few, many = (needed(job, layers, large) // 2**20 for layers in (True, False))
    for mebibytes, expected in ((many + 2, {False}), ((few + many) // 2, {*range(2, LAYERS + 1)}), (few // 2, {True})):
        said: list[str] = []
        give_cards(tmp_path, monkeypatch, mebibytes, mebibytes)
        chosen = with_choice(job, said.append, left_running=False)
        monkeypatch.setattr(at_start, "run", run_here)  # the first was chosen by a child
        value = chosen.trainer.activation_checkpointing
        assert any(value is each or (type(value) is int and value == each) for each in expected), (mebibytes, value)
        assert len(said) == 2
        assert "planning" in said[0], "that takes a while"
        planned, room = re.findall(r"([\d.]+) GB of the ([\d.]+)", said[1])[0]
        assert (float(planned) <= float(room)) is ("will not fit" not in said[1]) is (value is not True)
        if type(value) is int:
            memory = mebibytes * 2**20
            assert needed(job, value, memory) <= memory < needed(job, value - 1, memory)
        chosen.output_dir.mkdir(exist_ok=True)
        written = tomllib.loads(write_job(chosen, b"")["trainer"].read_text())
        assert written["activation_checkpointing"] == value
        assert "activation_checkpointing" not in to_toml(job.trainer), "the job itself is as it was"
    said.clear()
    left = with_choice(job, said.append, left_running=True)
    assert (left.trainer.activation_checkpointing, said) == (True, []), "as at the last start"
    give_cards(tmp_path, monkeypatch, many + 2, many + 2)
    other = job_of(tmp_path, model, max_tokens=8192)
    left = with_choice(other, said.append, left_running=True)
    assert (left.trainer.activation_checkpointing, len(said)) == (False, 2), "a trainer that is not taken over"


@pytest.mark.slow
def test_a_choice_that_fails_stops_no_start(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_cards(tmp_path, monkeypatch, 1024, 1024)
    said: list[str] = []
    nothing = job_of(tmp_path, tmp_path / "nothing")
    assert with_choice(nothing, said.append, left_running=False) is nothing
    assert with_choice(nothing, said.append, left_running=True) is nothing, "no job was started there"
    monkeypatch.setattr(at_start, "CHOOSE_SECONDS", 0.01)
    slow = job_of(tmp_path, model)
    assert with_choice(slow, said.append, left_running=False) is slow
    give_cards(tmp_path, monkeypatch, 1024, 2048)
    assert with_choice(slow, said.append, left_running=False) is slow
    assert len([each for each in said if "is not chosen" in each]) == 4


@pytest.mark.parametrize(
    "lines",
    [
        ("NVIDIA-SMI has failed because it could not communicate with the driver.",),
        ("[N/A], [N/A], [N/A]",),
        ("81559, 551, Disabled", "[Unknown Error], 551, Disabled"),
        ("81559, 551, Enabled",),
        ("81559, 551, Disabled", "23028, 551, [N/A]"),
        (),
    ],
)
def test_memory_that_is_not_known_is_said(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    give_nvidia_smi(tmp_path, monkeypatch, *lines)
    monkeypatch.setattr(at_start, "_choose", lambda *_: pytest.fail("nothing is to be chosen"))
    said: list[str] = []
    job = job_of(tmp_path, model)
    assert with_choice(job, said.append, left_running=False) is job
    assert len(said) == 1


@pytest.mark.parametrize("kept", ["551", "[N/A]"])
def test_a_driver_keeps_memory(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    give_nvidia_smi(tmp_path, monkeypatch, f"81559, {kept}, Disabled", "81559, 550, Disabled")
    memories = list[int]()
    monkeypatch.setattr(at_start, "_choose", lambda _planned, _directory, memory: memories.append(memory))
    with_choice(job_of(tmp_path, model), list[str]().append, left_running=False)
    assert memories == [(81559 - (551 if kept == "551" else 550)) * 2**20]


@pytest.mark.slow
def test_a_trainer_whose_torch_knows_no_gpu_is_left_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("torch knows GPUs here")
    give_cards(tmp_path, monkeypatch, 1024, 1024)
    monkeypatch.setattr(at_start, "run", run_here)
    job = job_of(tmp_path, model, device="auto")
    assert with_choice(job, list[str]().append, left_running=False) is job


@pytest.mark.parametrize("value", [False, True, 3])
def test_a_given_value_stands(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, value: bool | int) -> None:
    give_cards(tmp_path, monkeypatch, 1024, 1024)
    monkeypatch.setattr(at_start, "_choose", lambda *_: pytest.fail("nothing is to be chosen"))
    job = job_of(tmp_path, model, activation_checkpointing=value)
    assert with_choice(job, pytest.fail, left_running=False) is job


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_without_a_gpu_nothing_is_chosen_or_computed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device == "cpu":
        give_cards(tmp_path, monkeypatch, 1024, 1024)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(at_start, "_choose", lambda *_: pytest.fail("nothing is to be chosen"))
    job = job_of(tmp_path, model, device=device)
    assert with_choice(job, pytest.fail, left_running=False) is job


@pytest.mark.slow
def test_plan_shows_what_would_be_chosen(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path, model)
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    room = (needed(job, True, 2**36) + needed(job, False, 2**36)) // 2 // 10**9 + 1
    gpus = ["--gpus", f"2xSMALL-{room}"]
    assert plan([str(file), *gpus, "--trainer.activation_checkpointing", "false"]) == 2
    capsys.readouterr()
    assert plan([str(file), *gpus]) == 0
    ((layers, of),) = re.findall(r"(\d+) of (\d+) layers", capsys.readouterr().out)
    assert 0 < int(layers) < int(of) == LAYERS
    assert plan([str(file), *gpus, "--trainer.activation_checkpointing", layers]) == 0
    assert plan([str(file), *gpus, "--trainer.activation_checkpointing", str(int(layers) - 1)]) == 2
