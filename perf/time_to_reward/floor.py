"""Measures what the generation and the training of an update compute, alone: no arrangement of processes takes less.

    python -m perf.time_to_reward.floor [--rollouts 64 256] [--updates 20]

Generation is vLLM's own loop (`LLM.generate`) in this process, as TRL uses it; training is our trainer's step, from the batch to
the updated weights, with prompts that a group shares computed once. Each has one thread. What a job does besides is left out:
loading and proving weights, requests, records, metrics. The sum over the cores bounds the time of an update from below, where all
rollouts are trained; compare it with what `python -m perf.time_to_reward` measures on the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from environments.registry import load_here
from models.make_model import resolve_model
from perf.time_to_reward.measure import environment_of
from perf.time_to_reward.ours import job_of
from perf.time_to_reward.settings import GROUP_SIZE, TASKS, Settings
from perf.time_to_reward.trl_side import drawn_examples
from transport.records import Batch, SampleInfo

WARM_UP = 3
"""Updates that are not counted: the first ones fill caches and pools."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Medians of the measured updates, in CPU seconds of all threads."""

    generation: float
    training: float
    completion_tokens: float
    """Mean of a rollout."""

    def floor(self, cores: int) -> float:
        """Returns the seconds below which no update can be, on so many cores."""
        return (self.generation + self.training) / cores


def measure(settings: Settings) -> Parts:
    """Generates and trains every update's rollouts, one after the other, with the model's first weights."""
    with tempfile.TemporaryDirectory(prefix="time_to_reward_") as directory:
        generate, train = _generator(settings), _trainer(settings, Path(directory))
        generation, training, lengths = [], [], []
        for update in range(settings.updates):
            before = time.process_time()
            rollouts = generate(update)
            between = time.process_time()
            train(update, rollouts)
            generation.append(between - before)
            training.append(time.process_time() - between)
            lengths += [len(answer) for _, answer, _ in rollouts]
    return Parts(
        statistics.median(generation[WARM_UP:]), statistics.median(training[WARM_UP:]), statistics.fmean(lengths)
    )


Rollouts = list[tuple[list[int], list[int], list[float]]]
"""The ids of prompt and answer, and the log-probabilities of the answer."""


def _generator(settings: Settings) -> Callable[[int], Rollouts]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        settings.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=settings.rollouts,
        seed=settings.seed,
    )
    words = load_here(settings.task.environment_config())
    drawn = drawn_examples(settings, len(words))
    tokenizer: Any = engine.get_tokenizer()
    sampling = SamplingParams(temperature=1.0, max_tokens=settings.task.max_tokens, logprobs=0)

    def generate(update: int) -> Rollouts:
        examples = [words.example(index) for index in drawn[update * settings.groups : (update + 1) * settings.groups]]
        messages = [[{"role": "user", "content": each.prompt}] for each in examples]
        prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        repeated = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(settings.group_size)]
        rollouts: Rollouts = []
        for request in engine.generate(repeated, sampling, use_tqdm=False):
            answer = request.outputs[0]
            chosen = [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            rollouts.append((list(request.prompt_token_ids), list(answer.token_ids), chosen))
        return rollouts

    return generate


def _trainer(settings: Settings, directory: Path) -> Callable[[int, Rollouts], None]:
    import torch

    from perf.whole_step import train_whole_step
    from run.config import RunConfig
    from trainer.config import TrainerConfig
    from trainer.learner import Learner
    from trainer.ranks import Ranks
    from trainer.runs.control_files import run_directory
    from trainer.runs.manager import MultiRunManager

    run = {"output_dir": str(directory), "model": settings.model, **job_of(settings, directory)["orchestrator"]}
    control = run_directory(directory, RunConfig.model_validate(run).run_id) / "control"
    control.mkdir(parents=True)
    (control / "orch.toml").write_text(tomli_w.dumps(run))
    config = TrainerConfig(
        output_dir=directory, model=settings.model, device="cpu", dtype="float32", threads=1, router_replay=False
    )
    manager = MultiRunManager(directory, config.max_runs)
    learner = Learner(config, Ranks(0, 1, torch.device("cpu"), None), manager)
    manager.discover_runs()
    learner.synchronize()

    def train(update: int, rollouts: Rollouts) -> None:
        train_whole_step(learner, _batch(learner.runs[0].run_id, update + 1, rollouts, settings.seed))

    return train


def _batch(run_id: str, step: int, rollouts: Rollouts, seed: int) -> Batch:
    """Returns the rollouts as a batch with random advantages: their values do not change what training costs."""
    random = np.random.default_rng((seed, step))
    advantages = random.standard_normal(len(rollouts))
    lengths = [len(prompt) + len(answer) for prompt, answer, _ in rollouts]
    return Batch(
        run_id=run_id,
        step=step,
        samples=tuple(SampleInfo(str(index), "reverse-text", step - 1, 0.0, 1.0) for index in range(len(rollouts))),
        token_ids_T=np.concatenate([np.array(prompt + answer, np.int32) for prompt, answer, _ in rollouts]),
        loss_mask_T=_column([np.ones(len(answer)) for _, answer, _ in rollouts], rollouts).astype(np.uint8),
        log_probabilities_T=_column([np.array(chosen) for _, _, chosen in rollouts], rollouts),
        advantages_T=_column(
            [np.full(len(answer), value) for value, (_, answer, _) in zip(advantages, rollouts, strict=True)], rollouts
        ),
        sample_offsets=np.cumsum([0, *lengths], dtype=np.int64),
    )


def _column(answers: list[Any], rollouts: Rollouts) -> Any:
    """Returns a column over all tokens, 0 over the prompts."""
    parts = [
        part
        for values, (prompt, _, _) in zip(answers, rollouts, strict=True)
        for part in (np.zeros(len(prompt)), values)
    ]
    return np.concatenate(parts).astype(np.float32)


def main() -> None:
    """Runs the command, in the environment of a side with vLLM in its process."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.time_to_reward.floor", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64, 256], help="of an update, multiples of 8")
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    environment = environment_of("trl-vllm", TASKS["words"]) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if environment != dict(os.environ):  # vLLM and torch read it while they are imported
        os.execve(sys.executable, [sys.executable, "-m", "perf.time_to_reward.floor", *sys.argv[1:]], environment)
    model = str(resolve_model(TASKS["words"].model, lambda line: print(line, file=sys.stderr)))
    cores = len(os.sched_getaffinity(0))
    for rollouts in options.rollouts:
        settings = Settings(model, 0, options.updates, rollouts // GROUP_SIZE, GROUP_SIZE)
        parts = measure(settings)
        print(
            f"{rollouts} rollouts of {parts.completion_tokens:.1f} tokens: generation {parts.generation:.3f} s, training "
            f"{parts.training:.3f} s of CPU; on {cores} cores no update takes less than {parts.floor(cores):.3f} s"
        )


if __name__ == "__main__":
    main()
