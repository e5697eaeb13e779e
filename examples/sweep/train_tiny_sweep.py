"""A 3 x 3 grid of learning rate and weight decay over a tiny Llama, as a pool of jobs that race for the trials (docs/sweep.md).

    COUNTERPOINT_REGION_ROOT=outputs/{region} COUNTERPOINT_REGION=us-central2 python examples/sweep/train_tiny_sweep.py

The locks are pinned to one region; data and checkpoints are in that of the worker. Given again, it trains what is left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from counterpoint.cluster import Entrypoint, JobRequest, ResourceConfig, create_environment, current_client
from counterpoint.sweep import (
    InputName,
    OutputName,
    SweepTarget,
    claim_and_run,
    extras_for_resources,
    region_root,
    resolve_training_env,
    run_training_on_worker,
    sweep_root,
)

NUM_WORKERS = 3
SWEEP_NAME = "train-tiny-sweep"
SWEEP_REGION = "us-central2"
RESOURCES = ResourceConfig(cpu=1)
MODEL = "models/tiny-llama"
DATA = "data/reversals.jsonl"


@dataclass(frozen=True)
class Trial:
    """One point of the grid: its name, and what `counterpoint sft` is given, with names in place of paths."""

    name: str
    raw_config: dict[str, Any]


def trial(learning_rate: float, weight_decay: float) -> Trial:
    """Returns the trial of these two values."""
    raw_config = {
        "output_dir": OutputName(),
        "model": InputName(MODEL),
        "data": {"path": InputName(DATA)},
        "samples_per_step": 4,
        "training": {"learning_rate": learning_rate, "weight_decay": weight_decay},
        "trainer": {"device": "cpu", "dtype": "float32", "max_tokens": 256},
    }
    return Trial(f"tiny-lr={learning_rate:g}-wd={weight_decay:g}", raw_config)


trials = [trial(*point) for point in itertools.product([3e-4, 1e-3, 3e-3], [0.0, 0.1, 0.2])]
targets = [SweepTarget(target_id=t.name, config=t) for t in trials]


def _run_one(target: SweepTarget[Trial]) -> None:
    """Resolves the trial's configuration under this worker's region, and trains inline."""
    trial = target.config
    run_training_on_worker(
        name=trial.name,
        raw_config=trial.raw_config,
        override_output_path=None,
        resources=RESOURCES,
    )


def _sweep_worker_entrypoint(sweep_root: str) -> None:
    claim_and_run(sweep_root, targets, _run_one)


def make_inputs(root: Path) -> None:
    """Writes an untrained Llama of a hundred thousand parameters and some conversations below the root of a region."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from counterpoint.models import END_OF_TURN, write_tokenizer

    if (root / DATA).exists():
        return
    (root / MODEL).mkdir(parents=True)
    tokenizer = write_tokenizer(root / MODEL, 256)
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.token_to_id(END_OF_TURN),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(shape).save_pretrained(root / MODEL)
    (root / DATA).parent.mkdir(parents=True)
    words = ["stone", "river", "cloud", "light", "paper", "green", "house", "apple"]
    rows = [
        {"messages": [{"role": "user", "content": f"Reverse: {each}"}, {"role": "assistant", "content": each[::-1]}]}
        for each in words
    ]
    (root / DATA).write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def main() -> None:
    """Submits the workers, and waits for all of them."""
    make_inputs(Path(region_root()))
    SWEEP_ROOT = sweep_root(SWEEP_REGION, SWEEP_NAME)
    client = current_client()
    env = resolve_training_env(base_env=None, resources=RESOURCES)
    handles = []
    for i in range(NUM_WORKERS):
        handle = client.submit(
            JobRequest(
                name=f"{SWEEP_NAME}-{i}",
                entrypoint=Entrypoint.from_callable(_sweep_worker_entrypoint, args=[SWEEP_ROOT]),
                resources=RESOURCES,
                environment=create_environment(env_vars=env, extras=extras_for_resources(RESOURCES)),
            )
        )
        handles.append(handle)
    for h in handles:
        h.wait(raise_on_failure=True)


if __name__ == "__main__":
    main()
