"""Layers that are computed again compute what they computed before: adapters of several runs, replay, several rows at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from counterpoint.trainer.lora.multi_lora import adapter_spans
from counterpoint.trainer.model import recompute
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.kernels import kept
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.model.recompute import checkpoint_layers
from tests.trainer.conftest import EXPERTS, LAYERS, TOP_K, VOCABULARY, make_batch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.many_runs import Bench

CPU = torch.device("cpu")
LENGTHS = [7, 12, 4]
TARGETS = ["q_proj", "v_proj", "o_proj", "experts"]


@pytest.fixture(autouse=True)
def _all_attention_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LEAST_TOKENS", 1)


@pytest.fixture(params=["moe", "dense"])
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_directory")
    return path


class Adapted:
    """A model with adapters of two runs, slots 1 and 3, whose weights are all random."""

    def __init__(self, directory: Path, checkpointed: bool | int) -> None:
        self.bench = Bench(directory)
        self.model, self.replay = self.bench.model, self.bench.replay
        targets = [*TARGETS[:3], *(TARGETS[3:] if self.replay.experts else ["up_proj"])]
        for slot, rank in ((1, 4), (3, 2)):
            self.bench.admit(slot, rank=rank, alpha=8.0, target_modules=targets)
            for parameter in self.bench.parameters(slot).values():
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(slot))
        if checkpointed:
            checkpoint_layers(self.model, self.replay, None if checkpointed is True else checkpointed)

    def forward(self, seed: int, spans: Sequence[tuple[int, int]]) -> Tensor:
        """The loss of a row of three samples, with routing for the first two of them."""
        generator = torch.Generator().manual_seed(seed)
        tokens_T = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=generator)
        routed = torch.rand(sum(LENGTHS), LAYERS, max(EXPERTS, 1), generator=generator).argsort(-1)[..., :TOP_K]
        positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
        predicting_P = (positions_T[1:] > 0).nonzero()[:, 0]
        recorded_T = torch.arange(len(tokens_T)) < LENGTHS[0] + LENGTHS[1]
        replaying = self.replay.replaying(routed, recorded_T) if self.replay.experts else nullcontext()
        with replaying, adapter_spans(self.model, spans):
            values_P, entropies_P = log_probabilities(
                self.model, tokens_T, positions_T, LENGTHS, predicting_P, tokens_T[predicting_P + 1], 0.8, True
            )
        return (values_P * torch.linspace(-1, 1, len(values_P))).sum() + entropies_P.sum()

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of both runs' adapters."""
        return {
            f"{slot}.{name}": parameter.grad
            for slot in (1, 3)
            for name, parameter in self.bench.parameters(slot).items()
        }


ROWS = [[(1, 7), (3, 16)], [(3, 19), (1, 4)], [(0, 7), (1, 16)]]
"""Spans of three rows; slot 0 has no adapter."""


def trained(adapted: Adapted, order: str) -> dict[str, Tensor | None]:
    """Gradients after three rows, whose backward passes come at once, or after all forward passes, last row first."""
    if order == "at once":
        for seed, spans in enumerate(ROWS):
            adapted.forward(seed, spans).backward()
    else:
        for loss in reversed([adapted.forward(seed, spans) for seed, spans in enumerate(ROWS)]):
            loss.backward()
    return adapted.gradients()


@pytest.mark.parametrize("checkpointed", [True, 1, LAYERS])
@pytest.mark.parametrize("order", ["at once", "later"])
def test_gradients_are_those_without(directory: Path, order: str, checkpointed: bool | int) -> None:
    expected = trained(Adapted(directory, checkpointed=False), order)
    assert all(gradient is not None and float(gradient.abs().max()) > 1e-4 for gradient in expected.values())
    found = trained(Adapted(directory, checkpointed), order)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_no_more_layers_than_there_are(directory: Path) -> None:
    model = load_model(directory, "float32", CPU)
    with pytest.raises(ValueError, match=r"activation_checkpointing = 3: .* has 2 layers"):
        checkpoint_layers(model, None, 3)


def test_layers_know_nothing_of_a_row_afterwards(moe_directory: Path) -> None:
    adapted = Adapted(moe_directory, checkpointed=True)
    adapted.forward(0, ROWS[0]).backward()
    assert adapted.replay.record is None
    assert all(module.spans is None for module in adapted.model.modules() if isinstance(module, MultiLora))


def test_a_backward_pass_inside_another_row_leaves_that_row_alone(moe_directory: Path) -> None:
    """As when a reference is computed, or the next row begins, before the backward pass."""
    expected = trained(Adapted(moe_directory, checkpointed=False), "at once")
    adapted = Adapted(moe_directory, checkpointed=True)
    first = adapted.forward(0, ROWS[0])
    with adapter_spans(adapted.model, [(3, sum(LENGTHS))]):
        inside = next(module.spans for module in adapted.model.modules() if isinstance(module, MultiLora))
        first.backward()
        layers = [module for module in adapted.model.modules() if isinstance(module, MultiLora)]
        assert all(layer.spans is inside for layer in layers)
    for seed, spans in enumerate(ROWS[1:], 1):
        adapted.forward(seed, spans).backward()
    torch.testing.assert_close(adapted.gradients(), expected, rtol=0, atol=1e-6)


@contextmanager
def nothing(*_: object) -> Iterator[None]:
    yield


def test_lost_spans_would_be_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without the row's spans, the recomputation is of another function."""
    monkeypatch.setattr(recompute, "applied", nothing)
    with pytest.raises(CheckpointError):
        trained(Adapted(directory, checkpointed=True), "at once")


def test_spans_of_the_latest_row_would_be_seen(dense_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the spans of any row enough."""
    adapted = Adapted(dense_directory, checkpointed=True)
    monkeypatch.setattr(recompute, "applied", nothing)
    first = adapted.forward(0, ROWS[0])
    with adapter_spans(adapted.model, ROWS[1]), pytest.raises(CheckpointError):
        first.backward()


def test_a_lost_record_would_be_seen(moe_directory: Path) -> None:
    adapted = Adapted(moe_directory, checkpointed=False)
    checkpoint_layers(adapted.model, None)  # which does not know of the replay
    with pytest.raises(CheckpointError):
        trained(adapted, "at once")


def test_a_whole_step_of_full_weights(directory: Path, tmp_path: Path) -> None:
    batch = make_batch(1, routed=directory.name.startswith("moe"))
    results = []
    for checkpointed in (False, True, LAYERS):
        lone = make_lone_run(tmp_path / str(checkpointed), directory, {"activation_checkpointing": checkpointed})
        metrics = lone.train(batch)
        results.append((lone.weights(), metrics["loss"], metrics["grad_norm"]))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=0, atol=1e-6)


def test_only_layer_inputs_are_kept(dense_directory: Path) -> None:
    """Bytes saved for the backward pass between embedding and output layer: one hidden state a token for each layer."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    model = load_model(dense_directory, "float32", CPU)
    checkpoint_layers(model, None)
    hidden = torch.randn(1, 64, model.config.hidden_size, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(64)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=positions, attention_mask=None, sample_lengths=[64])
    assert kept == [64 * model.config.hidden_size * 4] * LAYERS
    hidden.sum().backward()


def test_a_model_is_freed_when_it_is_dropped(dense_directory: Path) -> None:
    model = load_model(dense_directory, "float32", CPU)
    checkpoint_layers(model, None)
    layer = weakref.ref(model.model.layers[0])
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="set activation_checkpointing = false"):
        checkpoint_layers(nn.Linear(2, 2), None)
