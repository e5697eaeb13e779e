"""Measures a training step of ours beside TRL's `GRPOTrainer` on the same batch: seconds, tokens a second, and memory of a GPU.

    python -m perf.step_speed [--shape small|0.6b] [--device cpu|cuda] [--groups 8] [--prompt 256] [--completion 256]

Both train a random model of Qwen3's architecture in full with AdamW and DAPO's loss, in turns in one process, as many tokens at a
time. Both are given the batch as it is after generation, so only forward passes, loss, backward passes and the update are
measured. Their losses of each step are shown: equal ones say that both computed the same. Without `--shape` and `--device` it is
the shape 0.6b in bfloat16 on a GPU, and the small one in float32 with one thread where there is none.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.transport.records import Batch, SampleInfo

GROUP_SIZE = 8
TRAINING: dict[str, Any] = {"learning_rate": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.0, "max_grad_norm": 1.0}
CLIP_LOW, CLIP_HIGH = 0.2, 0.28

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "two-layers": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "80mb": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""The shapes of Qwen3-0.6B and Qwen3-4B, and small ones for a CPU."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained."""

    shape: str
    device: str
    groups: int
    prompt: int
    """Tokens of a prompt, which the rollouts of a group share."""
    completion: int
    """Tokens of the longest completion."""
    steps: int
    row_tokens: int
    """Tokens that are computed at once: of a row of ours, and of a padded micro-batch of TRL's."""
    group_size: int = GROUP_SIZE
    shortest: int | None = None
    """Tokens of the shortest completion; None: a quarter of the longest."""
    lora_rank: int = 0
    """The rank of the adapter that our side trains; 0 trains all weights."""
    checkpointing: bool | int = False
    """Ours computes each layer, or so many, again in the backward pass."""
    compiled: bool | None = None
    """Whether ours compiles the layers; None: as a trainer does by itself."""
    deterministic: bool = False
    """Whether ours adds in a fixed order."""

    @property
    def dtype(self) -> str:
        """Precision of weights and activations."""
        return "bfloat16" if self.device == "cuda" else "float32"


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of one side after the first, which warms up."""

    seconds: float
    """Median of a step."""
    peak: int
    """Bytes of the GPU beyond what lives between two steps; 0 on a CPU."""
    losses: Sequence[float]
    """The losses of all steps."""


Train = Callable[[Batch], float]
"""Trains a step; returns its loss."""


def measure(settings: Settings) -> tuple[Measured, Measured]:
    """Trains the same batches by both sides, in turns: ours, TRL's."""
    with tempfile.TemporaryDirectory(prefix="step_speed_") as directory:
        model = write_model(Path(directory) / "model", settings)
        sides = (our_trainer(model, Path(directory), settings), _trl(model, Path(directory), settings))
        seconds: tuple[list[float], list[float]] = ([], [])
        peaks: tuple[list[int], list[int]] = ([], [])
        losses: tuple[list[float], list[float]] = ([], [])
        for step in range(settings.steps + 1):
            batch = random_batch(settings, step)
            for side in (0, 1) if step % 2 else (1, 0):
                before = _before(settings.device)
                began = time.perf_counter()
                losses[side].append(sides[side](batch))
                if settings.device == "cuda":
                    torch.cuda.synchronize()
                if step:
                    seconds[side].append(time.perf_counter() - began)
                    peaks[side].append(_peak(settings.device) - before)
    ours, trl = (Measured(statistics.median(seconds[i]), max(peaks[i]), losses[i]) for i in (0, 1))
    return ours, trl


def _before(device: str) -> int:
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def write_model(directory: Path, settings: Settings) -> Path:
    """Writes a model of random weights with a tokenizer, and returns its directory."""
    torch.manual_seed(0)
    longest = settings.prompt + settings.completion
    config = Qwen3Config(**SHAPES[settings.shape], tie_word_embeddings=True, max_position_embeddings=longest)
    with torch.device(settings.device):  # a GPU draws billions of weights in a moment
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    model.save_pretrained(directory)
    write_tokenizer(directory, longest)
    return directory


def random_batch(settings: Settings, step: int, run_id: str = "default") -> Batch:
    """Returns rollouts of random tokens, as if a uniform policy had drawn them."""
    random = np.random.default_rng(step)
    vocabulary = SHAPES[settings.shape]["vocab_size"]
    count = settings.groups * settings.group_size
    shortest = max(1, settings.completion // 4) if settings.shortest is None else settings.shortest
    lengths = random.integers(shortest, settings.completion, count, endpoint=True)
    lengths[0] = settings.completion
    prompts = random.integers(0, vocabulary, (settings.groups, settings.prompt), dtype=np.int32)
    tokens, masks = [], []
    for index, length in enumerate(lengths):
        tokens += [prompts[index // settings.group_size], random.integers(0, vocabulary, length, dtype=np.int32)]
        masks += [np.zeros(settings.prompt, np.uint8), np.ones(length, np.uint8)]
    token_ids_T, mask_T = np.concatenate(tokens), np.concatenate(masks)
    advantages = np.repeat(random.standard_normal(count), settings.prompt + lengths)
    return Batch(
        run_id=run_id,
        step=step + 1,
        samples=tuple(SampleInfo(str(index), "random", step, 0.0, 1.0) for index in range(count)),
        columns={
            "token_ids_T": token_ids_T,
            "loss_mask_T": mask_T,
            "log_probabilities_T": np.where(mask_T, -np.log(vocabulary), 0.0).astype(np.float32),
            "advantages_T": np.where(mask_T, advantages, 0.0).astype(np.float32),
            "sample_offsets": np.concatenate(([0], np.cumsum(settings.prompt + lengths))).astype(np.int64),
        },
    )


def our_trainer(model: Path, directory: Path, settings: Settings) -> Train:
    """Returns what trains a step by our learner, of a run in `directory`."""
    learner = our_learner(model, directory, settings)

    def train(batch: Batch) -> float:
        loss = train_steps(learner, {0: batch})[0]["loss"]
        assert isinstance(loss, float)
        return loss

    return train


def our_learner(model: Path, directory: Path, settings: Settings) -> Learner:
    """Returns our learner with a run in its slot 0, whose directory is in `directory`."""
    run, config = configurations(model, directory, settings)
    control = run_directory(directory, run.run_id) / "control"
    control.mkdir(parents=True)
    (control / "orch.toml").write_text(tomli_w.dumps(run.model_dump(mode="json", exclude_none=True)))
    manager = MultiRunManager(directory, config.max_runs)
    learner = Learner(config, Ranks(0, 1, torch.device(settings.device), None), manager)
    manager.discover_runs()
    learner.synchronize()
    return learner


def train_steps(learner: Learner, batches: Mapping[int, Batch]) -> dict[int, dict[str, MetricValue]]:
    """Trains a step of the run in each of these slots, in shared rows on one rank; returns their metrics by slot."""
    shares, metrics = FairShare(learner.config.max_tokens, ranks=1), dict[int, dict[str, MetricValue]]()

    def begin(slot: int, step: Contribution) -> None:
        shares.add(slot, 1.0, {sample: step.length(sample) for sample in step.samples})

    for slot, batch in batches.items():
        begin(slot, learner.open_step(slot, batch))
    while left := [slot for slot in batches if slot not in metrics]:
        learner.train_rows(shares.rows())
        for slot in (slot for slot in left if not shares.left(slot)):
            scheduled = learner.runs[slot].scheduled()
            if (further := learner.next_pass(slot, scheduled)) is not None:
                begin(slot, further)
            else:
                metrics[slot] = learner.finish_step(slot, scheduled)
    return metrics


def configurations(model: Path, directory: Path, settings: Settings) -> tuple[RunConfig, TrainerConfig]:
    """Returns the configurations of our side: of its run, and of its trainer."""
    lora = {"lora": {"rank": settings.lora_rank}} if settings.lora_rank else {}
    loss = {"loss": {"kind": "dapo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}}
    run = RunConfig.model_validate(
        {
            "output_dir": directory,
            "model": str(model),
            "steps": settings.steps + 1,
            "environments": [{"name": "random", "kind": "reverse-text"}],
            "training": TRAINING | loss | lora,
            "sampling": {"max_tokens": settings.completion},
        }
    )
    config = TrainerConfig(
        output_dir=directory,
        model=str(model),
        device=settings.device,
        dtype=settings.dtype,
        max_tokens=settings.row_tokens,
        activation_checkpointing=settings.checkpointing,
        compile=settings.compiled,
        deterministic=settings.deterministic,
        threads=1,
        router_replay=False,
    )
    return run, config


def _trl(model: Path, directory: Path, settings: Settings) -> Train:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    warnings.simplefilter("ignore")
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=settings.completion,
        learning_rate=TRAINING["learning_rate"],
        weight_decay=TRAINING["weight_decay"],
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        use_cpu=settings.device == "cpu",
        bf16=settings.device == "cuda",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer: Any = GRPOTrainer(
        # Float32 weights under autocast, as TRL trains in bfloat16: ours has float32 masters.
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model, padding_side="left"),
    )
    trainer.model.train()
    trainer.create_optimizer()
    trained, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)

    def train(batch: Batch) -> float:
        pieces = list(_micro_batches(batch, settings))
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(pieces)
        loss = 0.0
        for inputs in pieces:
            part = trainer._compute_loss(trained, {name: each.to(settings.device) for name, each in inputs.items()})
            trainer.accelerator.backward(part)
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(trained.parameters(), TRAINING["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def _micro_batches(batch: Batch, settings: Settings) -> list[dict[str, Tensor]]:
    """Returns what TRL's generation would have prepared: completions of the whole batch padded to its longest, and split."""
    mask_T, tokens_T = torch.from_numpy(batch.loss_mask_T).long(), torch.from_numpy(batch.token_ids_T).long()
    advantages_T = torch.from_numpy(batch.advantages_T)
    offsets, prompt = batch.sample_offsets.tolist(), settings.prompt
    count, longest = len(batch.samples), settings.completion
    completions, mask = torch.zeros(count, longest, dtype=torch.int64), torch.zeros(count, longest, dtype=torch.int64)
    for index in range(count):
        own = slice(offsets[index] + prompt, offsets[index + 1])
        completions[index, : own.stop - own.start], mask[index, : own.stop - own.start] = tokens_T[own], mask_T[own]
    prompts = torch.stack([tokens_T[offset : offset + prompt] for offset in offsets[:-1]])
    advantages = torch.stack([advantages_T[end - 1] for end in offsets[1:]])
    uniform = float(np.log(SHAPES[settings.shape]["vocab_size"]))
    size = max(1, settings.row_tokens // (prompt + longest))
    return [
        {
            "prompt_ids": prompts[begin : begin + size],
            "prompt_mask": torch.ones_like(prompts[begin : begin + size]),
            "completion_ids": completions[begin : begin + size],
            "completion_mask": mask[begin : begin + size],
            "advantages": advantages[begin : begin + size],
            "old_per_token_logps": -uniform * mask[begin : begin + size].float(),
            "num_items_in_batch": mask.sum(),
        }
        for begin in range(0, count, size)
    ]


def main() -> None:
    """Runs the command."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m perf.step_speed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b" if has_gpu else "small")
    parser.add_argument("--groups", type=int, default=8, help=f"of {GROUP_SIZE} rollouts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--completion", type=int, default=256, help="tokens of the longest")
    parser.add_argument("--row-tokens", type=int, default=16_384 if has_gpu else 4_096, help="computed at once")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    settings = Settings(
        options.shape,
        options.device,
        options.groups,
        options.prompt,
        options.completion,
        options.steps,
        options.row_tokens,
    )
    print(report(settings, *measure(settings)))


def report(settings: Settings, ours: Measured, trl: Measured) -> str:
    """Returns the lines for a person."""
    tokens = statistics.fmean(len(random_batch(settings, step).token_ids_T) for step in range(1, settings.steps + 1))
    name = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU, one thread"
    lines = [
        f"{settings.shape}, {settings.dtype}, {name}: {tokens:,.0f} tokens a step, prompts counted for each rollout"
    ]
    for side, measured in (("ours", ours), ("TRL", trl)):
        peak = f", peak {measured.peak / 1e9:.2f} GB beyond what lives between steps" if measured.peak else ""
        losses = " ".join(f"{loss:.6f}" for loss in measured.losses)
        lines.append(
            f"{side:5} {measured.seconds:.4f} s, {tokens / measured.seconds:,.0f} tokens/s{peak}; losses {losses}"
        )
    return "\n".join([*lines, f"ours over TRL: {trl.seconds / ours.seconds:.2f} times the tokens a second"])


if __name__ == "__main__":
    main()
