"""Tiny random models of the real architectures, on disk as any model is, and batches that fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import RunDirectory
from counterpoint.trainer.runs.registry import RunRegistry
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.work.order import Order
from counterpoint.trainer.work.sessions import Sessions
from counterpoint.trainer.work.sources import Item
from counterpoint.transport.records import Batch, SampleInfo
from tests.trainer.orchestrator_end import preload

VOCABULARY = 96
LAYERS = 2
EXPERTS = 8
TOP_K = 2

torch.set_num_threads(1)  # two threads on a busy machine wait for each other longer than they work

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session", autouse=True)
def _preloaded_trainers() -> None:
    """Trainers start in a moment, whichever tests ran before."""
    preload()


@pytest.fixture(scope="session")
def moe_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE: 8 experts, top 2, 2 layers."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        **_SHAPE, moe_intermediate_size=24, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True
    )
    directory = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def dense_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random dense Qwen3."""
    torch.manual_seed(2)
    directory = tmp_path_factory.mktemp("dense")
    Qwen3ForCausalLM(Qwen3Config(**_SHAPE)).save_pretrained(directory)
    return directory


WINDOW = 16


@pytest.fixture(scope="session")
def windowed_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mistral whose attention reaches back 16 tokens: a longer sample cannot be trained."""
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("windowed")
    MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=WINDOW)).save_pretrained(directory)
    return directory


def make_batch(
    step: int = 1, lengths: tuple[int, ...] = (9, 17, 5, 12), run_id: str = "default", routed: bool = False
) -> Batch:
    """A random batch: the first third of each sample is prompt, environments alternate, each sample has a temperature of its own,
    routing (if any) comes in two chunks."""
    random = np.random.default_rng(step)
    tokens = sum(lengths)
    masks = [np.arange(length) >= max(1, length // 3) for length in lengths]
    mask = np.concatenate([np.zeros(0, np.bool_), *masks]).astype(np.uint8)
    routing = tuple(
        tuple(
            np.stack(
                [random.permutation(EXPERTS)[:TOP_K] for _ in range(rows * LAYERS)]
            ).reshape(rows, LAYERS, TOP_K).astype(np.uint8)
            for rows in (2, length - 3)
        )
        for length in lengths
        if routed
    )  # fmt: skip
    return Batch(
        run_id=run_id,
        step=step,
        samples=tuple(
            SampleInfo(
                f"{step}-{index}", ("reverse", "guess")[index % 2], step - 1, float(index % 2), 0.6 + 0.2 * index
            )
            for index in range(len(lengths))
        ),
        columns={
            "token_ids_T": random.integers(0, VOCABULARY, tokens, dtype=np.int32),
            "loss_mask_T": mask,
            "log_probabilities_T": np.where(mask, -4.5 + 0.3 * random.standard_normal(tokens), 0).astype(np.float32),
            "advantages_T": np.where(mask, random.standard_normal(tokens), 0).astype(np.float32),
            "sample_offsets": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        },
        routed_experts=routing,
    )


def make_run_config(output_dir: Path, model: Path, steps: int = 4, **training: Any) -> RunConfig:
    """A run's configuration; `training` are keys of `[training]`."""
    return RunConfig.model_validate(
        {
            "output_dir": output_dir,
            "model": str(model),
            "steps": steps,
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
            "sampling": {"temperature": 0.9},
            "training": {"learning_rate": 1e-3, "checkpoint_interval": 2, **training},
        }
    )


def occupy_slot(registry: RunRegistry, config: RunConfig, step: int = 0) -> Run:
    """Admits a run to a slot of a registry, with a directory and after `step`."""
    config.run_dir.mkdir(exist_ok=True)
    found = RunDirectory(config.run_id, config.run_dir.stat().st_ino, config=(0, 0, 0), evicted=False)
    others = {record.run_id: record.found for record in registry if record.found is not None}
    registry.take_scan({**others, config.run_id: found}, {})
    registry.accept(found, config)
    ((slot, run_id),) = registry.plan().admitted.items()
    assert run_id == config.run_id
    run = registry.occupy(slot, run_id)
    run.progress.step = run.durable_step = step
    return run


def new_order(done: int = 0) -> Order[Item]:
    """Of a run with an orchestrator."""
    return Order(done, 0.0, committed=0)


def take_batch(sessions: Sessions, run: Run, order: Order[Item]) -> Batch | None:
    """Takes the run's next batch, if it is there and committed, as `trainer.loop` does."""
    due = order.next(0.0) if order.has_next else None
    if due is None or due.item is None:
        return None
    assert due.counts
    assert due.item.batch is not None
    sessions.taken(run, order.newest, due.item.batch)
    return due.item.batch


def end_step(run: Run, order: Order[Item]) -> None:
    """Ends the step of a batch that was taken."""
    order.end(0.0)
    run.progress.step, run.progress.batch = order.done, run.wire.batch
