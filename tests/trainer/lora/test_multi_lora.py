"""Layers with many adapters: each slot's tokens through its own, a slot given back leaves nothing, exports are what they say."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.inference.digest import DTYPES, hash_sum
from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.experts import MultiLoraExperts
from counterpoint.trainer.lora.multi_lora import (
    MultiLoRALinear,
    adapter_spans,
    apply_lora_to_model,
    digest_adapter,
    export_adapter,
)
from counterpoint.trainer.lora.targets import is_target
from counterpoint.trainer.model.adapters.adapted_layer import (
    AdapterSpans,
    MultiLora,
    add_low_rank,
    add_low_rank_grouped,
)
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.probe import write_probe
from tests.trainer.conftest import EXPERTS, LAYERS, VOCABULARY
from tests.trainer.lora.architectures import make_tiny
from tests.trainer.model.test_load import run

CPU = torch.device("cpu")
LENGTHS = [7, 12, 4]
ALL = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "experts"])
EVERY = LoraConfig(target_modules=[*LoraConfig().target_modules, "experts"])
DENSE = LoraConfig(rank=4, alpha=8.0)


def wrapped(directory: Path) -> tuple[nn.Module, dict[str, MultiLora]]:
    """A model with room for four runs."""
    model = load_model(directory, "float32", CPU)
    return model, apply_lora_to_model(model, 4, EVERY)


def admit(layers: dict[str, MultiLora], slot: int, config: LoraConfig, spread: float = 0.1) -> None:
    """Gives a slot an adapter whose weights are all random, with this standard deviation."""
    generator = torch.Generator().manual_seed(slot)
    for name, layer in layers.items():
        if is_target(name, config):
            layer.admit(slot, config.rank, config.alpha, generator)
            for parameter in layer.adapter_parameters(slot).values():
                torch.nn.init.normal_(parameter, std=spread, generator=generator)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def values(model: nn.Module, spans: list[tuple[int, int]]) -> Tensor:
    """Log-probabilities of a row of three samples."""
    with torch.no_grad(), adapter_spans(model, spans):
        return run(model, tokens(), LENGTHS)


@pytest.fixture(params=["moe", "dense"])
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_directory")
    return path


def test_wrapping_freezes_and_changes_nothing_and_is_done_once(directory: Path) -> None:
    bare = load_model(directory, "float32", CPU)
    expected = run(bare, tokens(), LENGTHS)
    model, layers = wrapped(directory)
    assert {name.rpartition(".")[2] for name in layers} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert apply_lora_to_model(model, 4, EVERY) == layers
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(layer.base, MultiLora) for layer in layers.values())
    assert torch.equal(run(model, tokens(), LENGTHS), expected)
    assert torch.equal(values(model, [(0, 7), (3, 16)]), expected), "slots without an adapter are the bare model"
    for slot in (0, 3):
        for layer in layers.values():
            layer.admit(slot, 4, 8.0, torch.Generator().manual_seed(1))
    torch.testing.assert_close(values(model, [(0, 7), (3, 16)]), expected, rtol=0, atol=5e-6)


def test_a_slots_tokens_see_its_adapter_alone(directory: Path) -> None:
    model, layers = wrapped(directory)
    config = ALL if "mlp.experts" in " ".join(layers) else DENSE
    for slot in (0, 1, 3):
        admit(layers, slot, config if slot else config.model_copy(update={"target_modules": ["q_proj"], "rank": 3}))
    together = values(model, [(3, 7), (0, 12), (1, 4)])
    apart = [values(model, [(slot, sum(LENGTHS))]) for slot in (3, 0, 1)]
    ends = (6, 6 + 11, 6 + 11 + 3)
    for start, end, alone in zip((0, *ends), ends, apart, strict=False):
        torch.testing.assert_close(together[start:end], alone[start:end], rtol=0, atol=5e-6)
    assert min(float((one - other).abs().min()) for one, other in pairwise(apart)) > 1e-6
    bare = run(model, tokens(), LENGTHS)
    assert torch.equal(bare, run(load_model(directory, "float32", CPU), tokens(), LENGTHS)), (
        "the adapters outlive `adapter_spans`"
    )


def test_a_slot_given_back_leaves_nothing(directory: Path) -> None:
    model, layers = wrapped(directory)
    admit(layers, 1, ALL)
    layer = layers["model.layers.0.self_attn.q_proj"]
    traces = [weakref.ref(parameter) for each in layers.values() for parameter in each.adapter_parameters(1).values()]
    with adapter_spans(model, [(1, sum(LENGTHS))]):
        run(model, tokens(), LENGTHS).sum().backward()
    assert all(trace().grad is not None for trace in traces)  # type: ignore[union-attr]
    for each in layers.values():
        each.release(1)
    assert not any(trace() is not None for trace in traces)
    assert layer.adapter_parameters(1) == layer.adapter_state(1) == {}
    assert torch.equal(values(model, [(1, sum(LENGTHS))]), run(model, tokens(), LENGTHS))
    layer.admit(1, 2, 2.0, torch.Generator().manual_seed(0))
    fresh = MultiLoRALinear(nn.Linear(32, 32), rank=16, n_adapters=4)
    fresh.admit(3, 2, 2.0, torch.Generator().manual_seed(0))
    assert torch.equal(layer.adapter_parameters(1)["lora_A"], fresh.adapter_parameters(3)["lora_A"])
    assert not layer.adapter_parameters(1)["lora_B"].any()


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("adapters", [((3, 2.0), (16, 5.0), (8, 7.0)), ((8, 3.0), (4, 5.0), (8, 22.0))], ids=str)
def test_all_spans_at_once_are_each_span_by_itself(
    adapters: tuple[tuple[int, float], ...], dtype: torch.dtype, tolerance: float, device: str
) -> None:
    """The formula, span by span, against both ways to compute it (in place, and grouped as on a GPU): values and gradients."""
    spans, lengths = [(2, 5), (3, 4), (0, 7), (1, 1), (1, 0)], [5, 4, 7, 1, 0]
    layer = MultiLoRALinear(nn.Linear(16, 24, device=device, dtype=dtype), rank=16, n_adapters=4)
    generator = torch.Generator().manual_seed(0)
    for slot, (rank, alpha) in enumerate(adapters):
        layer.admit(slot, rank, alpha, generator)
        with torch.no_grad():
            lora_B = layer.adapter_parameters(slot)["lora_B"]
            lora_B.copy_(torch.randn(lora_B.shape, generator=generator))
    layer.spans = known = AdapterSpans.of(spans, torch.device(device))
    products = [layer.adapters[slot][""] if slot in layer.adapters else None for slot, _ in spans]

    def by_formula(output: Tensor, hidden: Tensor) -> Tensor:
        added = [
            (0.0 if product is None else product.scale * (row.float() @ product.lora_A.T @ product.lora_B.T))
            for product, row in zip(products, hidden.split(lengths, 1), strict=True)
        ]
        return torch.cat([out + low for out, low in zip(output.float().split(lengths, 1), added, strict=True)], 1)

    results = []
    for compute in (
        by_formula,
        lambda output, hidden: add_low_rank(output, hidden, layer, ""),
        lambda output, hidden: add_low_rank_grouped(output, hidden, known.ends, layer.row_factors("", known.slots)),
    ):
        hidden = torch.randn(1, 17, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
        output = compute(layer.base(hidden), hidden)
        leaves = [hidden, *(p for slot in (0, 1, 2) for p in layer.adapter_parameters(slot).values())]
        output.float().sin().sum().backward()
        results.append([output.detach().float(), *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


class Operations(TorchDispatchMode):
    """Counts what the host asks for inside, views as well."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        return result


def span_layer(runs: int, ranks: Sequence[int] = (8,)) -> MultiLoRALinear:
    """A layer with adapters of these ranks in turn, and a row with three tokens of each."""
    layer = MultiLoRALinear(nn.Linear(16, 24), rank=16, n_adapters=runs)
    for slot in range(runs):
        layer.admit(slot, ranks[slot % len(ranks)], 2.0, torch.Generator().manual_seed(slot))
    layer.spans = AdapterSpans.of([(slot, 3) for slot in range(runs)], CPU)
    return layer


def differentiate(layer: MultiLoRALinear, hidden: Tensor) -> None:
    assert layer.spans is not None
    factors = layer.row_factors("", layer.spans.slots)
    result = add_low_rank_grouped(layer.base(hidden), hidden, layer.spans.ends, factors)
    result.backward(torch.ones_like(result))


@pytest.mark.parametrize("ranks", [(8,), (8, 3)])
def test_many_runs_of_a_row_take_as_many_operations_as_two(ranks: tuple[int, ...]) -> None:
    """This holds for the first row of a step, and for one that adds to it.

    Rows of two ranks are compared with five runs: two runs are neighbours in memory, which takes fewer operations.
    """
    counts = []
    for runs in (len(ranks) ** 2 + 1, 8, 32):
        layer = span_layer(runs, ranks)
        hidden = torch.randn(1, 3 * runs, 16, requires_grad=True)
        differentiate(layer, hidden)
        for slot in range(runs):
            for parameter in layer.adapter_parameters(slot).values():
                parameter.grad = None
        found = []
        for _ in range(2):
            with Operations() as operations:
                differentiate(layer, hidden)
            found.append(operations.count)
        counts.append(found)
    assert counts[0] == counts[1] == counts[2]


def test_experts_of_many_runs_take_as_many_operations_as_those_of_two(moe_directory: Path) -> None:
    base = load_model(moe_directory, "float32", CPU).get_submodule("model.layers.0.mlp.experts").requires_grad_(False)
    expert_TK, weight_TK = torch.arange(2 * 32).view(32, 2) % EXPERTS, torch.ones(32, 2)
    hidden_TH = torch.randn(32, 32, requires_grad=True)
    counts = []
    for runs in (2, 8, 32):
        layer = MultiLoraExperts(base, rank=8, n_adapters=runs)
        for slot in range(runs):
            layer.admit(slot, 8, 2.0, torch.Generator().manual_seed(slot))
        layer.spans = AdapterSpans.of([(slot, 32 // runs) for slot in range(runs)], CPU)
        for _ in range(2):
            with Operations() as operations:
                layer(hidden_TH, expert_TK, weight_TK).sum().backward()
        counts.append(operations.count)
    assert counts[0] == counts[1] == counts[2]


def gradients_of(layer: MultiLoRALinear, slots: Sequence[int]) -> dict[tuple[int, str], Tensor | None]:
    return {
        (slot, name): None if parameter.grad is None else parameter.grad.clone()
        for slot in slots
        for name, parameter in layer.adapter_parameters(slot).items()
    }


def test_gradients_of_rows_add_up_whatever_else_is_in_a_row() -> None:
    """Bit for bit: a slot alone in a row, in a row of all, in one of some; a slot without tokens has no gradient."""
    layer = span_layer(5, (8, 3))
    for slot in range(5):
        nn.init.normal_(layer.adapter_parameters(slot)["lora_B"], generator=torch.Generator().manual_seed(slot))
    generator = torch.Generator().manual_seed(0)
    tokens_of = {slot: torch.randn(1, 3, 16, generator=generator) for slot in range(5)}
    alone: dict[tuple[int, str], Tensor | None] = {}
    for slot in range(5):
        layer.spans = AdapterSpans.of([(slot, 3)], CPU)
        differentiate(layer, tokens_of[slot])
        alone |= gradients_of(layer, [slot])
        for parameter in layer.adapter_parameters(slot).values():
            parameter.grad = None
    rows = [[0], [0, 1, 2, 3], [3, 1], [1]]
    for row in rows:
        layer.spans = AdapterSpans.of([(slot, 3) for slot in row], CPU)
        differentiate(layer, torch.cat([tokens_of[slot] for slot in row], 1))
    found = gradients_of(layer, range(5))
    for (slot, name), gradient in found.items():
        times = sum(slot in row for row in rows)
        one = alone[slot, name]
        assert one is not None
        assert (gradient is None) is (times == 0)
        if gradient is not None:
            assert torch.equal(gradient, torch.stack([one] * times).sum(0))


def test_a_gradient_that_is_no_number_stays_in_its_slot_and_step() -> None:
    layer = span_layer(3)
    hidden = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0))
    spoilt = hidden.clone()
    spoilt[0, 3:6] = torch.nan
    found = []
    for row in (hidden, spoilt, hidden):
        differentiate(layer, row)
        found.append(gradients_of(layer, range(3)))
        for slot in range(3):
            for parameter in layer.adapter_parameters(slot).values():
                parameter.grad = None
    before, between, after = found
    for key, gradient in before.items():
        assert gradient is not None
        if key[0] == 1:
            spoilt_gradient = between[key]
            assert spoilt_gradient is not None
            assert not spoilt_gradient.isfinite().all()
        else:
            assert torch.equal(between[key], gradient)
        assert torch.equal(after[key], gradient)


def test_slots_that_come_and_go_leave_the_others_as_they_are() -> None:
    layer = span_layer(4)
    assert layer.spans is not None
    spans, hidden = layer.spans, torch.randn(1, 12, 16)
    parameters = [layer.adapter_parameters(slot) for slot in range(4)]
    for parameter in parameters[3].values():
        parameter.requires_grad_(False)
    values = [{name: each.detach().clone() for name, each in own.items()} for own in parameters]
    differentiate(layer, hidden)
    once = gradients_of(layer, range(4))
    layer.admit(1, 3, 2.0, torch.Generator().manual_seed(9))
    differentiate(layer, hidden)
    layer.release(2)
    layer.spans = spans
    differentiate(layer, hidden)
    assert not layer.adapter_parameters(2)
    for slot, times in ((0, 3), (3, 0)):
        assert all(layer.adapter_parameters(slot)[name] is each for name, each in parameters[slot].items())
        for name, each in parameters[slot].items():
            one = once[slot, name]
            assert torch.equal(each, values[slot][name])
            assert (each.grad is None) is (one is None) is (not times)
            if one is not None and each.grad is not None:
                torch.testing.assert_close(each.grad, times * one)
    layer.release(1)
    for slot in (0, 3):
        for each in layer.adapter_parameters(slot).values():
            assert each.untyped_storage().nbytes() == each.nbytes, "a slot keeps no memory of one that has gone"


def test_a_slot_that_finds_no_memory_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take the parameters that optimizers update, also after half of them have got a memory of their own."""
    layer = span_layer(4)
    layer.release(3)
    spans = layer.spans
    assert spans is not None
    layer.row_factors("", spans.slots)
    clone, left = Tensor.clone, iter(range(3))

    def limited(tensor: Tensor) -> Tensor:
        if next(left, None) is None:
            raise torch.OutOfMemoryError
        return clone(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", limited)
        with pytest.raises(torch.OutOfMemoryError):
            layer.admit(3, 8, 2.0, torch.Generator())
    with torch.no_grad():
        for slot in range(3):
            layer.adapter_parameters(slot)["lora_A"].fill_(slot)
    found, _ = layer.row_factors("", spans.slots).stacked(torch.zeros(1))
    assert found.amax((1, 2)).tolist() == [0, 1, 2, 0]


def test_experts_with_an_adapter_are_experts_with_its_sum(moe_directory: Path, tmp_path: Path) -> None:
    """The exported adapter, merged by its names into the weights of a bare model: an independent path to the same numbers."""
    model, layers = wrapped(moe_directory)
    admit(layers, 2, ALL)
    found = values(model, [(2, sum(LENGTHS))])
    export_adapter(layers, 2, ALL, str(moe_directory), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == LAYERS * 2 * (4 + 3 * EXPERTS)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert described["target_parameters"] == [
        f"model.layers.{layer}.mlp.experts.{weight}"
        for layer in range(LAYERS)
        for weight in ("down_proj", "gate_up_proj")
    ]
    merged = load_model(moe_directory, "float32", CPU)
    state = merged.state_dict()
    for name in {key.rpartition(".lora_")[0] for key in tensors}:
        delta = 2.0 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        path = name.removeprefix("base_model.model.")
        block, experts, rest = path.partition(".experts.")
        if not experts:
            state[f"{path}.weight"] += delta
            continue
        expert, _, projection = rest.partition(".")
        if projection == "down_proj":
            state[f"{block}.experts.down_proj"][int(expert)] += delta
        else:
            half = state[f"{block}.experts.gate_up_proj"][int(expert)].chunk(2)[projection == "up_proj"]
            half += delta
    torch.testing.assert_close(found, run(merged, tokens(), LENGTHS).detach(), rtol=0, atol=1e-5)
    assert (found - run(model, tokens(), LENGTHS)).abs().max() > 1e-2


@pytest.mark.slow  # imports peft
def test_an_exported_adapter_gives_the_same_results_in_peft(dense_directory: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft's own imports
        from peft import PeftModel
    model, layers = wrapped(dense_directory)
    admit(layers, 3, DENSE)
    admit(layers, 1, DENSE)
    export_adapter(layers, 3, DENSE, str(dense_directory), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    ours_P = values(model, [(3, sum(LENGTHS))])
    peft_model = PeftModel.from_pretrained(load_model(dense_directory, "float32", CPU), tmp_path).eval()
    torch.testing.assert_close(run(peft_model, tokens(), LENGTHS).detach(), ours_P, rtol=0, atol=5e-6)
    assert (ours_P - run(model, tokens(), LENGTHS)).abs().max() > 1e-2


def test_the_digest_of_an_adapter_is_the_sum_over_its_matrices_as_an_engine_rounds_and_scales_each() -> None:
    generator = torch.Generator().manual_seed(0)
    adapter = {
        f"base_model.model.{layer}{each}.lora_{factor}.weight": torch.randn(shape, generator=generator)
        for layer in ("model.layers.0.", "model.layers.11.", "")
        for each in ("q_proj", "mlp.experts.3.up_proj")
        for factor, shape in (("A", (4, 300)), ("B", (200, 4)))
    }
    expected: dict[str, dict[str, int]] = {}
    for precision, dtype in DTYPES.items():
        for name, matrix in adapter.items():
            held = matrix.to(dtype)
            held = held * 1.7 if "lora_B" in name else held
            layer = next((number for number in ("11", "0", "3") if f".{number}." in name), "")
            sums = expected.setdefault(precision, {})
            sums[layer] = sums.get(layer, 0) + int(hash_sum(held, dtype))
    published = digest_adapter(adapter, 1.7)
    assert published == {
        precision: {layer: f"{value % 2**64:016x}" for layer, value in sums.items()}
        for precision, sums in expected.items()
    }


def test_a_row_of_another_length_is_noticed(dense_directory: Path) -> None:
    model, layers = wrapped(dense_directory)
    admit(layers, 0, DENSE)
    with pytest.raises(AssertionError, match="23 tokens, of which 22 were announced"):
        values(model, [(0, 22)])


@pytest.mark.slow  # imports vllm
@pytest.mark.parametrize(
    ("kind", "block", "named"),
    [("moe", "mlp", ("gate_proj", "down_proj", "up_proj")), ("mixtral", "block_sparse_moe", ("w1", "w2", "w3"))],
)
def test_vllm_reads_the_adapters_of_experts(
    kind: str, block: str, named: tuple[str, ...], moe_directory: Path, tmp_path: Path
) -> None:
    """By its own reader, since a server on a CPU has no kernel for them; the names are those of its Qwen3-MoE and Mixtral."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vllm's own imports
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import PackedLoRALayerWeights
        from vllm.lora.peft_helper import PEFTHelper
    directory = moe_directory if kind == "moe" else make_tiny(kind, tmp_path)
    model, layers = wrapped(directory)
    experts = len(model.get_submodule("model.layers.0.mlp.experts.base").gate_up_proj)
    admit(layers, 1, ALL)
    export_adapter(layers, 1, ALL, str(directory), tmp_path)
    helper = PEFTHelper.from_local_dir(str(tmp_path), None)
    projections = [f"experts.{expert}.{name}" for expert in range(experts) for name in named]
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "experts", *projections}
    read = LoRAModel.from_local_checkpoint(str(tmp_path), expected, helper, lora_model_id=1, device="cpu")
    for layer in range(LAYERS):
        place = f"model.layers.{layer}.{block}"
        packed = PackedLoRALayerWeights.pack_moe([read.loras[f"{place}.{name}"] for name in projections], place)
        ours = layers[f"model.layers.{layer}.mlp.experts"].adapter_parameters(1)
        gate_B, up_B = ours["gate_up_proj.lora_B"].chunk(2, 1)
        ours_A = [ours["gate_up_proj.lora_A"], ours["down_proj.lora_A"], ours["gate_up_proj.lora_A"]]
        for found, parameter in zip(packed.lora_a, ours_A, strict=True):
            assert torch.equal(found, parameter)
        for found, parameter in zip(packed.lora_b, [gate_B, ours["down_proj.lora_B"], up_B], strict=True):
            assert torch.equal(found, parameter)
        assert packed.scaling == [2.0, 2.0, 2.0]


def test_a_probe_is_of_the_runs_own_adapter(directory: Path, tmp_path: Path) -> None:
    model, layers = wrapped(directory)
    for slot in (1, 2):
        admit(layers, slot, DENSE)

    def probe(slot: int) -> tuple[Tensor, Tensor]:
        write_probe(model, slot + 5, tmp_path / "probe.json", slot, {}, None)
        written = json.loads((tmp_path / "probe.json").read_text())
        assert written["version"] == slot + 5
        return torch.tensor(written["token_ids"]), torch.tensor(written["log_probabilities"])

    for slot in (0, 1, 2):
        token_ids_T, found_P = probe(slot)
        with torch.no_grad(), adapter_spans(model, [(slot, len(token_ids_T))]):
            expected_P = run(model, token_ids_T, [len(token_ids_T)])
        torch.testing.assert_close(found_P, expected_P, rtol=0, atol=5e-6)
    assert not torch.equal(probe(1)[1], probe(2)[1])
