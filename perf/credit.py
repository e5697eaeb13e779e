"""Shows what rewards of turns save: trained tokens until a small policy is right nine times in ten, with and without them.

`python -m perf.credit [--seeds N]` trains a small network on rollouts of five turns of eight tokens, by our own advantages,
filter, samples and loss, on policy. The first token of the second turn alone matters. In the task `early` its reward is known
at that turn. In `late` it is known at the end, and each turn's own reward is the same whatever was answered. A row compares
`turn_returns` with `leave_one_out`, which gives a rollout one number, by the same seeds: the medians of their tokens, and the
ratio of their means with its interval of 95 % (2,000 bootstrap samples of the seeds). Each kind has the learning rate of `RATES`
that is best for it. A run that never gets there counts with the tokens of all its rollouts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.filters import apply_filters
from counterpoint.orchestrator.step.players import set_advantages
from counterpoint.run.config import AdvantageConfig, ZeroAdvantageFilter
from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.contract import LossInputs
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import divisor
from counterpoint.transport.records import Batch, Float32Array, Rollout, Turn

TURNS, LENGTH, ANSWERS, EXAMPLES, GROUP = 5, 8, 8, 2, 8
TOKENS = TURNS * LENGTH
DECIDING_TURN = 1
DECIDING = DECIDING_TURN * LENGTH
"""The place of the token that matters, among those of a rollout."""
SAME = 0.25
"""The reward that each turn has in the task `late`."""
RATES = (0.02, 0.04, 0.06)
MOST_STEPS = 600
WANTED = 0.9
KINDS = ("leave_one_out", "turn_returns")
LOSS = LossConfig(kind="reinforce")


class Policy(nn.Module):
    """The probabilities of a token by example, place and the token before. What one place learns moves the others, too."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Embedding(count, hidden) for count in (EXAMPLES, TOKENS, ANSWERS + 1))
        self.inner, self.outer = nn.Linear(hidden, hidden), nn.Linear(hidden, ANSWERS)

    def forward(self) -> Tensor:
        """Returns all log-probabilities, `[EXAMPLES, TOKENS, ANSWERS + 1, ANSWERS]`; the token before the first is `ANSWERS`."""
        example, place, before = (part.weight for part in self.parts)
        seen = example[:, None, None] + place[None, :, None] + before[None, None]
        return torch.log_softmax(self.outer(torch.tanh(self.inner(torch.tanh(seen)))), -1)


def right(example: int) -> int:
    """The token that the deciding turn should begin with."""
    return (5 * example + 3) % ANSWERS


def success(likely: Float32Array) -> float:
    """The exact probability of being right, over the examples."""
    found = []
    for example in range(EXAMPLES):
        before = np.eye(ANSWERS + 1)[ANSWERS]
        for place in range(DECIDING):
            before = np.append(before @ np.exp(likely[example, place]), 0.0)
        found.append(float(before @ np.exp(likely[example, DECIDING, :, right(example)])))
    return fmean(found)


def play(likely: Float32Array, task: str, step: int, random: np.random.Generator) -> list[Rollout]:
    """Returns a group of rollouts with the rewards of their turns."""
    example = step % EXAMPLES
    ids_GT, chosen_GT = np.zeros((GROUP, TOKENS), np.int32), np.zeros((GROUP, TOKENS), np.float32)
    before = np.full(GROUP, ANSWERS)
    for place in range(TOKENS):
        all_likely = likely[example, place, before]
        passed = random.random((GROUP, 1)) > np.exp(all_likely).cumsum(-1)
        before = passed.sum(-1).clip(max=ANSWERS - 1)
        ids_GT[:, place], chosen_GT[:, place] = before, all_likely[np.arange(GROUP), before]
    group = []
    for index, (ids_T, chosen_T) in enumerate(zip(ids_GT, chosen_GT, strict=True)):
        rewards = np.full(TURNS, 0.0 if task == "early" else SAME, np.float32)
        rewards[DECIDING_TURN if task == "early" else -1] += ids_T[DECIDING] == right(example)
        tokens = np.concatenate([[ANSWERS + 1 + example], ids_T]).astype(np.int32)
        ends = [(turn * LENGTH, (turn + 1) * LENGTH) for turn in range(TURNS)]
        turns = [
            Turn(tokens[: start + 1], tokens[start + 1 : stop + 1], chosen_T[start:stop], step, "stop")
            for start, stop in ends
        ]
        name, total = f"{step}-{index}", float(rewards.sum())
        group.append(Rollout(name, step, task, example, turns, reward=total, turn_rewards=rewards))
    return group


def train(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Takes one step by our loss."""
    tokens_ST = torch.from_numpy(batch.token_ids_T.reshape(-1, TOKENS + 1)).long()
    examples_ST = (tokens_ST[:, :1] - ANSWERS - 1).expand(-1, TOKENS)
    before_ST = torch.cat([torch.full_like(tokens_ST[:, :1], ANSWERS), tokens_ST[:, 1:-1]], -1)
    places_ST = torch.arange(TOKENS).expand(len(tokens_ST), -1)
    likely_P = policy()[examples_ST, places_ST, before_ST, tokens_ST[:, 1:]].reshape(-1)
    trained = np.flatnonzero(batch.loss_mask_T)
    inputs = LossInputs(
        likely_P.detach().requires_grad_(),
        torch.from_numpy(batch.log_probabilities_T[trained]),
        torch.from_numpy(batch.advantages_T[trained]),
        sample_P=torch.arange(len(tokens_ST)).repeat_interleave(TOKENS),
        samples=len(tokens_ST),
        entropies_P=torch.zeros_like(likely_P.detach()),
    )
    _, gradients = load_loss(LOSS)(inputs, divisor(LOSS, [TOKENS] * len(tokens_ST)))
    optimizer.zero_grad()
    likely_P.backward(gradients.log_probabilities_P)
    optimizer.step()


def tokens_until_right(task: str, kind: str, rate: float, seed: int) -> int:
    """Returns the trained tokens until `WANTED` of the answers are right, or those of all rollouts if they never are."""
    torch.manual_seed(seed)
    policy, random = Policy(), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    advantage, filters = load_advantage(AdvantageConfig(kind=kind), LOSS), [ZeroAdvantageFilter()]
    tokens = 0
    for step in range(1, MOST_STEPS + 1):
        likely = policy().detach().numpy()
        if success(likely) >= WANTED:
            return tokens
        group = play(likely, task, step, random)
        set_advantages(advantage, group)
        apply_filters(filters, group)
        samples = [sample for each in group if each.filtered_by is None for sample in merge_rollout(each)]
        if samples:
            batch = assemble_batch("toy", step, samples)
            train(policy, optimizer, batch)
            tokens += int(batch.loss_mask_T.sum())
    return MOST_STEPS * GROUP * TOKENS


def ratio(others: Sequence[int], ones: Sequence[int]) -> tuple[float, float, float]:
    """Returns the means' ratio, and the interval of 95 % over the seeds."""
    chosen = np.random.default_rng(0).integers(0, len(ones), (2000, len(ones)))
    found = np.array(others)[chosen].mean(1) / np.array(ones)[chosen].mean(1)
    low, high = np.quantile(found, [0.025, 0.975])
    return fmean(others) / fmean(ones), float(low), float(high)


def compare(task: str, seeds: int) -> tuple[float, float, float]:
    """Prints a row, and returns the ratio of `turn_returns` to one number a rollout, with its interval."""
    best: list[list[int]] = []
    words = []
    for kind in KINDS:
        by_rate = {rate: [tokens_until_right(task, kind, rate, seed) for seed in range(seeds)] for rate in RATES}
        rate = min(RATES, key=lambda each: fmean(by_rate[each]))
        best.append(by_rate[rate])
        medians = ", ".join(f"{each}: {median(by_rate[each]):,.0f}" for each in RATES)
        words.append(f"{kind} {median(best[-1]):,.0f} tokens at learning rate {rate} ({medians})")
    one, turns = best
    found = ratio(turns, one)
    print(f"{task}: {'; '.join(words)}; ratio {found[0]:.2f}, 95 % {found[1]:.2f} to {found[2]:.2f}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares both tasks. Returns 1 for more than half the tokens (`early`) or a tenth more (`late`), whatever the intervals."""
    parser = argparse.ArgumentParser(prog="python -m perf.credit", description="What rewards of turns save.")
    parser.add_argument("--seeds", type=int, default=20, help="default 20: half an hour on two busy cores")
    seeds = parser.parse_args(arguments).seeds
    torch.set_num_threads(1)
    early, late = (compare(task, seeds)[0] for task in ("early", "late"))
    return int(early > 0.5 or late > 1.1)


if __name__ == "__main__":
    raise SystemExit(main())
