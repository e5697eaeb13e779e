"""The rows that say where a step of the trainer spends its time: in matrix products, in attention, in copies, or in the rest.

Times are those of the GPU's kernels; on a CPU, those of torch's operations without what they call. The rest are what a compiler
makes fewer: operations that read and write each activation, and those of the output layer each logit.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import DeviceType, ProfilerActivity

from perf.gpu.steps import Figures
from perf.step_speed import Settings, our_trainer, random_batch, write_model

KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": (
        "gemm",
        "gemv",
        "cutlass",
        "cublas",
        "nvjet",
        "xmma",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "_grouped_mm",
    ),
    "copies": ("memcpy", "memset", "aten::copy_"),
}
"""Parts of the names of kernels and operations by what they do; the first that fits counts. All others are the rest."""

WARMING_STEPS = 2


def profile(settings: Settings, directory: Path) -> Figures:
    """Trains a step; returns its seconds, the share of each kind, the kernels (on a CPU: operations), and waits of the host."""
    train = our_trainer(write_model(directory / "model", settings), directory, settings)
    on_gpu = settings.device == "cuda"
    for step in range(WARMING_STEPS):
        train(random_batch(settings, step))
    began = time.perf_counter()
    train(random_batch(settings, WARMING_STEPS))
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiled:
        train(random_batch(settings, WARMING_STEPS + 1))
        if on_gpu:
            torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    launched = 0
    waits = 0
    for event in profiled.key_averages():
        waits += event.count if event.key == "cudaStreamSynchronize" else 0
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU) and (on_gpu or "::" in event.key):
            spent[kind_of(event.key)] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
            launched += event.count
    total = max(sum(spent.values()), 1)
    figures: Figures = {"step s": round(seconds, 3), "kernels": launched}
    figures |= {f"{kind} %": round(100 * spent[kind] / total, 1) for kind in (*KINDS, "rest")}
    if on_gpu:
        figures |= {"GPU busy %": round(100 * total / 1e6 / seconds, 1), "waits of the host": waits}
    return figures


def kind_of(name: str) -> str:
    """Returns the kind of a kernel or operation of that name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "rest")
