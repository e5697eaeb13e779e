"""Rollouts made by hand: turns of given tokens, and groups of one rollout a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.transport.records import Rollout, Turn


def routing(token_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    """`[tokens, 2 layers, top 2]` of different numbers, which tell by what tokens and in which places they were made."""
    rows_T = np.arange(len(token_ids)) + 17 * np.cumsum(np.asarray(token_ids, dtype=np.int64))
    return ((rows_T[:, None, None] + np.arange(4).reshape(2, 2)) % 251).astype(np.uint8)


def make_turn(
    prompt: Sequence[int],
    completion: Sequence[int],
    version: int = 0,
    start: int | None = None,
    log_probabilities: Sequence[float] | None = None,
    finish_reason: str = "stop",
    player: str = "",
) -> Turn:
    """A turn whose log-probabilities are -0.5; with `start`, its `routing` from that row on."""
    routed_experts = None
    if start is not None:
        routed_experts = routing([*prompt, *completion])[start:-1]
    if log_probabilities is None:
        log_probabilities = [-0.5] * len(completion)
    return Turn(
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        completion_ids=np.asarray(completion, dtype=np.int32),
        log_probabilities=np.asarray(log_probabilities, dtype=np.float32),
        policy_version=version,
        finish_reason=finish_reason,
        routed_experts=routed_experts,
        routed_experts_start=start or 0,
        server="http://127.0.0.1:1",
        player=player,
    )


def make_rollout(group_id: int = 0, index: int = 0, *, turns: list[Turn] | None = None, **fields: Any) -> Rollout:
    """A completed rollout of one turn, reward and advantage 1."""
    values: dict[str, Any] = {
        "rollout_id": f"{group_id}-{index}",
        "group_id": group_id,
        "environment": "toy",
        "example_index": group_id,
        "turns": turns if turns is not None else [make_turn([1, 2, 3], [4, 5], start=0)],
        "reward": 1.0,
        "advantage": 1.0,
    }
    return Rollout(**(values | fields))


def make_group(rewards: list[float], lengths: list[int] | None = None, environment: str = "words") -> list[Rollout]:
    """Group 5: one rollout a reward, without an advantage, of one turn of so many different tokens (3 where not given)."""
    return [
        Rollout(
            f"5-{index}",
            5,
            environment,
            11,
            turns=[make_turn([1, 2], range(lengths[index] if lengths else 3))],
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]
