"""Runs the trainer's own code for a model of any size on torch's `meta` device, and counts the bytes of each part.

Nothing is allocated or computed: tensors have shapes only. The parts thus follow the trainer's code: its output layer by chunks,
its activation checkpointing, its adapters and its optimizer. What `meta` cannot show is in formulas of one function each: moments
here, and what sharding leaves on a rank in `counterpoint/job/plan/trainer_memory.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from counterpoint.inference.digest import is_of_text
from counterpoint.job.plan.live_bytes import LiveBytes
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from counterpoint.trainer.lora.targets import adaptable, is_target
from counterpoint.trainer.model import chunks
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.chunks import ChunkArithmetic
from counterpoint.trainer.model.compiled import PROBED_TOKENS, compile_untested
from counterpoint.trainer.model.compiler import reason_of
from counterpoint.trainer.model.experts import WEIGHTS
from counterpoint.trainer.model.head import token_outputs
from counterpoint.trainer.model.kernels.kept import computed_once
from counterpoint.trainer.model.recompute import checkpoint_layers
from counterpoint.trainer.model.sharding import differentiate_inputs
from counterpoint.trainer.model.text_part import auto_class, freeze_other_parts, read_config, text_config
from counterpoint.trainer.optimizer import STATE_KEYS, Optimizer
from counterpoint.trainer.updates.value_head import ValueHead, row_values

logger = logging.getLogger(__name__)

_ATTENTION = "planned"

_FEW = 64
"""Tokens of the rows whose gradients the row at the peak finds there; their number does not matter for these."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model's weights are, of `config.json` alone."""

    parameters: dict[str, int]
    """The number of parameters by kind: embeddings, attention, mlp, experts, router, norms, other, beside text.
    Tied weights count once."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    alike: bool
    """Whether all decoder layers are alike."""
    experts_per_token: int
    """The experts that each token uses; 0 without experts."""
    widest: int
    """The largest output of a linear layer other than the last, or of one expert of each token together."""
    largest_layer: int
    """Parameters of the largest decoder layer."""
    outside_layers: int
    """Parameters outside the decoder layers."""
    linear_layers: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """Shapes `[out, in]` or `[experts, out, in]` of the layers that may have adapters, by the last part of their names."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def expert_weights(self) -> int:
        """Parameters of fused experts, which ranks can divide by expert."""
        return sum(prod(shape) for shape in self._fused)

    @property
    def expert_layers(self) -> int:
        """Layers with fused experts."""
        return len(self._fused) // len(WEIGHTS)

    @property
    def _fused(self) -> list[tuple[int, ...]]:
        return [shape for shapes in self.linear_layers.values() for shape in shapes if len(shape) == 3]


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one rank without sharding, at the peak of a step."""

    weights: int
    adapters: int
    masters: int
    gradients: int
    activations: int
    """All else that lives at the peak of the second row's passes, when the gradients of the first are there."""
    trained: int
    """Parameters that are trained."""
    moments: int
    """The state of the optimizers beside the masters."""


def make_model(directory: Path, dtype: str, layers: int | None = None) -> nn.Module:
    """Returns the model of a `config.json` on the meta device, with all its layers or the first few."""
    config = read_config(directory)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        model: nn.Module = auto_class(config).from_config(config, attn_implementation=_ATTENTION, dtype=_DTYPES[dtype])
    return freeze_other_parts(model).eval()


@contextmanager
def _plannable(directory: Path) -> Iterator[None]:
    """Raises `ValueError` for any error of a model's own code, such as a division by its 0 heads."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"model = {str(directory)!r} cannot be planned: {type(error).__name__}: {error}") from error


@cache
def model_sizes(directory: Path) -> ModelSizes:
    """Counts the parameters of a model by kind, exactly, from the shapes that transformers gives them.

    Raises `ValueError` if transformers cannot make it, or it is no decoder.
    """
    with _plannable(directory):
        return _model_sizes(directory)


def _model_sizes(directory: Path) -> ModelSizes:
    model = make_model(directory, "float32")
    config = text_config(model)
    kinds: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    linear: dict[str, list[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        kinds[_kind(name, parameter)] += parameter.numel()
        before, found, after = name.partition(".layers.")
        inside = found and before and is_of_text(name)
        layers[after.partition(".")[0] if inside else ""] += parameter.numel()
    for name, layer in adaptable(model).items():
        shapes = [tuple(weight.shape) for key, weight in layer.named_parameters(recurse=False) if key != "bias"]
        linear.setdefault(name.rpartition(".")[2], []).extend(shapes)
    heads = config.num_attention_heads
    per_token = getattr(config, "num_experts_per_tok", None) or 1
    expert = (getattr(config, "moe_intermediate_size", None) or 0) * per_token
    return ModelSizes(
        parameters=dict(kinds),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        alike=len({count for layer, count in layers.items() if layer}) == 1
        and len(set(getattr(config, "layer_types", None) or [""])) == 1
        and config is model.config,
        experts_per_token=(getattr(config, "num_experts_per_tok", None) or 0) if kinds["experts"] else 0,
        widest=2 * max(getattr(config, "intermediate_size", None) or 4 * config.hidden_size, expert),
        largest_layer=max((count for layer, count in layers.items() if layer), default=0),
        outside_layers=layers[""],
        linear_layers=linear,
    )


def _kind(name: str, parameter: Tensor) -> str:
    parts = name.lower().split(".")
    if not is_of_text(name):
        return "beside text"
    if any("expert" in part for part in parts):
        return "experts"
    if any("norm" in part or part.startswith("ln_") for part in parts):
        return "norms"
    if any(part in ("gate", "router") for part in parts):
        return "router"
    if any("embed" in part or part in ("lm_head", "wte", "wpe") for part in parts):
        return "embeddings"
    if any("attn" in part or "attention" in part for part in parts):
        return "attention"
    if any("mlp" in part or "feed_forward" in part for part in parts):
        return "mlp"
    return "other"


def step_bytes(
    directory: Path,
    dtype: str,
    tokens: int,
    runs: list[TrainingConfig],
    *,
    checkpointing: bool | int,
    context: int = 1,
    memory: int | None = None,
    compiled: bool = False,
) -> StepBytes:
    """Runs two rows of `tokens` tokens of one sample, as after the first of a step, and returns what lives at the peak.

    `runs` are those trained at once; a row is of the first. All weights are trained where it has no adapter. With `context`
    ranks that share a row, `tokens` are those of this rank's stretch, the last. Every number grows evenly with the layers, if
    these are alike: then models of two and of three layers are run. `checkpointing` is as `trainer.activation_checkpointing`.
    `memory` is that of the GPU, in bytes; None: on a CPU. `compiled`: by torch.compile, unless the model is a mixture.
    Raises `ValueError` as `model_sizes`.
    """
    given = tuple(run.model_dump_json() for run in runs)

    def run(layers: int | None, again: int) -> StepBytes:
        keeps = checkpointing is not True
        return _step_bytes(directory, dtype, tokens, given, again, keeps, context, memory, layers, has_graphs)

    with _plannable(directory):
        sizes = model_sizes(directory)
        # The graphs of a mixture cannot be made here. A plan without graphs was 0.94 to 1.06 of its compiled steps.
        has_graphs = compiled and not sizes.expert_weights and _has_graphs(directory, dtype, given)
        again = int(checkpointing) if checkpointing is not True else sizes.layers
        if not sizes.alike or sizes.layers < 3 or again > sizes.layers:
            return run(None, again)
        if again in (0, sizes.layers):
            few = run(2, min(again, 2))
            more = [(sizes.layers - 2, run(3, min(again, 3)))]
        else:
            few = run(2, 1)
            more = [(again - 1, run(3, 2)), (sizes.layers - again - 1, run(3, 1))]
    numbers = {
        name: getattr(few, name) + sum(count * (getattr(each, name) - getattr(few, name)) for count, each in more)
        for name in StepBytes.__dataclass_fields__
    }
    return StepBytes(**numbers)


@cache
def _step_bytes(
    directory: Path,
    dtype: str,
    tokens: int,
    given: tuple[str, ...],
    again: int,
    keeps_attention: bool,
    context: int,
    memory: int | None,
    layers: int | None,
    compiled: bool,
) -> StepBytes:
    runs = [TrainingConfig.model_validate_json(each) for each in given]
    AttentionInterface.register(_ATTENTION, torch.compiler.disable(partial(_attention, context)))
    with LiveBytes("meta") as live, _few_chunks(memory):
        model = make_model(directory, dtype, layers)
        model.logits_scale = 1.0
        weights = live.now
        if again:
            checkpoint_layers(model, None, again if keeps_attention else None)
        heads = [_value_head(model, run) for run in runs]
        parameters = [_trained(model, slot, runs, value_head) for slot, value_head in enumerate(heads)]
        if compiled:
            _compile(model)
        adapters = live.now - weights
        optimizers = [Optimizer(each, run.optimizer) for each, run in zip(parameters, runs, strict=True)]
        masters = live.now - weights - adapters
        for slot, value_head in enumerate(heads):
            _row(model, min(tokens, _FEW), slot, value_head)
        gradients = live.now - weights - adapters - masters
        before = live.peak = live.now
        _row(model, tokens, 0, heads[0])
        activations = live.peak - before
        trained = [sum(parameter.numel() for parameter in each.values()) for each in parameters]
        moments = sum(moments_bytes(count, run) for count, run in zip(trained, runs, strict=True))
        del optimizers
    return StepBytes(weights, adapters, masters, gradients, activations, sum(trained), moments)


@cache
def _has_graphs(directory: Path, dtype: str, given: tuple[str, ...]) -> bool:
    """Makes the graphs of a model's layers, which later rows use, by a row as the trainer's; returns whether that is possible."""
    runs = [TrainingConfig.model_validate_json(each) for each in given]
    AttentionInterface.register(_ATTENTION, torch.compiler.disable(partial(_attention, 1)))
    try:
        model = make_model(directory, dtype, 2 if model_sizes(directory).alike else None)
        model.logits_scale = 1.0
        for slot in range(len(runs)):
            _trained(model, slot, runs, None)
        _compile(model)
        for tokens in (PROBED_TOKENS, _FEW):
            _row(model, tokens, 0, None)
    except Exception as error:  # of torch's compiler, or a model's code
        if is_fatal(error):
            raise
        logger.warning("planned as if layers were not compiled: %s", reason_of(error))
        return False
    return True


def _compile(model: nn.Module) -> None:
    """Compiles what a trainer on a GPU does."""
    from counterpoint.job.plan.compiled_graphs import backend  # takes seconds

    torch._dynamo.config.recompile_limit = 256  # a plan computes several models and kinds of training
    torch._dynamo.config.suppress_errors = (
        False  # else a row whose graph cannot be made is planned as if it were compiled
    )
    if any(isinstance(module, MultiLora) for module in model.modules()):
        differentiate_inputs(model)
    compiler = partial(torch.compile, backend=backend)
    compile_untested(model, compiler)
    model.head_arithmetic = ChunkArithmetic.compiled(compiler)


@contextmanager
def _few_chunks(memory: int | None) -> Iterator[None]:
    """Computes the first two chunks of the output layer, as with so much memory, and the last one; the others hold the same."""
    every, before = chunks._slices, chunks.device_memory

    def few(length: int, size: int) -> Iterator[slice]:
        parts = list(every(length, size))
        return iter(parts[:2] + parts[2:][-1:])

    def of_device(device: torch.device) -> int | None:
        return memory

    chunks._slices, chunks.device_memory = few, of_device
    try:
        yield
    finally:
        chunks._slices, chunks.device_memory = every, before


def moments_bytes(trained: int, training: TrainingConfig) -> int:
    """Bytes of the optimizer's state for so many trained parameters, float32."""
    if training.optimizer == "sgd":
        return 4 * trained if training.momentum else 0
    return 4 * trained * (len(STATE_KEYS["adamw"]) - 1)


def _value_head(model: nn.Module, run: TrainingConfig) -> ValueHead | None:
    return (
        None
        if run.value_head is None
        else ValueHead(model.get_output_embeddings().weight.shape[-1], torch.device("meta"))
    )


def _trained(
    model: nn.Module, slot: int, runs: list[TrainingConfig], value_head: ValueHead | None
) -> dict[str, nn.Parameter]:
    lora = runs[slot].lora
    found = value_head.parameters() if value_head is not None else {}
    if lora is None:
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad} | found
    highest = max(run.lora.rank for run in runs if run.lora is not None)
    for name, layer in apply_lora_to_model(model, 2 * len(runs), lora, highest).items():
        if is_target(name, lora):
            layer.admit(slot, lora.rank, lora.alpha, torch.Generator())
            if runs[slot].reference_is_start:
                layer.admit(len(runs) + slot, lora.rank, lora.alpha, torch.Generator())
            found |= {f"{name}.{key}": value for key, value in layer.adapter_parameters(slot).items()}
    return found


def _row(model: nn.Module, tokens: int, slot: int, value_head: ValueHead | None) -> None:
    ids_T = torch.zeros(tokens, dtype=torch.int64, device="meta")
    predicting_P = torch.arange(tokens - 1, device="meta")
    with adapter_spans(model, [(slot, tokens)]):
        outputs = token_outputs(model, ids_T, ids_T, [tokens], predicting_P, ids_T[1:], 1.0)
    values_P = row_values([value_head], outputs.hidden_PH, [tokens - 1])
    computed = [each for each in (outputs.log_probabilities_P, values_P) if each is not None]
    del outputs
    torch.autograd.backward(computed, [torch.empty_like(each) for each in computed])


def _attention(
    ranks: int,
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The kernel that `counterpoint/trainer/model/attention.py` gets for one sample; the meta device would choose another.

    Of `ranks` that share the row, each gathers the keys and values of all.
    """
    if ranks > 1:
        key_1HTD, value_1HTD = (each.repeat(1, 1, ranks, 1) for each in (key_1HTD, value_1HTD))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention() -> Tensor:
        output: Tensor = kernel(query_1HTD, key_1HTD, value_1HTD, 0.0, ranks == 1, scale=scaling)[0]
        return output

    return computed_once(attention, key_1HTD.shape[2]).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, partial(_attention, 1))
