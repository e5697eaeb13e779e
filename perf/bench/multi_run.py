"""Measures training four runs at once against one with the same load, and a run's memory; then many (`perf/many_runs.py`).

    python -m perf.bench.multi_run [--quick | --full]

The trainer's own manager, learner and fair share, with a dense model of 80 MB, adapters on all its linear layers and batches of
random tokens. Rounds alternate between one run that trains everything and four that train a quarter each, so that other
processes slow both. Tokens a second are of whole steps, the optimizer's included; nothing is written meanwhile.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w
import torch
from transformers.utils import logging as transformers_logging

from counterpoint.trainer.learner import Learner
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.transport.process.resident import resident_bytes
from perf import many_runs
from perf.bench import many_names
from perf.bench.command import Size, show
from perf.figures import Case, Figure
from perf.step_speed import Settings, configurations, random_batch, train_steps, write_model

RUNS = 4
ROUNDS = 4
MAX_TOKENS = 2048
"""The tokens of a row."""
SAMPLES, SAMPLE_TOKENS = 64, 128
"""The samples of a round, all its runs together, and the tokens of each. Half of the tokens are trained."""
SETTINGS = Settings(
    "80mb", "cpu", groups=1, group_size=SAMPLES, prompt=SAMPLE_TOKENS // 2, completion=SAMPLE_TOKENS // 2,
    shortest=SAMPLE_TOKENS // 2, steps=1_000_000, row_tokens=MAX_TOKENS, lora_rank=16,
)  # fmt: skip
MANY_BOUNDS = {16: 1.3, 64: 1.3, 256: 1.3, 1024: 2.0}
"""The time of a step of so many runs, at most, over that of one run with the same tokens."""

_CPU = torch.device("cpu")


def measure(size: Size) -> list[Case]:
    """Measures the cases of speed and of memory, and those of many tiny runs and of their names at servers."""
    rounds = size.pick(2, 3, ROUNDS)
    samples = SAMPLES // size.pick(4, 2, 1)  # of fewer, the optimizers alone would be measured
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        trainer = _Trainer(Path(directory), SETTINGS, RUNS)
        trainer.admit(1)
        for _ in range(2):  # the first rounds fill caches and pools
            trainer.round(1, samples)
        before = _Memory.now()
        trainer.admit(RUNS)
        rates: dict[int, list[float]] = {1: [], RUNS: []}
        trainer.round(RUNS, samples)
        for _ in range(rounds):
            for count, measured in rates.items():
                measured.append(trainer.round(count, samples))
        cases = [_speed(rates[1], rates[RUNS]), _memory(trainer, before, _Memory.now())]
    many = size.pick([(16, 2)], [(16, 3), (64, 2)], [(16, 4), (256, 2), (1024, 1)])
    return [*cases, *(_many(*counts) for counts in many), *many_names.measure(size)]


def _many(count: int, rounds: int) -> Case:
    """Returns the case of `count` tiny runs in the trainer's loop, of so many rounds."""
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        found = many_runs.beside_one(many_runs.SETTINGS, count, rounds, Path(directory))
    steps, newest, saved = found.steps, found.steps[-1][1], found.checkpoints
    over_one = tuple(many.cpu / one.cpu for one, many in steps)
    published = tuple(many.published.cpu / many.cpu for _, many in steps)
    waited = tuple(many.published.wall / many.wall for _, many in steps)
    return Case(
        f"{count} tiny runs, {many_runs.TOKENS} tokens each",
        [
            Figure("CPU of a step", statistics.median(many.cpu for _, many in steps), "s"),
            Figure(
                f"that of {count} runs over one of as many tokens", statistics.median(over_one), "x", MANY_BOUNDS[count],
                rounds=over_one,
            ),
            Figure(
                "CPU of the publications of a step over it", statistics.median(published), "x", 1.0, rounds=published
            ),
            Figure("time of the same", statistics.median(waited), "x", 1.0, rounds=waited),
            Figure("CPU of the checkpoints of all over a step", saved.cpu / newest.cpu, "x"),
            Figure("time of the same", saved.wall / newest.wall, "x"),
            Figure("adapter and optimizer of a run", found.state_bytes / 1e6, "MB"),
            Figure("tensors of a further run over these", found.further / found.state_bytes, "x", 1.01, timed=False),
        ],
    )  # fmt: skip


def _speed(one: Sequence[float], several: Sequence[float]) -> Case:
    return Case(
        "training many runs",
        [
            Figure("one run", statistics.median(one), "tokens/s"),
            Figure(f"{RUNS} runs that share its load", statistics.median(several), "tokens/s"),
            Figure(
                f"{RUNS} runs over one",
                # Of neighbours in time, since a machine is faster at one time than at another.
                statistics.median(theirs / its for its, theirs in zip(one, several, strict=True)),
                "x", 0.9, "at least", slack=1.3,
            ),
        ],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Memory:
    """The bytes in use."""

    tensors: int
    resident: int

    @classmethod
    def now(cls) -> _Memory:
        """Reads the bytes in use, after the C library has returned freed memory: a row leaves its activations there.

        The masks of the newest four rows, which attention keeps, are no run's.
        """
        tensors = many_runs.tensor_bytes()
        ctypes.CDLL(None).malloc_trim(0)
        return cls(tensors, resident_bytes())


def _memory(trainer: _Trainer, before: _Memory, after: _Memory) -> Case:
    """Returns the case of memory: the bytes that all runs but the first added."""
    base = sum(parameter.nbytes for parameter in trainer.learner.loaded.model.parameters())
    states = [
        sum(tensor.nbytes for tensor in run.torch.optimizer.state().values()) for run in trainer.learner.runs.values()
    ]
    further = sum(states[1:])
    return Case(
        "memory of many runs",
        [
            Figure("base model", base / 1e6, "MB"),
            Figure("adapter and optimizer of one run", states[0] / 1e6, "MB"),
            Figure(
                "tensors of a further run over these",
                (after.tensors - before.tensors) / further,
                "x", 1.01, slack=1.0, timed=False,
            ),
            Figure("all runs in one trainer", (base + sum(states)) / 1e6, "MB"),
            Figure(
                "a trainer for each run over that",
                (base * len(states) + sum(states)) / (base + sum(states)),
                "x", timed=False,
            ),
            Figure("growth of resident size", (after.resident - before.resident) / 1e6, "MB"),
            Figure(
                "what that is beyond adapters and optimizers, over the base",
                (after.resident - before.resident - further) / base,
                "x", 0.1, timed=False,
            ),
        ],
    )  # fmt: skip


class _Trainer:
    """The trainer's parts between the wire and the disk, on one rank."""

    def __init__(self, directory: Path, settings: Settings, max_runs: int) -> None:
        transformers_logging.disable_progress_bar()
        self._settings, self._directory = settings, directory
        self._run, config = configurations(write_model(directory / "model", settings), directory, settings)
        self._manager = MultiRunManager(directory, max_runs)
        self.learner = Learner(config.model_copy(update={"max_runs": max_runs}), Ranks(0, 1, _CPU, None), self._manager)

    def admit(self, runs: int) -> None:
        """Admits runs until there are so many."""
        for index in range(runs):
            control = run_directory(self._directory, f"run-{index}") / "control"
            if not control.is_dir():
                control.mkdir(parents=True)
                run = self._run.model_copy(update={"run_id": f"run-{index}"})
                (control / "orch.toml").write_text(tomli_w.dumps(run.model_dump(mode="json", exclude_none=True)))
        self._manager.discover_runs()
        self.learner.synchronize()
        assert sorted(self.learner.runs) == list(range(runs)), self._manager.registry.refused

    def round(self, runs: int, samples: int) -> float:
        """Trains a step of each of the first `runs` runs on equal parts of `samples`; returns tokens a second."""
        own = samples // runs
        settings = self._settings
        settings = replace(settings, group_size=own)
        batches = {}
        for index in range(runs):
            run = self.learner.runs[index]
            batches[index] = random_batch(settings, run.progress.step, run.run_id)
        started = time.perf_counter()
        train_steps(self.learner, batches)
        return samples * (settings.prompt + settings.completion) / (time.perf_counter() - started)


if __name__ == "__main__":
    show(measure)
