"""TRL's side: its `GRPOTrainer` on the environment's own words and reward, in a process of its own.

    python -m perf.time_to_reward.trl_side SETTINGS.json RECORDS.jsonl transformers|vllm

The examples come in the order in which ours draws them. The settings are those of ours in TRL's names: no KL term, advantages
that are not divided by the standard deviation, and a loss over the batch's tokens (`loss_type = "bnpo"`). Nothing is saved or
reported. With `vllm`, vLLM generates in this process, one rank, eagerly, as our servers do on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import warnings
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from counterpoint.environments.base import Environment, EnvironmentContext
from counterpoint.environments.lifecycle import started
from counterpoint.environments.mix import ExampleMix
from counterpoint.environments.registry import load_here
from counterpoint.transport.records import Rollout
from perf.time_to_reward.settings import BatchRecord, Settings, append_record


def train(settings: Settings, records: Path, with_vllm: bool) -> None:
    """Trains to the end; writes a record for each batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    task, loop = settings.task, asyncio.new_event_loop()
    environment = load_here(task.environment_config())
    context = EnvironmentContext(task.environment, records.parent, Path(settings.model), settings.seed)
    running = AsyncExitStack()
    loop.run_until_complete(running.enter_async_context(started(environment, context)))
    drawn = [environment.example(index) for index in drawn_examples(settings, len(environment))]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": each.prompt}], "position": each.index} for each in drawn]
    )

    def reward(completions: list[Any], position: list[int], **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        rewards = loop.run_until_complete(_scored(environment, settings, texts, position))
        append_record(records, BatchRecord(time.time(), sum(rewards) / len(rewards), len(rewards)))
        return rewards

    extra: dict[str, Any] = {}
    if with_vllm:
        extra = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
        extra |= {"vllm_importance_sampling_correction": False}
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=settings.rollouts,
            gradient_accumulation_steps=1,
            num_generations=settings.group_size,
            max_steps=settings.updates,
            max_completion_length=task.max_tokens,
            learning_rate=task.learning_rate,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            weight_decay=0.0,
            max_grad_norm=settings.max_grad_norm,
            lr_scheduler_type="constant",
            warmup_steps=0,
            beta=0.0,
            scale_rewards="none",
            loss_type="bnpo",
            num_iterations=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=settings.seed,
            shuffle_dataset=False,
            **extra,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
        )
        if with_vllm:
            generation = trainer.vllm_generation
            generation.sync_weights = lambda: _load_weights(generation)  # type: ignore[method-assign]
        trainer.train()
    loop.run_until_complete(running.aclose())


def drawn_examples(settings: Settings, examples: int) -> list[int]:
    """Returns those of all updates, by index, in the order in which our side draws them from so many."""
    mix = ExampleMix([settings.task.environment_config()], {settings.task.environment: examples}, settings.seed)
    return [mix.next()[1] for _ in range(settings.updates * settings.groups)]


def _load_weights(generation: Any) -> None:
    """Gives TRL's vLLM the trainer's weights, in place of `VLLMGeneration.sync_weights`.

    TRL 1.16 calls vLLM's `load_weights`, which fails in a build for CPUs: its layers have packed their weights and given up the
    originals. So this goes through vLLM's layerwise reload, in memory, as our plugin does with files.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from counterpoint.inference.plugin.weights import pack_head

    engine = generation.llm.llm_engine
    model = engine.model_executor.driver_worker.model_runner.model
    initialize_layerwise_reload(model)
    model.load_weights(generation._iter_named_params())
    finalize_layerwise_reload(model, engine.model_config)
    pack_head(model)
    generation.llm.reset_prefix_cache()


async def _scored(environment: Environment, settings: Settings, texts: list[str], examples: list[int]) -> list[float]:
    """Returns the environment's own rewards of completions."""
    rewards = []
    for text, index in zip(texts, examples, strict=True):
        rollout = Rollout("0", 0, settings.task.environment, index)
        rollout.state[settings.task.completion] = text
        score = await environment.score(environment.example(index), rollout)
        assert isinstance(score, float), "both tasks have one reward"
        rewards.append(score)
    return rewards


def main() -> None:
    """Runs the command."""
    settings, records, generation = sys.argv[1:]
    warnings.simplefilter("ignore")
    train(Settings(**json.loads(Path(settings).read_text())), Path(records), generation == "vllm")


if __name__ == "__main__":
    main()
