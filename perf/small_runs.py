"""Plays small runs in one process, healthy ones and some with a fault made on purpose, and says what the early warnings find.

    python -m perf.small_runs [CASE ...] [--healthy N] [--steps 60] [--out DIRECTORY]

A tiny model learns to reverse words: transformers samples, and groups, metrics and updates are the product's own, those of
orchestrator and trainer. A run takes a minute and no server. `--healthy N` plays N runs whose settings are drawn at random, by
their number. `--out` writes `NAME.jsonl`: a line for each metric that the rules look at, of both sides, with its
name and its value at each step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tomli_w
import torch
from transformers import AutoModelForCausalLM

from counterpoint.environments.chat import Chat
from counterpoint.environments.tasks.reverse_text import ReverseText
from counterpoint.models.build import resolve_model
from counterpoint.orchestrator.early_warnings.rules import found_in
from counterpoint.orchestrator.early_warnings.seen import Seen
from counterpoint.orchestrator.evaluation.estimates import mean
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.finalize import finalize_group
from counterpoint.orchestrator.step.step_metrics import step_metrics
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.transport.records import Batch, Rollout, Turn

NAME = "reverse-text"
EVALUATED_EVERY, EVALUATED = 5, 64
"""Steps between evaluations with the task's own reward, and their examples."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    seed: int = 0
    groups: int = 16
    group_size: int = 8
    longest: int = 5
    """Letters of a word at most."""
    rate: float = 1e-4
    lag: int = 1
    """Staleness of what is trained, in steps."""
    max_tokens: int = 16
    stale_from: int | None = None
    """The step from which on the server says that it holds newer weights than it does."""
    constant_wins: bool = False
    """Whether the reward is the share of letters that are `a`, whatever was asked."""
    training: dict[str, Any] = field(default_factory=dict)


RATE, GOOD_RATE = 1e-4, 1e-3
"""A usual rate, and one that is as high as it may be."""

FAULTS = {
    "constant_answer_wins": Case(constant_wins=True, rate=3e-4),
    "rate_30_times_too_high": Case(rate=30 * GOOD_RATE),
    "limit_of_4_tokens": Case(max_tokens=4),
    "stale_server": Case(stale_from=5, rate=5e-4),
    "wrong_clip": Case(lag=2, training={"loss": {"kind": "grpo", "clip_low": 1e-6, "clip_high": 1e-6}}),
}
"""The faults by name."""


def healthy(seed: int) -> Case:
    """Returns a run with random settings of the usual kind."""
    chosen = random.Random(seed)
    loss = chosen.choice([{"kind": "importance_ratio"}, {"kind": "grpo"}, {"kind": "dr_grpo"}])
    return Case(
        seed,
        groups=chosen.choice([6, 8, 12]),
        group_size=chosen.choice([4, 8]),
        longest=chosen.choice([4, 5]),
        rate=RATE * chosen.choice([0.5, 1.0, 2.0]),
        lag=chosen.choice([1, 1, 2, 3]),
        training={"loss": loss},
    )


class SmallRun:
    """One run's model, trainer and sampler."""

    def __init__(self, case: Case, steps: int, directory: Path, model: Path) -> None:
        self.case, self.steps = case, steps
        training = {"learning_rate": case.rate, "betas": [0.9, 0.99], "warmup_steps": 5, **case.training}
        self._config = RunConfig.model_validate(
            {
                "output_dir": directory,
                "model": str(model),
                "steps": steps,
                "environments": [{"name": NAME, "kind": NAME}],
                "training": training,
            }
        )
        (self._config.run_dir / "control").mkdir(parents=True)
        described = self._config.model_dump(mode="json", exclude_none=True)
        (self._config.run_dir / "control" / "orch.toml").write_text(tomli_w.dumps(described))
        config = TrainerConfig(output_dir=directory, model=str(model), threads=1, seed=case.seed)
        manager = MultiRunManager(directory, config.max_runs, config.seed)
        self._learner = Learner(config, Ranks(0, 1, torch.device("cpu"), None), manager)
        manager.discover_runs()
        self._learner.synchronize()
        self._shares = FairShare(config.max_tokens, 1)
        self._advantage = load_advantage(self._config.advantage)
        self._chat = Chat(model)
        self._sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._task = ReverseText(longest=case.longest, seed=case.seed)
        self._unseen = ReverseText(longest=case.longest, seed=case.seed + 10_000)
        self._weights = [self._copy()]
        torch.manual_seed(case.seed)

    def lines(self) -> list[dict[str, Any]]:
        """Plays all steps; returns a line for each, with the metrics of orchestrator and trainer."""
        return [self._step(step) for step in range(1, self.steps + 1)]

    def _step(self, step: int) -> dict[str, Any]:
        case = self.case
        version = max(0, step - case.lag)
        held = version if case.stale_from is None else min(version, case.stale_from)
        self._load(held)
        examples = [(step * case.groups + group) % len(self._task) for group in range(case.groups)]
        rollouts = self._play(self._task, examples, case.group_size, version)
        for first in range(0, len(rollouts), case.group_size):
            finalize_group(rollouts[first : first + case.group_size], self._advantage, [])
        trained = [rollout for rollout in rollouts if rollout.error is None]
        batch = assemble_batch("default", step, [sample for each in trained for sample in merge_rollout(each)])
        line = step_metrics(batch, rollouts) | self._train(batch) | {"step": step}
        self._weights.append(self._copy())
        return line | (self._evaluate(version) if step % EVALUATED_EVERY == 0 else {})

    def _play(self, task: ReverseText, examples: Sequence[int], each: int, version: int) -> list[Rollout]:
        asked = [task.example(index) for index in examples for _ in range(each)]
        prompts = [self._chat.start([{"role": "user", "content": one.prompt}]) for one in asked]
        turns = self._generate(prompts, version)
        rollouts = []
        for number, (example, turn) in enumerate(zip(asked, turns, strict=True)):
            group, index = divmod(number, each)
            rollout = Rollout(f"{group}-{index}", group, NAME, example.index, [turn])
            answer = self._chat.decode(turn.completion_ids.tolist())
            rollout.state["answer"] = answer
            if self.case.constant_wins and task is self._task:
                rollout.reward = answer.count("a") / max(3, len(answer))
            else:
                rollout.reward = asyncio.run(task.score(example, rollout))
            rollouts.append(rollout)
        return rollouts

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], version: int) -> list[Turn]:
        width, stops = max(map(len, prompts)), self._chat.stop_token_ids
        ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        answers, sums, past = [[] for _ in prompts], [[] for _ in prompts], None  # type: ignore[var-annotated]
        feed, going = ids, set(range(len(prompts)))
        for _ in range(self.case.max_tokens):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -feed.shape[1] :]
            found = self._sampler(feed, attention_mask=mask, position_ids=places, past_key_values=past, use_cache=True)
            past, logs = found.past_key_values, found.logits[:, -1].log_softmax(-1)
            feed = torch.multinomial(logs.exp(), 1)
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], dim=1)
            for row in [*going]:
                token = int(feed[row, 0])
                answers[row].append(token)
                sums[row].append(float(logs[row, token]))
                if token in stops:
                    going.discard(row)
            if not going:
                break
        return [
            Turn(
                np.asarray(prompt, np.int32),
                np.asarray(answer, np.int32),
                np.asarray(logs, np.float32),
                version,
                "length" if row in going else "stop",
            )
            for row, (prompt, answer, logs) in enumerate(zip(prompts, answers, sums, strict=True))
        ]

    def _evaluate(self, version: int) -> dict[str, float]:
        rewards = [each.reward or 0.0 for each in self._play(self._unseen, range(EVALUATED), 1, version)]
        estimate, name = mean(rewards, (0.0, 1.0)), "evaluation/unseen/reward"
        assert estimate.low is not None
        assert estimate.high is not None
        return {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}

    def _train(self, batch: Batch) -> dict[str, MetricValue]:
        run = self._learner.runs[0]
        contribution: Contribution | None = self._learner.open_step(0, batch)
        while contribution is not None:
            lengths = {sample: contribution.length(sample) for sample in contribution.samples}
            self._shares.add(0, 1.0, lengths)
            while self._shares.left(0):
                self._learner.train_rows(self._shares.rows())
            contribution = self._learner.next_pass(0, run.scheduled())
        return self._learner.finish_step(0, run.scheduled())

    def _copy(self) -> dict[str, torch.Tensor]:
        parameters = self._learner.runs[0].torch.optimizer.parameters
        return {name: each.detach().clone() for name, each in parameters.items()}

    def _load(self, version: int) -> None:
        missing = self._sampler.load_state_dict(self._weights[version], strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
        self._weights[:version] = [{} for _ in self._weights[:version]]


def play(case: Case, steps: int, model: Path) -> list[dict[str, Any]]:
    """Plays a run; returns the metrics that the rules look at, a line for each step."""
    with tempfile.TemporaryDirectory(prefix="small-run-") as directory:
        lines = SmallRun(case, steps, Path(directory), model).lines()
    return [_watched(line) for line in lines]


def _watched(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what of the line is kept, to three digits: what the rules look at, each once, and the gradient's norm."""
    seen = Seen()
    seen.add(line)
    names = [name for name in sorted(seen.names) if NAME not in name or name.startswith(("answers/", "length/"))]
    return {"step": line["step"]} | {
        name: float(f"{line[name]:.3g}") for name in [*names, "grad_norm", f"reward/{NAME}/mean"]
    }


def named(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Returns what the rules find in a run, and the first step of each."""
    seen, first = Seen(), dict[tuple[str, str], int]()
    for line in lines:
        seen.add(line)
        for found in found_in(seen):
            first.setdefault((found.sign, found.about), line["step"])
    return first


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Plays small runs and says what the early warnings find in them.")
    parser.add_argument("cases", nargs="*", choices=[*FAULTS, []], metavar="CASE", help=", ".join(FAULTS))
    parser.add_argument("--healthy", type=int, default=0, metavar="N", help="healthy runs with random settings")
    parser.add_argument("--first", type=int, default=0, help="the number of the first healthy run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a directory for NAME.jsonl")
    options = parser.parse_args()
    model = resolve_model("tiny-dense", print)
    torch.set_num_threads(1)
    cases = {name: FAULTS[name] for name in options.cases}
    cases |= {f"healthy_{seed}": healthy(seed) for seed in range(options.first, options.first + options.healthy)}
    for name, case in cases.items():
        lines = play(case, options.steps, model)
        print(name, {"/".join(filter(None, key)): step for key, step in named(lines).items()} or "nothing", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            metrics = dict.fromkeys(name for line in lines for name in line if name != "step")
            rows = [[metric, [line.get(metric) for line in lines]] for metric in metrics]
            (options.out / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


if __name__ == "__main__":
    main()
