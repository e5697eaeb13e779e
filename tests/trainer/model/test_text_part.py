"""A vision-language model is trained as text: its names, what is frozen, and what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from counterpoint.inference.checkpoint import read_manifest, require_fitting_adapter, require_same_model
from counterpoint.inference.digest import digests_of, is_of_text
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.model.packing_proof import can_pack, prove_packing
from tests.support.vision_model import make_vision_model
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vision_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    make_vision_model(directory, dtype="bfloat16")
    return directory


def published(directory: Path, out: Path, **training: Any) -> tuple[LoneRun, Path]:
    """Trains one step of the model and publishes it."""
    lone = make_lone_run(out, directory, **training)
    lone.train(make_batch(1))
    Broadcaster(lone.learner.manager, out, "default", str(directory), 2).publish(lone.model, lone.run)
    return lone, out / "run_default" / "broadcast" / "step_1"


def of_stock(model: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0].float()
    return logits_TV[:-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]


def test_a_text_is_computed_by_what_is_trained_and_all_of_that(vision_directory: Path) -> None:
    model = load_model(vision_directory, "float32", CPU)
    prove_packing(model)
    assert can_pack(model)
    tokens_T = torch.arange(8)
    values_P, _ = log_probabilities(model, tokens_T, tokens_T, [8], tokens_T[:-1], tokens_T[1:], 1.0)
    stock = AutoModelForImageTextToText.from_pretrained(vision_directory, dtype=torch.float32).eval()
    torch.testing.assert_close(values_P, of_stock(stock, tokens_T), rtol=0, atol=1e-5)
    values_P.sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in model.named_parameters()} - reached == {
        name for name, _ in model.named_parameters() if "visual" in name
    }


def test_full_weights_keep_all_other_parts_bit_for_bit(vision_directory: Path, tmp_path: Path) -> None:
    """The trainer computes in float32, and the checkpoint has bfloat16."""
    lone, directory = published(vision_directory, tmp_path)
    before, after = (load_file(each / "model.safetensors") for each in (vision_directory, directory))
    require_same_model(read_manifest(vision_directory), read_manifest(directory), tied_embeddings=False)
    for name, tensor in before.items():
        same = after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
        assert same != is_of_text(name), name
    assert (directory / "preprocessor_config.json").is_file()
    stock = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    for name, tensor in stock.state_dict().items():
        if is_of_text(name):
            torch.testing.assert_close(tensor, lone.model.state_dict()[name], rtol=0, atol=0)


def test_a_digest_is_of_text_alone(vision_directory: Path) -> None:
    tensors = load_file(vision_directory / "model.safetensors")
    assert digests_of(tensors) == digests_of({name: each for name, each in tensors.items() if is_of_text(name)})
    assert set(digests_of(tensors)["float32"]) == {"", "0", "1"}


def test_tensors_that_transformers_leaves_out_are_published_too(vision_directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tmp_path / "model"
    make_vision_model(base)
    tensors = load_file(base / "model.safetensors") | {"mtp.layers.0.weight": torch.ones(2)}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    _, directory = published(base, tmp_path / "out")
    assert load_file(directory / "model.safetensors")["mtp.layers.0.weight"].tolist() == [1, 1]


def test_an_adapter_has_the_names_of_transformers_and_is_the_same_in_peft(
    vision_directory: Path, tmp_path: Path
) -> None:
    lone, directory = published(vision_directory, tmp_path, lora={"rank": 2}, learning_rate=1e-2)
    written = read_manifest_of_adapter(directory)
    require_fitting_adapter(read_manifest(vision_directory), written, 2)
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in written)
    stock = AutoModelForImageTextToText.from_pretrained(vision_directory, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(stock, directory).eval()
    tokens_T = torch.arange(8)
    with torch.no_grad():
        values_P, _ = lone_values(lone, tokens_T)
        torch.testing.assert_close(values_P, of_stock(adapted, tokens_T), rtol=0, atol=1e-4)
        with adapted.disable_adapter():
            assert (values_P - of_stock(adapted, tokens_T)).abs().max() > 1e-2


def read_manifest_of_adapter(directory: Path) -> Any:
    from counterpoint.inference.checkpoint import ADAPTER_WEIGHTS, read_header

    return read_header(directory / ADAPTER_WEIGHTS)


def lone_values(lone: LoneRun, tokens_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from counterpoint.trainer.lora.multi_lora import adapter_spans

    with adapter_spans(lone.model, [(lone.run.slot, len(tokens_T))]):
        return log_probabilities(lone.model, tokens_T, tokens_T, [len(tokens_T)], tokens_T[:-1], tokens_T[1:], 1.0)
