"""Small rollouts to judge."""

from __future__ import annotations

import numpy as np

from transport.records import Rollout, Turn


def make_turn(
    completion: list[int],
    prompt: list[int] | None = None,
    log_probabilities: list[float] | None = None,
    version: int = 0,
) -> Turn:
    return Turn(
        prompt_ids=np.array([1, 2] if prompt is None else prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        log_probabilities=np.array(
            [-0.5] * len(completion) if log_probabilities is None else log_probabilities, dtype=np.float32
        ),
        policy_version=version,
        finish_reason="stop",
    )


def make_group(rewards: list[float], lengths: list[int] | None = None, environment: str = "words") -> list[Rollout]:
    """One rollout a reward, of one turn with the given number of different tokens (3 unless said otherwise)."""
    return [
        Rollout(
            f"5-{index}",
            5,
            environment,
            11,
            turns=[make_turn(list(range(lengths[index] if lengths else 3)))],
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]
