"""A run that begins with an adapter: its first broadcast is that adapter, and what it could not have written is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.lora.adapter_file import load_adapter
from counterpoint.trainer.lora.multi_lora import export_adapter, peft_state
from counterpoint.trainer.runs import checkpoint
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run
from tests.trainer.lora.test_multi_lora import ALL, DENSE, admit, wrapped


def exported(model: Path, directory: Path, config: LoraConfig) -> Path:
    """An adapter with random weights, as a trainer publishes one."""
    directory.mkdir()
    _, layers = wrapped(model)
    admit(layers, 1, config)
    export_adapter(layers, 1, config, str(model), directory)
    return directory


def started(output_dir: Path, model: Path, config: LoraConfig, start_from: Path, **options: Any) -> LoneRun:
    return make_lone_run(
        output_dir, model, lora=config.model_copy(update={"start_from": start_from}).model_dump(), **options
    )


def first_broadcast(lone: LoneRun, output_dir: Path, model: Path) -> Path:
    Broadcaster(lone.learner.manager, output_dir, "default", str(model), keep=2).publish(lone.model, lone.run)
    return output_dir / "run_default" / "broadcast" / "step_0"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_first_broadcast_is_the_given_adapter(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model: Path = request.getfixturevalue(f"{kind}_directory")
    config = ALL if kind == "moe" else DENSE
    given = exported(model, tmp_path / "given", config)
    broadcast = first_broadcast(started(tmp_path, model, config, given), tmp_path, model)
    before, after = (load_file(each / "adapter_model.safetensors") for each in (given, broadcast))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert max(float(tensor.abs().max()) for name, tensor in after.items() if "lora_B" in name) > 0.1
    described = [json.loads((each / "adapter_config.json").read_text()) for each in (given, broadcast)]
    assert described[0] == described[1]


def test_it_is_trained_from_there_and_not_read_again(dense_directory: Path, tmp_path: Path) -> None:
    given = exported(dense_directory, tmp_path / "given", DENSE)
    lone = started(tmp_path, dense_directory, DENSE, given)
    before = lone.weights()
    lone.train(make_batch(1))
    trained = lone.weights()
    assert 0 < max(float((before[name] - trained[name]).abs().max()) for name in before) < 0.1
    checkpoint.write(checkpoint.take(lone.run), tmp_path, keep=2)
    shutil.rmtree(given)
    resumed = started(tmp_path, dense_directory, DENSE, given, resume=True).weights()
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)


def test_half_precision_is_read_as_it_is(dense_directory: Path, tmp_path: Path) -> None:
    given = exported(dense_directory, tmp_path / "given", DENSE)
    file = given / "adapter_model.safetensors"
    halved = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(halved, file)
    broadcast = first_broadcast(started(tmp_path, dense_directory, DENSE, given), tmp_path, dense_directory)
    after = load_file(broadcast / "adapter_model.safetensors")
    assert all(torch.equal(halved[name].float(), after[name]) for name in halved)


def described(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        loaded = load_file(directory / "adapter_model.safetensors")
        change(loaded)
        save_file(loaded, directory / "adapter_model.safetensors")

    return rewrite


def as_fifo(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()
    os.mkfifo(directory / "adapter_model.safetensors")


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
UP = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (described(r=3), r"the adapter has r = 3, and training\.lora\.rank = 4"),
        (described(lora_alpha=3), r"lora_alpha = 3, and training\.lora\.alpha = 8"),
        (described(use_rslora=True), "use_rslora = True; expected False"),
        (described(rank_pattern={"q_proj": 2}), "rank_pattern = "),
        (tensors(lambda loaded: loaded.pop(NAME)), f"lacks 1, such as {NAME}"),
        (tensors(lambda loaded: loaded.update(x=torch.zeros(1))), "has 1 more, such as x"),
        (tensors(lambda loaded: loaded.update({NAME: loaded[NAME][:, :-1].clone()})), r"has the shape \[4, "),
        (tensors(lambda loaded: loaded[UP].add_(1)), "fused layers share one lora_A"),
        (tensors(lambda loaded: loaded[NAME][0, 1:].fill_(torch.inf)), f"{NAME} has numbers that are not finite"),
        (
            tensors(lambda loaded: loaded.update({NAME: loaded[NAME].double() * 1e300})),
            f"{NAME} has numbers that are not",
        ),
        (lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"x" * 99), "header"),
        (lambda directory: (directory / "adapter_config.json").write_text("["), "this is not JSON"),
        (lambda directory: (directory / "adapter_config.json").unlink(), "No such file"),
        (as_fifo, "is a FIFO"),
    ],
)
def test_another_adapter_is_refused_with_what_differs(
    moe_directory: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    given = exported(moe_directory, tmp_path / "given", ALL)
    spoil(given)
    _, layers = wrapped(moe_directory)
    admit(layers, 2, ALL)
    with pytest.raises(ValueError, match="training.lora.start_from = .*given.*" + said):
        load_adapter(lambda: peft_state(layers, 2), ALL, given)


def test_a_run_that_cannot_begin_is_told_why(
    dense_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError):
        started(tmp_path, dense_directory, DENSE, tmp_path / "nowhere")
    assert "run default cannot be trained: training.lora.start_from = " in caplog.text
