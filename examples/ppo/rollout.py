"""Collects steps with a policy whose weights come as arrays, so that this role needs numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.ppo.cartpole import LONGEST, OBSERVATIONS, CartPoles

Array = NDArray[Any]


def logits(weights: dict[str, Array], observations: Array) -> Array:
    """Returns what `ppo.network` computes from `observations` `[N, 4]`: `[N, 2]`, float32."""
    hidden = np.tanh(observations @ weights["0.weight"].T + weights["0.bias"])
    hidden = np.tanh(hidden @ weights["2.weight"].T + weights["2.bias"])
    result: Array = hidden @ weights["4.weight"].T + weights["4.bias"]
    return result


def collect(weights: dict[str, Array], poles: int, steps: int, seed: int) -> dict[str, Array]:
    """Plays fresh poles for `steps` steps each. The same arguments give the same result, so that it may be repeated.

    Returns, for T steps and N poles: `observations` and `next_observations` `[T, N, 4]` and `log_probabilities` `[T, N]` float32,
    `actions` `[T, N]` int64, `fallen` and `ended` `[T, N]` bool, and `lengths`, the steps of each episode that ended.
    """
    chance, environment = np.random.default_rng([seed, 1]), CartPoles(poles, seed)
    columns: dict[str, list[Array]] = {
        name: [] for name in ("observations", "next_observations", "actions", "log_probabilities", "fallen", "ended")
    }
    alive, lengths = np.zeros(poles, dtype=np.int64), []
    for _ in range(steps):
        seen = environment.states.astype(np.float32)
        scores = logits(weights, seen)
        scores = scores - scores.max(axis=1, keepdims=True)
        log_probabilities = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        actions = (chance.random(poles) < np.exp(log_probabilities[:, 1])).astype(np.int64)
        fallen, late, after = environment.step(actions)
        alive += 1
        lengths += alive[fallen | late].tolist()
        alive[fallen | late] = 0
        row = (
            seen,
            after.astype(np.float32),
            actions,
            log_probabilities[np.arange(poles), actions],
            fallen,
            fallen | late,
        )
        for name, values in zip(columns, row, strict=True):
            columns[name].append(values)
    result = {name: np.stack(values) for name, values in columns.items()}
    assert result["observations"].shape == (steps, poles, OBSERVATIONS)
    return result | {"lengths": np.array(lengths or [min(steps, LONGEST)], dtype=np.int64)}
