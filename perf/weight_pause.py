"""Measures how long a real vLLM pauses its requests for new full weights, from files and from shared memory.

    python -m perf.weight_pause [--rounds 5] [--layers 12]

A random model in bfloat16 is served on a CPU. Its next versions, AdamW steps at 1e-6, are loaded in turns by each way: whole and
as what changed, from a disk and from /dev/shm, while requests are in flight. Every load is proven by its digest. The pause is the
server's own figure; the rest of the seconds, from the order to the answer, requests go on.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy as np
import tomli_w
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from inference import delta
from inference.base import GenerateRequest, InferenceError, Probe, SamplingParameters, WeightUpdate
from inference.clients.client import BinaryClient
from inference.clients.http_sessions import HttpSessions
from inference.config import PoolConfig
from inference.plugin.checkpoint import BASE, DELTA
from inference.plugin.digest import Digest, digests_of
from perf.weight_delivery import one_step
from transport.files.atomic import STABLE
from transport.files.shared_memory import SHARED_MEMORY

REQUESTS = 4
"""In flight while weights are loaded."""

START_SECONDS = 300.0
PAUSED = re.compile(r"requests were paused for ([0-9.]+) s")
WEIGHTS = "model.safetensors"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="loads of each kind")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model, of 4 million parameters each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
        versions = Versions(Path(disk), Path(memory), arguments.layers)
        with server(versions.model, Path(disk)) as (url, log):
            console = Console(width=140)
            console.print(asyncio.run(measure(versions, url, log, arguments.rounds)))


class Versions:
    """The published directories: each version by each way. `model` is version 0, which the server begins with."""

    def __init__(self, disk: Path, memory: Path, layers: int) -> None:
        self.model = disk / "model"
        config = Qwen3Config(
            vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
        )  # fmt: skip
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(self.model)
        self.bytes = (self.model / WEIGHTS).stat().st_size
        self.digests: list[Digest] = []
        self.ways: dict[str, list[Path]] = {}
        tensors = load_file(self.model / WEIGHTS)
        bases = {"disk": self.model, "memory": memory / "base"}
        shutil.copytree(self.model, bases["memory"])
        for version in (1, 2):
            tensors = {name: one_step(tensor, 1e-6) for name, tensor in tensors.items()}
            self.digests.append(digests_of(tensors)["bfloat16"])
            for place, root in (("disk", disk), ("memory", memory)):
                whole, changed = (root / f"{kind}_{version}" for kind in ("whole", "changed"))
                for directory in (whole, changed):
                    directory.mkdir()
                    (directory / STABLE).touch()
                save_file(tensors, whole / WEIGHTS, {"format": "pt"})
                delta.link_base(bases[place], changed)
                new = ((name, delta.bits_of(each)) for name, each in tensors.items())
                assert delta.write_delta(changed / DELTA, delta.open_bits(changed / BASE / WEIGHTS), new, 1 << 40)
                self.ways.setdefault(f"whole, {place}", []).append(whole)
                self.ways.setdefault(f"what changed, {place}", []).append(changed)


@contextmanager
def server(model: Path, directory: Path) -> Iterator[tuple[str, Path]]:
    """Starts a real vLLM, as `counterpoint inference` starts it; yields its URL and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file, log = directory / "inference.toml", directory / "vllm.log"
    settings = {"model": str(model), "port": port, "dtype": "bfloat16", "max_model_len": 512, "log_file": str(log)}
    file.write_text(tomli_w.dumps(settings | {"extra_args": ["--skip-tokenizer-init"]}))
    process = subprocess.Popen([sys.executable, "-m", "cli.main", "inference", str(file)])
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()  # and vLLM with it; a no-op once it has ended


async def measure(versions: Versions, url: str, log: Path, rounds: int) -> Table:
    """Loads each version by each way, `rounds` times, and returns the table."""
    paused: dict[str, list[float]] = {way: [] for way in versions.ways}
    seconds: dict[str, list[float]] = {way: [] for way in versions.ways}
    async with HttpSessions(PoolConfig()) as connections:
        client = BinaryClient(url, connections)
        async with asyncio.timeout(START_SECONDS):
            while True:
                with suppress(InferenceError):
                    await client.identify()
                    break
                await asyncio.sleep(0.2)
        await load(client, versions, 0, next(iter(versions.ways)))  # the first also determines what can be proven
        async with requests_in_flight(client, str(versions.model)):
            for turn in range(rounds):
                for way in versions.ways:
                    began = time.perf_counter()
                    await load(client, versions, (turn + 1) % 2, way)
                    seconds[way].append(time.perf_counter() - began)
                    paused[way].append(last_pause(log))
    table = Table("way", "paused, s", "order to answer, s", title=f"{versions.bytes / 1e6:.0f} MB, medians (least)")
    for way in versions.ways:
        of_all = [f"{statistics.median(each):.3f} ({min(each):.3f})" for each in (paused[way], seconds[way])]
        table.add_row(way, *of_all)
    return table


def last_pause(log: Path) -> float:
    """Returns the seconds of the newest pause that the server has logged."""
    return float(PAUSED.findall(log.read_text())[-1])


async def load(client: BinaryClient, versions: Versions, version: int, way: str) -> None:
    """Loads weights. Raises `RuntimeError` unless the server then computes with them."""
    update = WeightUpdate(version, versions.ways[way][version], Probe(version, [1, 2], [-1.0]), None)
    held = await client.load(update)
    if held is None or any(versions.digests[version][layer] != value for layer, value in held.layers.items()):
        raise RuntimeError(f"{way}: the server does not compute with version {version}")


@asynccontextmanager
async def requests_in_flight(client: BinaryClient, model: str) -> AsyncIterator[None]:
    """Keeps requests at the server until the block ends."""
    sampling = SamplingParameters(temperature=1.0, max_tokens=200, stop_token_ids=())

    async def generate(seed: int) -> None:
        while True:
            await client.generate(GenerateRequest(model, np.arange(seed, seed + 30, dtype=np.int32), sampling, 0))

    tasks = [asyncio.create_task(generate(seed)) for seed in range(1, REQUESTS + 1)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
