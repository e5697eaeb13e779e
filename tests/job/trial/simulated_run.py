"""Small runs for a trial's test: a softmax policy of 128 weights, trained by REINFORCE within groups, and held-out examples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from counterpoint.job.trial.decisions import HeldOut, Side

BEGIN = 10
"""The step that the branches have in common."""

STEPS = 60

GROUPS, SIZE, HELD, TRAINED = 16, 8, 64, 512
FEATURES, ACTIONS = 16, 8
RATE = 8.0

TOKENS_OF_RUN = STEPS * (GROUPS * SIZE + HELD)
"""Of a whole run that is evaluated after each step: a token a rollout."""

Array = npt.NDArray[np.float64]


class Task:
    """Examples with one right action of several, which a hidden linear teacher knows."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        teacher = random.normal(size=(ACTIONS, FEATURES))
        self.trained, self.held = (random.normal(size=(count, FEATURES)) / 4 for count in (TRAINED, HELD))
        self.right, self.right_held = ((each @ teacher.T).argmax(1) for each in (self.trained, self.held))

    def step(self, weights: Array, random: np.random.Generator, rate: float, sign: float) -> Array:
        chosen = random.integers(TRAINED, size=GROUPS)
        inputs = self.trained[chosen]
        chances = probabilities(weights, inputs)
        actions = drawn(chances, random, SIZE)
        rewards = (actions == self.right[chosen][:, None]).astype(np.float64)
        advantages = sign * (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
        gradient = (advantages[:, :, None] * (np.eye(ACTIONS)[actions] - chances[:, None, :])).mean(1).T @ inputs
        moved: Array = weights + rate * gradient / GROUPS
        return moved

    def evaluate(self, weights: Array, random: np.random.Generator) -> list[float]:
        answers = drawn(probabilities(weights, self.held), random, 1)[:, 0]
        return (answers == self.right_held).astype(np.float64).tolist()


def probabilities(weights: Array, inputs: Array) -> Array:
    logits = inputs @ weights.T
    grown = np.exp(logits - logits.max(1, keepdims=True))
    chances: Array = grown / grown.sum(1, keepdims=True)
    return chances


def drawn(chances: Array, random: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    below = random.random((len(chances), count, 1)) > chances.cumsum(1)[:, None, :]
    actions: npt.NDArray[np.int64] = below.sum(2).clip(0, ACTIONS - 1)
    return actions


def measured_branches(seed: int, rate: float = 1.0, sign: float = 1.0) -> Iterator[HeldOut]:
    """Yields what two branches of one run measure; the one with the change has `rate` times the rate, or another sign.

    Each has its own luck, as two branches of a real run have: they are sampled beside other requests.
    """
    task, random = Task(seed), np.random.default_rng([seed, 0])
    begun = np.zeros((ACTIONS, FEATURES))
    for _ in range(BEGIN):
        begun = task.step(begun, random, RATE, 1.0)
    sides: dict[Side, tuple[float, float]] = {"without": (RATE, 1.0), "with": (RATE * rate, sign)}
    weights: dict[Side, Array] = dict.fromkeys(sides, begun)
    luck: dict[Side, np.random.Generator] = {
        side: np.random.default_rng([seed, number]) for number, side in enumerate(sides, start=1)
    }
    for step in range(BEGIN + 1, STEPS + 1):
        for side, values in sides.items():
            weights[side] = task.step(weights[side], luck[side], *values)
            rewards = task.evaluate(weights[side], luck[side])
            spent = (step - BEGIN) * (GROUPS * SIZE + HELD)
            yield HeldOut(side, step, spent, {("task", index): each for index, each in enumerate(rewards)}, (0.0, 1.0))
