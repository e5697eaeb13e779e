"""The rows of a training step: the trainer alone at the shapes at which others publish figures, and beside TRL's."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from counterpoint.job.plan.trainer_memory import rank_parts
from counterpoint.trainer.model.chunks import device_memory
from counterpoint.trainer.model.compiler import compilations
from counterpoint.trainer.model.deterministic import use_deterministic_algorithms
from perf import driven_clients
from perf.step_speed import (
    SHAPES,
    Settings,
    configurations,
    measure,
    our_learner,
    our_trainer,
    random_batch,
    train_steps,
    write_model,
)

Figures = dict[str, float | int | str]

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Floating-point operations a second in dense bfloat16 products, by a part of the card's name, as their vendor states them."""

STEPS = 3
"""That are measured, after one that warms up."""


def full(tokens: int, samples: int, *, compiled: bool | None = None, checkpointing: bool | int = False) -> Settings:
    """Returns the settings of Qwen3-0.6B with all weights trained, on a GPU: samples of `tokens` tokens, one a row."""
    return _settings("0.6b", tokens, samples, compiled=compiled, checkpointing=checkpointing)


def lora(
    shape: str, tokens: int, samples: int, *, compiled: bool | None = None, checkpointing: bool | int = False
) -> Settings:
    """Returns the settings of an adapter of rank 16 on a GPU."""
    return _settings(shape, tokens, samples, lora_rank=16, compiled=compiled, checkpointing=checkpointing)


def _settings(shape: str, tokens: int, samples: int, **more: Any) -> Settings:
    prompt = 512
    return Settings(
        shape,
        "cuda",
        groups=1,
        group_size=samples,
        prompt=prompt,
        completion=tokens - prompt,
        shortest=tokens - prompt,
        steps=STEPS,
        row_tokens=tokens,
        **more,
    )


def small(settings: Settings) -> Settings:
    """Returns the same on a CPU, small: what it shows is that the row works."""
    row = 128
    return dataclasses.replace(
        settings,
        shape="small",
        device="cpu",
        group_size=2,
        prompt=16,
        completion=row - 16,
        shortest=row - 16,
        steps=1,
        row_tokens=row,
        checkpointing=settings.checkpointing and 1,
    )


def trainer_alone(settings: Settings, directory: Path) -> Figures:
    """Trains steps of random tokens; returns tokens a second, their share of the card's peak, and memory beside `plan`'s."""
    model = write_model(directory / "model", settings)
    train = our_trainer(model, directory, settings)
    seconds, tokens = [], 0
    on_gpu = settings.device == "cuda"
    for step in range(settings.steps + 1):
        batch = random_batch(settings, step)
        tokens = len(batch.token_ids_T)
        began = time.perf_counter()
        train(batch)
        if on_gpu:
            torch.cuda.synchronize()
        if step:
            seconds.append(time.perf_counter() - began)
    rate = tokens / statistics.median(seconds)
    figures: Figures = {"tokens a step": tokens, "tokens/s": round(rate), "late graphs": compilations.late}
    if on_gpu:
        peak = next((each for name, each in PEAKS.items() if name in torch.cuda.get_device_name()), None)
        if peak is not None:
            figures["% of the card's peak"] = round(100 * rate * operations(settings) / peak, 1)
        figures["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    figures["planned GB"] = round(_planned(model, directory, settings) / 1e9, 2)
    return figures


def deterministic(settings: Settings, directory: Path) -> Figures:
    """Trains the same batches in turns with `trainer.deterministic` and without, twice each, by learners of their own.

    Returns the seconds of a step with it over those without, and whether either two end with the same weights, bit for bit.
    """
    model, ways = (
        write_model(directory / "model", settings),
        [(wanted, turn) for turn in "ab" for wanted in (True, False)],
    )
    learners = {
        way: our_learner(model, directory / f"{way[0]}{way[1]}", dataclasses.replace(settings, deterministic=way[0]))
        for way in ways
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(settings.steps + 1):
        batch = random_batch(settings, step)
        for way in ways if step % 2 else reversed(ways):
            use_deterministic_algorithms(way[0])
            began = time.perf_counter()
            train_steps(learners[way], {0: batch})
            if settings.device == "cuda":
                torch.cuda.synchronize()
            if step:
                seconds[way[0]].append(time.perf_counter() - began)

    def same(wanted: bool) -> str:
        first, other = (learners[wanted, turn].runs[0].torch.newest() for turn in "ab")
        return "the same" if all(torch.equal(each, other[name]) for name, each in first.items()) else "different"

    medians = {wanted: statistics.median(each) for wanted, each in seconds.items()}
    figures: Figures = {
        "times as long": round(medians[True] / medians[False], 3),
        "s without": round(medians[False], 4),
    }
    return figures | {"bits with": same(True), "bits without": same(False)}


def _planned(model: Path, directory: Path, settings: Settings) -> int:
    run, trainer = configurations(model, directory, settings)
    memory = device_memory(torch.device(settings.device))
    parts = rank_parts(model, trainer, [run.training], settings.row_tokens, memory)
    return sum(count for name, count in parts.items() if name != "context and fragments")


def operations(settings: Settings) -> float:
    """Returns the floating-point operations that training one token takes: those that count as the model's, nothing twice.

    Two for each weight of a matrix and token in the forward pass, two in the backward pass for the activations, and two for the
    weights unless an adapter is trained in their place. Attention is causal: a token sees half of its sample on average.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1; Chowdhery et al., "PaLM", 2022,
    appendix B.
    """
    shape = SHAPES[settings.shape]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * heads + 2 * keys) + 3 * hidden * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden
    passes = 2 if settings.lora_rank else 3
    attention = 3 * 2 * 2 * shape["num_hidden_layers"] * heads * (settings.row_tokens / 2)
    return passes * 2 * weights + attention


def beside_trl(device: str, _directory: Path) -> Figures:
    """Trains the same batches by our step and by TRL's, in turns; returns both rates and how far the losses are apart."""
    if device == "cuda":
        settings = Settings("0.6b", device, groups=8, prompt=256, completion=256, steps=STEPS, row_tokens=16_384)
    else:
        settings = Settings("small", device, groups=1, prompt=12, completion=20, steps=1, row_tokens=256)
    ours, trl = measure(settings)
    batches = [random_batch(settings, step) for step in range(1, settings.steps + 1)]
    tokens = statistics.fmean(len(batch.token_ids_T) for batch in batches)
    figures: Figures = {
        "tokens/s": round(tokens / ours.seconds),
        "TRL's": round(tokens / trl.seconds),
        "ours over TRL": round(trl.seconds / ours.seconds, 2),
        "losses apart": f"{max(abs(a - b) for a, b in zip(ours.losses, trl.losses, strict=True)):.1e}",
    }
    if device == "cuda":
        figures |= {"peak GB": round(ours.peak / 1e9, 2), "TRL's peak GB": round(trl.peak / 1e9, 2)}
    return figures


def clients_at_once(device: str, directory: Path) -> Figures:
    """Returns how many times the experiments of one after the other are done by clients at once, and how long each takes.

    They are the columns of the table of "C-LoRA" (31 May 2026: 2.81 times with 8, and 1.88 times as long with 4, of Qwen3-4B).
    """
    found: Figures = {}

    def show(count: int, seconds: float, experiments: float, each: float, whole: float) -> None:
        found.update({f"experiments_{count}": round(experiments, 2), f"time_of_each_{count}": round(each, 2)})

    is_small = device != "cuda"
    settings = driven_clients.settings_of("small" if is_small else "0.6b", device, 1 if is_small else STEPS)
    driven_clients.run(directory, [2] if is_small else [1, 2, 4, 8], settings, show)
    return found
