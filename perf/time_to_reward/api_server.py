"""Measures what a model call costs vLLM's API server with our plugin: CPU seconds of its process, beside those of the engine.

The built-in dense model answers updates of 64 calls at once, 8 of each prompt, as the demo's rollouts make them. A call gives
up to 32 tokens and ends where the model ends it.

    python -m perf.time_to_reward.api_server [UPDATES]

Its first line names the process, for a profiler such as py-spy.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from inference.base import SamplingParameters
from inference.config import PoolConfig
from inference.pool.pool import InferencePool
from models.make_model import resolve_model
from perf.gpu.servers import server

PROMPTS, GROUP_SIZE = 8, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 32, 32
WARM_UP = 3
"""Updates before the measurement."""

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def processes(port: int) -> dict[str, int]:
    """Returns the API server that listens at a port, and its engine, by name."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        if str(port).encode() in words and b"inference.plugin.program" in words:
            found["API server"] = int(directory.name)
        elif words[0].startswith(b"VLLM::EngineCore"):
            found.setdefault(f"engine of {parent}", int(directory.name))
    server = found["API server"]
    return {"API server": server, "engine": found.get(f"engine of {server}", server)}


async def update(pool: InferencePool, number: int) -> int:
    """Makes the calls of one update at once; returns how many tokens came back."""
    sampling = SamplingParameters(temperature=1.0, max_tokens=COMPLETION_TOKENS, stop_token_ids=[2])
    prompts = [np.arange(3 + index, 3 + index + PROMPT_TOKENS, dtype=np.int32) for index in range(PROMPTS)]
    turns = await asyncio.gather(
        *(
            pool.generate(prompt, sampling, affinity=f"{number}.{group}-{index}")
            for group, prompt in enumerate(prompts)
            for index in range(GROUP_SIZE)
        )
    )
    return sum(len(turn.completion_ids) for turn in turns)


async def measure(url: str, model: str, updates: int) -> None:
    """Prints the CPU seconds of an update and of a call."""
    found = processes(int(url.rpartition(":")[2]))
    print(f"API server: process {found['API server']}", flush=True)
    pool = InferencePool(PoolConfig(urls=[url], max_concurrent_requests_per_server=PROMPTS * GROUP_SIZE), model)
    await pool.start()
    try:
        for number in range(WARM_UP):
            await update(pool, number)
        before, began = {name: cpu_seconds(pid) for name, pid in found.items()}, time.perf_counter()
        tokens = sum([await update(pool, WARM_UP + number) for number in range(updates)])
        seconds = time.perf_counter() - began
    finally:
        await pool.close()
    calls = updates * PROMPTS * GROUP_SIZE
    print(
        f"{updates} updates of {PROMPTS * GROUP_SIZE} calls, {tokens / calls:.1f} tokens each, {seconds / updates:.3f} s"
    )
    for name, pid in found.items():
        used = cpu_seconds(pid) - before[name]
        print(f"{name}: {used / updates:.4f} CPU s an update, {1e3 * used / calls:.3f} ms a call")
    print(f"load {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Starts the server, and measures."""
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as directory:
        model = str(resolve_model("tiny-dense"))
        settings = {
            "model": model,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": PROMPTS * GROUP_SIZE,
        }
        with server(settings, Path(directory)) as url:
            uvloop.run(measure(url, model, updates))


if __name__ == "__main__":
    main()
