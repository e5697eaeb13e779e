"""Advantages of rollouts with several players, each with a separate reward: relative to the same player's in the group.

`finalize.py` calls it for every group, in a worker thread. Without rewards by player it is the group's advantage function
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from counterpoint.orchestrator.step.advantages import LARGEST_FLOAT32, STATES, Advantage, AdvantageError, OfRollout
from counterpoint.transport.records import Float32Array, Rollout


def set_advantages(advantage: Advantage, rollouts: Sequence[Rollout]) -> None:
    """Sets `advantage` of a group's completed rollouts and, if players have separate rewards, `player_advantages`.

    Sets `turn_advantages`, too, where the function has returned a number for each turn. For each player, the advantage function
    gets copies of the rollouts with that player's reward and turns, without rollouts in which it has no turn. Raises
    `AdvantageError`, then setting nothing.
    """
    players = sorted({player for rollout in rollouts for player in rollout.player_rewards})
    if not players:
        for rollout, found in zip(rollouts, advantage.compute(rollouts), strict=True):
            rollout.advantage, rollout.advantage_kind = _largest(found), advantage.name
            rollout.turn_advantages = None if isinstance(found, float) else found.astype(np.float32)
        return
    if not all(rollout.player_rewards for rollout in rollouts):
        raise AdvantageError(
            "some rollouts of the group have a reward for each player, and others one reward; expected either"
        )
    by_rollout: list[dict[str, OfRollout]] = [{} for _ in rollouts]
    for player in players:
        taking_part = [index for index, rollout in enumerate(rollouts) if player in rollout.player_rewards]
        shown = {index: _of_player(rollouts[index], player) for index in taking_part}
        shown = {index: rollout for index, rollout in shown.items() if rollout.turns}
        for index, found in zip(shown, advantage.compute(list(shown.values())) if shown else (), strict=True):
            by_rollout[index][player] = found
    for rollout, advantages in zip(rollouts, by_rollout, strict=True):
        rollout.player_advantages = {player: _largest(found) for player, found in advantages.items()}
        rollout.advantage_kind = advantage.name
        rollout.advantage = max(rollout.player_advantages.values(), key=abs, default=0.0)
        by_turn = not all(isinstance(found, float) for found in advantages.values())
        rollout.turn_advantages = _over_turns(rollout, advantages) if by_turn else None


def _largest(found: OfRollout) -> float:
    """Returns an advantage, or the one of the turns' that is largest in size."""
    return found if isinstance(found, float) else float(max(found.tolist(), key=abs))


def _over_turns(rollout: Rollout, advantages: dict[str, OfRollout]) -> Float32Array:
    """Returns the advantage of each turn, of those of its player; 0 for turns of others, which are not trained."""
    result = np.zeros(len(rollout.turns), np.float32)
    for player, found in advantages.items():
        result[[turn.player == player for turn in rollout.turns]] = found
    return result


def _of_player(rollout: Rollout, player: str) -> Rollout:
    own = [index for index, turn in enumerate(rollout.turns) if turn.player == player]
    shown = replace(rollout, turns=[rollout.turns[index] for index in own], reward=rollout.player_rewards[player])
    if rollout.turn_rewards is not None:
        shown.turn_rewards = rollout.turn_rewards[own]
    states = rollout.state.get(STATES)
    if isinstance(states, list) and len(states) == len(rollout.turns):
        shown.state = rollout.state | {STATES: [states[index] for index in own]}
    return shown


def fault_of_players(rollout: Rollout) -> str | None:
    """Returns why the rewards by player cannot be trained on, for a person, or None if they can, or there are none."""
    if not rollout.player_rewards:
        return None
    for player, reward in rollout.player_rewards.items():
        if not math.isfinite(reward) or abs(reward) > LARGEST_FLOAT32:
            return f"the reward of player {player!r} is {reward!r}; expected a finite number of at most {LARGEST_FLOAT32:.2g}"
    for index, turn in enumerate(rollout.turns):
        if turn.player not in rollout.player_rewards and turn.trained_tokens:
            named = ", ".join(map(repr, sorted(rollout.player_rewards)))
            whose = f"player {turn.player!r}" if turn.player else "no player"
            return (
                f"turn {index} is of {whose}, and there are rewards for {named}; expected one for each trained player"
            )
    return None
