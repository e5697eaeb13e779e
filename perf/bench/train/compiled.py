"""Measures what compiled decoder layers cost and save: rows by a model with and without them, in turns (`[trainer] compile`).

    python -m perf.bench.train.compiled [--quick | --full]

A dense model and a mixture of the demos' width, one thread. Every row has another number of samples of other lengths.
"""

from __future__ import annotations

import random
import resource

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from perf.bench.command import Size, show
from perf.figures import Case, Figure
from trainer.model import attention
from trainer.model.compiled import compile_layers
from trainer.model.load import log_probabilities
from trainer.model.packing_proof import prove_packing

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def measure(size: Size) -> list[Case]:
    """Measures the case `train-compiled`."""
    torch.set_num_threads(1)
    rows, tokens = size.pick((2, 512), (6, 2048), (20, 2048))
    mixture = Qwen3MoeConfig(**SHAPE, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2)
    figures = [
        figure
        for name, config, bound in (("dense", Qwen3Config(**SHAPE), 1.0), ("mixture", mixture, 1.1))
        for figure in _figures(name, config, rows, tokens, bound)
    ]
    return [Case("train-compiled", figures)]


def _figures(name: str, config: PreTrainedConfig, rows: int, tokens: int, bound: float) -> list[Figure]:
    plain, compiled = _model(config), _model(config)
    began = _cpu()
    compile_layers(compiled)
    compiling = _cpu() - began
    source = random.Random(0)
    spent = [0.0, 0.0]
    for row in range(rows + 1):
        given = _row(config, tokens, source)
        for index, model in enumerate((plain, compiled)):
            began = _cpu()
            _train(model, *given)
            if row:  # the first one warms up
                spent[index] += _cpu() - began
    return [
        Figure(f"{name}: to compile, CPU time", compiling, "s"),
        Figure(f"{name}: a row of {tokens} tokens, CPU time", spent[0] / rows, "s"),
        Figure(f"{name}: the same, compiled", spent[1] / rows, "s"),
        Figure(f"{name}: the second over the first", spent[1] / spent[0], "x", bound),
    ]


def _model(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    prove_packing(model.eval())
    return model


def _row(config: PreTrainedConfig, tokens: int, source: random.Random) -> tuple[Tensor, list[int]]:
    lengths: list[int] = []
    while sum(lengths) < tokens - 96:
        lengths.append(source.randint(32, 96))
    return torch.randint(0, config.vocab_size, (sum(lengths),)), lengths


def _train(model: nn.Module, tokens_T: Tensor, lengths: list[int]) -> None:
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    every = torch.arange(len(tokens_T) - 1)
    values_P, _ = log_probabilities(model, tokens_T, positions_T, lengths, every, tokens_T[1:], 1.0)
    values_P.sum().backward()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    show(measure)
