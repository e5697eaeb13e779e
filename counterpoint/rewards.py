"""Rubrics and their parts, in an environment of your own (docs/rewards.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.environments.rewards.base import Attempt as Attempt
    from counterpoint.environments.rewards.base import RewardFunction as RewardFunction
    from counterpoint.environments.rewards.base import Value as Value
    from counterpoint.environments.rewards.rubric import Rubric as Rubric
    from counterpoint.environments.rewards.rubric import Scored as Scored
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
