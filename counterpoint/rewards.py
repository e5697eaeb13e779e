"""Rubrics and their parts, in an environment of your own (docs/rewards.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from environments.rewards.base import Attempt as Attempt
    from environments.rewards.base import RewardFunction as RewardFunction
    from environments.rewards.base import Value as Value
    from environments.rewards.rubric import Rubric as Rubric
    from environments.rewards.rubric import Scored as Scored
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
