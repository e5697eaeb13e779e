"""The rows of vLLM alone: seconds until it serves, and tokens a second, compiled and eager."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.evaluation.server import free_port
from perf.commands import Command, until
from perf.gpu.models import write
from perf.gpu.rows import SERVED
from perf.gpu.steps import Figures

SAMPLE_SECONDS = SERVED - 60.0
"""Longest wait for the samples."""


def generation(device: str, directory: Path, *, eager: bool) -> Figures:
    """Starts vLLM with Qwen3-0.6B's layers, and samples as many sequences at once as a step has; twice, the first warms up."""
    on_gpu = device == "cuda"
    sequences, tokens = (256, 512) if on_gpu else (4, 16)
    settings: dict[str, Any] = {
        "model": str(write(directory / "model", device)),
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": 1024 if on_gpu else 256,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": 16_384 if on_gpu else 1024,
        "extra_args": ["--enforce-eager"] if eager and on_gpu else [],
    }
    began = time.monotonic()
    with server(settings, directory) as url:
        start = time.monotonic() - began
        _sample(url, settings["model"], sequences, tokens)
        began = time.monotonic()
        sampled = _sample(url, settings["model"], sequences, tokens)
        seconds = time.monotonic() - began
    return {"start s": round(start, 1), "sequences": sequences, "tokens/s": round(sampled / seconds)}


def _sample(url: str, model: str, sequences: int, tokens: int) -> int:
    """Samples completions of prompts that share nothing; returns how many tokens were sampled."""
    body = {
        "model": model,
        "prompt": [[3 + index % 50, 3 + index // 50, *range(3, 30)] for index in range(sequences)],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SAMPLE_SECONDS) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


@contextmanager
def server(settings: dict[str, Any], directory: Path) -> Iterator[str]:
    """Starts a server as `counterpoint inference` does; yields its URL once it serves. Raises `PerfError` if it does not."""
    port = free_port("127.0.0.1", 0)
    url, file = f"http://127.0.0.1:{port}", directory / "inference.toml"
    file.write_text(tomli_w.dumps(settings | {"port": port}))
    with Command(directory / "inference.log", "inference", str(file)) as process:
        until("the server", lambda: _answers(url), [process])
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
