"""An environment for models of random weights: the reward is the share of tokens with an even id, which differs by rollout."""

from __future__ import annotations

import numpy as np

from counterpoint.environments.base import Example
from counterpoint.environments.tasks.reverse_text import ReverseText
from counterpoint.transport.records import Rollout


class EvenTokens(ReverseText):
    """The prompts of `reverse-text`. Its own reward is about 0 for all that such a model writes, which teaches nothing."""

    async def score(self, example: Example, rollout: Rollout) -> float:
        """See `Environment`."""
        return float(np.mean(rollout.turns[0].completion_ids % 2 == 0))
