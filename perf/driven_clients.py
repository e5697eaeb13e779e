"""Measures clients of driven runs at once, over the wire: 1, 2, 4 and 8 with the same task, beside one with as many tokens.

    python -m perf.driven_clients [--counts 1 2 4 8] [--steps 3] [--shape small|0.6b] [--device cpu|cuda]

Each client has an adapter of its own rank, and asks for two contributions and an update each step, as a loop of the Tinker SDK
does, in one process beside one trainer. The columns are the least of three rounds: seconds of all steps; how many times the
experiments of one after the other are done in the same time; how many times as long each takes; and the time over that of one
run with as many tokens. The second and third are those of the table of "C-LoRA" (31 May 2026: 2.81 times the experiments with 8
runs, 1.88 times the time with 4, Qwen3-4B on one node of H200).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.run.items import AdamW, Objective
from counterpoint.run.trained import LoraConfig, TrainedRun, TrainingConfig
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.wires.link import SharedConnection
from counterpoint.transport.wires.open import open_connection
from perf.commands import Command, PerfError
from perf.step_speed import SHAPES, Settings, random_batch, write_model

RANKS = (4, 8, 16, 32)
ROUNDS = 3
LIKELY = Objective({"kind": "sft"}, divisor=1.0, returns=True)
VALUES = AdamW(1e-4, eps=1e-12)

Show = Callable[[int, float, float, float, float], None]

_ids = itertools.count(1)


async def client(config: TrainerConfig, connection: SharedConnection, rank: int, settings: Settings) -> DrivenRun:
    """Returns a new run that the trainer takes, after its first step."""
    name = f"client-{next(_ids)}"
    described = TrainedRun(
        run_id=name, training=TrainingConfig(lora=LoraConfig(rank=rank), checkpoint_interval=1000), driven=True
    )
    journal = Journal(config.output_dir / "items" / name, name, 2**30)
    run = DrivenRun(described, config.output_dir, connection, journal)
    await run.start()
    await step(run, settings, 0)
    return run


async def step(run: DrivenRun, settings: Settings, number: int) -> None:
    """Two contributions and an update, all asked for before the first is awaited."""
    parts = [run.forward_backward(random_batch(settings, 2 * number + part), LIKELY) for part in (0, 1)]
    await asyncio.gather(*parts)
    await run.update(VALUES)


async def seconds(config: TrainerConfig, connection: SharedConnection, count: int, settings: Settings) -> float:
    """Returns the time that `count` clients take for all steps."""
    runs = [await client(config, connection, RANKS[index % len(RANKS)], settings) for index in range(count)]

    async def play(run: DrivenRun) -> None:
        for number in range(1, settings.steps + 1):
            await step(run, settings, number)

    began = time.perf_counter()
    await asyncio.gather(*map(play, runs))
    took = time.perf_counter() - began
    await asyncio.gather(*(run.close() for run in runs))
    return took


async def measure(config: TrainerConfig, counts: list[int], settings: Settings, show: Show) -> None:
    """Shows a row for each count: seconds of all steps, experiments, time of each, and that over one run of as many tokens."""
    connection = open_connection(config.transport, config.output_dir)
    for count in counts:
        larger, found = replace(settings, groups=settings.groups * count), []
        for _ in range(ROUNDS):  # in turns, so that other processes slow all
            cases = ((1, settings), (count, settings), (1, larger))
            found.append([await seconds(config, connection, *case) for case in cases])
        alone, joint, whole = (min(column) for column in zip(*found, strict=True))
        show(count, joint, count * alone / joint, joint / alone, joint / whole)


async def _measure_beside(trainer: Command, *asked: Any) -> None:
    """Measures as long as the trainer runs. Raises `PerfError` if it ends."""
    measuring = asyncio.create_task(measure(*asked))
    while not (await asyncio.wait([measuring], timeout=1.0))[0]:
        if trainer.ended:
            measuring.cancel()
            raise PerfError(f"the trainer ended with {trainer.code}{trainer.last_output()}")
    measuring.result()


def run(directory: Path, counts: list[int], settings: Settings, show: Show) -> None:
    """Measures in an empty directory. Raises `PerfError` if the trainer ends."""
    model = write_model(directory / "model", settings)
    config = TrainerConfig(
        output_dir=directory / "job", model=str(model), device=settings.device, max_tokens=settings.row_tokens,
        max_runs=ROUNDS * (2 * len(counts) + sum(counts)), stay=True,
    )  # fmt: skip
    config.output_dir.mkdir()
    file = directory / "trainer.toml"
    file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    with Command(directory / "trainer.log", "trainer", str(file)) as trainer:
        asyncio.run(_measure_beside(trainer, config, counts, settings, show))


def settings_of(shape: str, device: str, steps: int) -> Settings:
    """Returns the task of one client: 32 samples of 96 tokens a contribution."""
    return Settings(shape, device, 1, 32, 64, steps, 1024)


def _print(count: int, seconds: float, experiments: float, each: float, whole: float) -> None:
    print(f"{count:7}  {seconds:7.1f}  {experiments:10.2f}x  {each:11.2f}x  {whole:.2f}x", flush=True)


def main() -> None:
    """Reads the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    print("clients  seconds  experiments  time of each  over one run of as many tokens")
    with tempfile.TemporaryDirectory(prefix="counterpoint-clients-") as directory:
        run(Path(directory), given.counts, settings_of(given.shape, given.device, given.steps), _print)


if __name__ == "__main__":
    main()
