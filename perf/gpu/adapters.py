"""The rows of many adapters.

In one layer: its forward and backward pass, and how long the host takes to ask for them. In a whole trainer: a step of so many
runs beside one of as many tokens, and its publications.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from perf import many_runs
from perf.gpu.steps import Figures
from perf.step_speed import SHAPES

COUNTS = (1, 2, 8, 32)
TOKENS = 2048
"""A row on a GPU has so many, divided equally among the adapters."""

RUNS = (256, 1024)
"""Runs of a trainer, on a CPU fewer."""

WARMING, MEASURED = 3, 20
"""Rows, on a CPU fewer. The measured ones add to gradients."""


def one_layer(device: str, _directory: Path) -> Figures:
    """Returns the median milliseconds of a row, and those until the host has asked for all of it, by how many adapters it has."""
    on_gpu = device == "cuda"
    warming = WARMING if on_gpu else 1
    tokens, lora = TOKENS if on_gpu else 64, LoraConfig(rank=16)
    shape = SHAPES["0.6b" if on_gpu else "small"] | {"num_hidden_layers": 1, "vocab_size": 512}
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model: Any = AutoModelForCausalLM.from_config(Qwen3Config(**shape), attn_implementation="sdpa", dtype=dtype)
    model.to(device)
    layers, generator = apply_lora_to_model(model, max(COUNTS), lora).values(), torch.Generator().manual_seed(0)
    for layer in layers:
        for slot in range(max(COUNTS)):
            layer.admit(slot, lora.rank, lora.alpha, generator)
    hidden = torch.randn(1, tokens, shape["hidden_size"], device=device, dtype=dtype, requires_grad=True)
    turns = model.model.rotary_emb(hidden, torch.arange(tokens, device=device)[None])
    figures: Figures = {}
    for count in COUNTS:
        asked, done = [], []
        for _ in range(warming + (MEASURED if on_gpu else 2)):
            began = time.perf_counter()
            with adapter_spans(model, [(slot, tokens // count) for slot in range(count)]):
                output = model.model.layers[0](hidden, position_embeddings=turns)
                output.backward(torch.ones_like(output))
            asked.append(time.perf_counter() - began)
            if on_gpu:
                torch.cuda.synchronize()
            done.append(time.perf_counter() - began)
        figures[f"ms with {count}"] = round(1e3 * statistics.median(done[warming:]), 2)
        figures[f"host's with {count}"] = round(1e3 * statistics.median(asked[warming:]), 2)
    return figures


def whole_trainer(device: str, directory: Path) -> Figures:
    """Returns, for so many runs, the time of a step over that of one run with all tokens, and of its publications over it.

    Also the bytes of all tensors that a further run adds, over those of its adapter and optimizer.
    """
    settings, figures = many_runs.SETTINGS, Figures()
    if device == "cuda":
        settings = replace(settings, shape="0.6b", device=device, row_tokens=16_384, lora_rank=8)
    for count in RUNS if device == "cuda" else (2, 4):
        found = many_runs.beside_one(settings, count, 2, directory / str(count), saves=False)
        over_one, published = (
            statistics.median(each)
            for each in zip(
                *((many.wall / one.wall, many.published.wall / many.wall) for one, many in found.steps), strict=True
            )
        )
        figures |= {
            f"step of {count} over one": round(over_one, 2),
            f"publications of {count}": round(published, 2),
            f"a further run of {count}": round(found.further / found.state_bytes, 3),
        }
    return figures
