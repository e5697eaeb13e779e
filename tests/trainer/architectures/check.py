"""Compares what the trainer computes with a model with what transformers computes, in float32, one sample at a time.

Checked are the log-probabilities and the gradients of four samples, in rows as the trainer makes them. In lower precision the
trainer may be as far from float32 as transformers is in that precision, times `ROUNDING_FACTOR`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from counterpoint.trainer.lora.targets import adaptable, check_targets, prove_layers
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.load import load_model, log_probabilities, trainable_parameters
from counterpoint.trainer.model.packing_proof import can_pack, can_share_prompts, prove_packing
from counterpoint.trainer.model.shared_prompts import Family
from counterpoint.trainer.model.text_part import auto_class, read_config
from tests.trainer.architectures.peft_export import check_export
from tests.trainer.architectures.tiny import VOCABULARY

ROUNDING_FACTOR = 4.0
LEAST_BOUND = {"float32": 1e-3, "bfloat16": 5e-2}
"""Nats, root mean square: allowed difference of log-probabilities, even if rounding is smaller."""

GRADIENT_BOUND = {"float32": 1e-3, "bfloat16": 1e-1}
"""The same of gradients, relative to theirs."""
LEAST_EFFECT = 1e-2
"""Nats: an adapter that changes less shows nothing."""

_CPU = torch.device("cpu")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROMPT, _RESTS = 5, (6, 3, 8, 1)
_RANK, _ALPHA, _DEVIATION = 4, 8.0, 0.1

RIGHT, WRONG = "right", "wrong"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found of one aspect: `right`, `wrong` or `refused`, and why or by how much."""

    found: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of all samples."""

    log_probabilities_P: Tensor
    gradients: Mapping[str, Tensor]
    """Gradients by parameter, of a weighted sum of the log-probabilities."""


def check(directory: Path, dtype: str) -> dict[str, Outcome]:
    """Checks the model in `directory` in one precision; returns the outcomes by aspect, of those that could be reached."""
    samples = _samples()
    try:
        truth, stock = (_stock(directory, each, samples) for each in (torch.float32, _DTYPES[dtype]))
    except Exception as error:  # noqa: BLE001 - of any model's code
        return {"weights": Outcome("not run", f"transformers itself: {type(error).__name__}: {error}")}
    rounding = _distances(stock, truth)
    try:
        model = load_model(directory, dtype, _CPU)
        prove_packing(model)
    except ValueError as error:
        return {"weights": Outcome("refused", str(error))}
    found = _ours(model, samples, trainable_parameters(model))
    outcomes = {"weights": _compared(found, truth, rounding, dtype)}
    outcomes["rows"] = Outcome("packed" if can_pack(model) else "one sample each")
    outcomes["prompts"] = Outcome("each its own")
    if can_share_prompts(model):
        outcome = _compared(_Values(_shared(model, samples), {}), truth, rounding, dtype)
        outcomes["prompts"] = Outcome("shared") if outcome.found == RIGHT else outcome
    prove_layers(model)
    names = sorted({path.rpartition(".")[2] for path in adaptable(model)})
    if not names:
        return outcomes | {"adapter": Outcome("refused", "it has no layer that can have an adapter")}
    outcomes["adapter"] = _adapted(model, names, directory, samples, rounding, dtype)
    if outcomes["adapter"].found == RIGHT:
        outcomes["PEFT"] = _exported(directory, names, dtype, rounding[0])
    return outcomes


def _samples() -> list[Tensor]:
    """Returns samples with the same prompt."""
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(3, VOCABULARY, (_PROMPT,), generator=generator)
    return [torch.cat((prompt, torch.randint(3, VOCABULARY, (length,), generator=generator))) for length in _RESTS]


def _weights(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(8))


def _values(values_P: Tensor, parameters: Mapping[str, nn.Parameter]) -> _Values:
    for each in parameters.values():
        each.grad = None
    (values_P * _weights(len(values_P))).sum().backward()  # stacked factors of adapters have gradients in no other way
    gradients = {name: each.grad.float().clone() for name, each in parameters.items() if each.grad is not None}
    return _Values(values_P.detach(), gradients)


def _stock(
    directory: Path, dtype: torch.dtype, samples: Sequence[Tensor], added: Sequence[Mapping[str, Tensor]] = ({},)
) -> _Values:
    """Computes samples as transformers does.

    `added`: to the weights, by name; of several, each for an equal part of the samples, and names of gradients begin with its
    number.
    """
    parts: list[Tensor] = []
    parameters: dict[str, nn.Parameter] = {}
    share = len(samples) // len(added)
    for number, changes in enumerate(added):
        model = auto_class(read_config(directory)).from_pretrained(directory, dtype=dtype, local_files_only=True).eval()
        for name, change in changes.items():
            path, _, weight = name.rpartition(".")
            module = model.get_submodule(path)
            # A weight of its own: adapters of layers with the same weight are different ones.
            setattr(module, weight, nn.Parameter(getattr(module, weight).detach() + change))
        own = trainable_parameters(model)
        parameters |= {f"{number}.{name}" if len(added) > 1 else name: each for name, each in own.items()}
        for sample in samples[number * share : (number + 1) * share]:
            logits = model(input_ids=sample[None], use_cache=False).logits[0].float()
            parts.append(logits[:-1].log_softmax(-1).gather(-1, sample[1:, None])[:, 0])
    return _values(torch.cat(parts), parameters)


def _ours(model: nn.Module, samples: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]) -> _Values:
    """Computes samples as the trainer does, the second half by the adapters of slot 1, where there are any."""
    slots = [0] * (len(samples) // 2) + [1] * (len(samples) - len(samples) // 2)
    places = list(range(len(samples)))
    parts = []
    for row in [places] if can_pack(model) else [[place] for place in places]:
        lengths = [len(samples[place]) for place in row]
        tokens_T = torch.cat([samples[place] for place in row])
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        predicting_P = (positions_T[1:] > 0).nonzero()[:, 0]
        with adapter_spans(model, [(slots[place], len(samples[place])) for place in row]):
            values_P, _ = log_probabilities(
                model, tokens_T, positions_T, lengths, predicting_P, tokens_T[predicting_P + 1], 1.0
            )
        parts.append(values_P)
    return _values(torch.cat(parts), parameters)


def _shared(model: nn.Module, samples: Sequence[Tensor]) -> Tensor:
    """Computes samples with the prompt once; returns the values of all their tokens."""
    prompt, rests = samples[0][:_PROMPT], [sample[_PROMPT:] for sample in samples]
    tokens_T = torch.cat([prompt, *rests])
    positions_T = torch.cat([torch.arange(_PROMPT), *(torch.arange(len(rest)) + _PROMPT for rest in rests)])
    predicting: list[int] = []
    first = _PROMPT
    for rest in rests:
        predicting += [*range(_PROMPT), *range(first, first + len(rest) - 1)]
        first += len(rest)
    family = Family(_PROMPT, tuple(map(len, rests)))
    with torch.no_grad():
        values_P, _ = log_probabilities(
            model, tokens_T, positions_T, [len(sample) for sample in samples], torch.tensor(predicting),
            torch.cat([sample[1:] for sample in samples]), 1.0, families=(family,),
        )  # fmt: skip
    return values_P


def _adapted(
    model: nn.Module,
    names: Sequence[str],
    directory: Path,
    samples: Sequence[Tensor],
    rounding: tuple[float, float],
    dtype: str,
) -> Outcome:
    """Compares two adapters in a row with transformers' model to whose weights their products are added."""
    config = LoraConfig(rank=_RANK, alpha=_ALPHA, target_modules=list(names))
    try:
        check_targets(model, config, _RANK)
        layers = apply_lora_to_model(model, 2, config)
    except ValueError as error:
        return Outcome("refused", str(error))
    generator = torch.Generator().manual_seed(9)
    parameters: dict[str, nn.Parameter] = {}
    for path, layer in layers.items():
        for slot in (0, 1):
            layer.admit(slot, _RANK, _ALPHA, generator)
            for name, parameter in layer.adapter_parameters(slot).items():
                nn.init.normal_(parameter, std=_DEVIATION, generator=generator)
                parameters[f"{slot}.{path}.{name}"] = parameter
    found = _ours(model, samples, parameters)
    products = _products(layers)
    added = [{name: scale * (b @ a) for name, (_, a, b, scale) in each.items()} for each in products]
    truth = _stock(directory, torch.float32, samples, added)
    gradients: dict[str, Tensor] = {}
    for slot, each in enumerate(products):
        for name, (prefix, a, b, scale) in each.items():
            by_weight = truth.gradients[f"{slot}.{name}"]
            gradients[f"{slot}.{prefix}lora_A"] = scale * b.transpose(-2, -1) @ by_weight
            gradients[f"{slot}.{prefix}lora_B"] = scale * by_weight @ a.transpose(-2, -1)
    return _compared(found, _Values(truth.log_probabilities_P, gradients), rounding, dtype)


def _products(layers: Mapping[str, MultiLora]) -> list[dict[str, tuple[str, Tensor, Tensor, float]]]:
    """Returns, of each slot, by the name of a weight: the prefix of the adapter's names, A, B and the scale."""
    return [
        {
            f"{path}.{prefix.rstrip('.') or 'weight'}": (
                f"{path}.{prefix}",
                low.lora_A.detach(),
                low.lora_B.detach(),
                low.scale,
            )
            for path, layer in layers.items()
            for prefix, low in layer.adapters[slot].items()
        }
        for slot in (0, 1)
    ]


def _exported(directory: Path, names: Sequence[str], dtype: str, rounding: float) -> Outcome:
    try:
        found = check_export(directory, names, dtype)
    except ValueError as error:
        return Outcome("refused", str(error))
    if not found.difference <= 4 * max(LEAST_BOUND[dtype], rounding):  # the largest of a few
        return Outcome(
            WRONG, f"PEFT is {found.difference:.2g} nats from the trainer; the adapter's effect is {found.effect:.2g}"
        )
    if not found.effect >= LEAST_EFFECT:
        return Outcome(WRONG, f"the adapter has no effect: {found.effect:.2g} nats")
    return Outcome(RIGHT)


def _distances(found: _Values, expected: _Values) -> tuple[float, float]:
    """Returns that of the log-probabilities in nats (root mean square), and that of the gradients relative to `expected`'s."""
    values = (found.log_probabilities_P - expected.log_probabilities_P).square().mean().sqrt()
    names = found.gradients.keys() & expected.gradients.keys()
    square = sum(float((found.gradients[name] - expected.gradients[name]).square().sum()) for name in names)
    norm = sum(float(each.square().sum()) for each in expected.gradients.values())
    return float(values), (square / norm) ** 0.5 if norm else 0.0


def _compared(found: _Values, expected: _Values, rounding: tuple[float, float], dtype: str) -> Outcome:
    missing = [name for name, each in expected.gradients.items() if name not in found.gradients and bool(each.any())]
    if found.gradients and missing:
        return Outcome(WRONG, f"{len(missing)} weights have no gradient, such as {missing[0]}")
    values, gradients = _distances(found, expected)
    if not values <= (bound := ROUNDING_FACTOR * rounding[0] + LEAST_BOUND[dtype]):
        return Outcome(WRONG, f"log-probabilities differ by {values:.2g} nats (at most {bound:.2g})")
    if found.gradients and not gradients <= (bound := ROUNDING_FACTOR * rounding[1] + GRADIENT_BOUND[dtype]):
        return Outcome(WRONG, f"gradients differ by {gradients:.2g} of theirs (at most {bound:.2g})")
    return Outcome(RIGHT)
