"""Rollouts made by hand, for the tests of what is done with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from transport.records import Rollout, Turn


def make_turn(prompt: list[int], completion: list[int], version: int = 0, start: int | None = None) -> Turn:
    """A turn; with `start`, its routing from that row on, two layers of top-2."""
    routed_experts = None
    if start is not None:
        rows = np.arange(start, len(prompt) + len(completion) - 1)
        routed_experts = np.broadcast_to((rows % 251).astype(np.uint8)[:, None, None], (len(rows), 2, 2)).copy()
    return Turn(
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        completion_ids=np.asarray(completion, dtype=np.int32),
        log_probabilities=np.full(len(completion), -0.5, dtype=np.float32),
        policy_version=version,
        finish_reason="stop",
        routed_experts=routed_experts,
        routed_experts_start=start or 0,
        server="http://127.0.0.1:1",
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
