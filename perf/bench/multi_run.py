"""Measures training many runs at once: four beside each other against one with the same load, and the memory of each further run.

    python -m perf.bench.multi_run [--quick | --full]

The trainer's own manager, learner and fair share, with a dense model of 80 MB, adapters on all its linear layers and batches of
random tokens. Rounds alternate between one run that trains everything and four that train a quarter each, so that other
processes slow both. Tokens a second are of whole steps, the optimizer's included; nothing is written meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.transport.process.resident import resident_bytes
from counterpoint.transport.records import Batch, SampleInfo
from perf.bench.command import Size, show
from perf.figures import Case, Figure

RUNS = 4
ROUNDS = 8
MAX_TOKENS = 2048
"""The tokens of a row."""
SAMPLES, SAMPLE_TOKENS = 64, 128
"""The samples of a round, all its runs together, and the tokens of each. Half of the tokens are trained."""
RANK = 16

_SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": SAMPLE_TOKENS,
}
_CPU = torch.device("cpu")


def measure(size: Size) -> list[Case]:
    """Measures the cases of speed and of memory."""
    rounds = size.pick(2, 3, ROUNDS)
    samples = SAMPLES // size.pick(16, 2, 1)
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        trainer = _Trainer(Path(directory))
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
        return [_speed(rates[1], rates[RUNS]), _memory(trainer, before, _Memory.now())]


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
        """Reads the bytes in use, after the C library has returned freed memory: a row leaves its activations there."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        storages = {
            storage.data_ptr(): storage.nbytes()
            for each in gc.get_objects()
            if issubclass(type(each), Tensor)
            for storage in [each.untyped_storage()]
        }
        return cls(sum(storages.values()), resident_bytes())


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

    def __init__(self, directory: Path) -> None:
        transformers_logging.disable_progress_bar()
        torch.manual_seed(0)
        model = directory / "model"
        Qwen3ForCausalLM(Qwen3Config(**_SHAPE)).save_pretrained(model)
        config = TrainerConfig(
            output_dir=directory,
            model=str(model),
            device="cpu",
            threads=1,  # two wait for each other longer than they work when anything else runs
            max_runs=RUNS,
            max_tokens=MAX_TOKENS,
            router_replay=False,
        )
        self._manager = MultiRunManager(directory, RUNS)
        self.learner = Learner(config, Ranks(0, 1, _CPU, None), self._manager)
        self._directory = directory

    def admit(self, runs: int) -> None:
        """Admits runs until there are so many."""
        for index in range(runs):
            control = run_directory(self._directory, f"run-{index}") / "control"
            if not control.is_dir():
                control.mkdir(parents=True)
                (control / "orch.toml").write_text(tomli_w.dumps(self._run_config(f"run-{index}")))
        self._manager.discover_runs()
        self.learner.synchronize()
        assert sorted(self.learner.runs) == list(range(runs)), self._manager.registry.refused

    def _run_config(self, run_id: str) -> dict[str, object]:
        return {
            "run_id": run_id,
            "output_dir": str(self._directory),
            "model": self.learner.config.model,
            "steps": 1_000_000,
            "environments": [{"name": "none", "kind": "reverse-text"}],
            "training": {"lora": {"rank": RANK}},
        }

    def round(self, runs: int, samples: int) -> float:
        """Trains a step of each of the first `runs` runs on equal parts of `samples`; returns tokens a second."""
        batches = {
            index: _batch(self.learner.runs[index].run_id, self.learner.runs[index].progress.step + 1, samples // runs)
            for index in range(runs)
        }
        started = time.perf_counter()
        shares = FairShare(MAX_TOKENS, ranks=1)
        for index, batch in batches.items():
            step = self.learner.open_step(index, batch)
            shares.add(index, 1.0, dict.fromkeys(step.samples, SAMPLE_TOKENS))
        left = set(batches)
        while left:
            self.learner.train_rows(shares.rows())
            for index in [index for index in left if not shares.left(index)]:
                left.remove(index)
                self.learner.finish_step(index, self.learner.runs[index].scheduled())
        return samples * SAMPLE_TOKENS / (time.perf_counter() - started)


def _batch(run_id: str, step: int, samples: int) -> Batch:
    random = np.random.default_rng(step)
    tokens = samples * SAMPLE_TOKENS
    mask = np.tile(np.arange(SAMPLE_TOKENS) >= SAMPLE_TOKENS // 2, samples)
    return Batch(
        run_id=run_id,
        step=step,
        samples=tuple(SampleInfo(str(index), "none", step - 1, 0.0, 1.0) for index in range(samples)),
        columns={
            "token_ids_T": random.integers(0, _SHAPE["vocab_size"], tokens, dtype=np.int32),
            "loss_mask_T": mask.astype(np.uint8),
            "log_probabilities_T": np.where(mask, -np.log(_SHAPE["vocab_size"]), 0).astype(np.float32),
            "advantages_T": np.where(mask, random.standard_normal(tokens), 0).astype(np.float32),
            "sample_offsets": np.arange(0, tokens + 1, SAMPLE_TOKENS, dtype=np.int64),
        },
        routed_experts=(),
    )


if __name__ == "__main__":
    show(measure)
