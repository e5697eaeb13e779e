"""The environment: a pole on a cart, many at once, as arrays. The classic task, with its classic constants.

Source of the equations and constants: Barto, Sutton and Anderson (1983), as in Gymnasium's CartPole-v1. The reward is 1 a
step; an episode ends when the pole has fallen, the cart has left the track, or after `LONGEST` steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TRACK, ANGLE, LONGEST = 2.4, 12 * np.pi / 180, 200

OBSERVATIONS, ACTIONS = 4, 2


class CartPoles:
    """`count` independent poles, which begin anew by themselves when their episode ends."""

    def __init__(self, count: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.states = self._fresh(count)
        """`[count, 4]` float64: position, velocity, angle, angular velocity."""
        self._steps = np.zeros(count, dtype=np.int64)

    def _fresh(self, count: int) -> NDArray[np.float64]:
        return self._random.uniform(-0.05, 0.05, (count, OBSERVATIONS))

    def step(self, actions: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.float64]]:
        """Pushes each cart left (0) or right (1).

        Returns what fell, what ran out of time, and the states before a new beginning.
        """
        x, v, angle, spin = self.states.T
        force = np.where(actions == 1, FORCE, -FORCE)
        total, moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
        push = (force + moment * spin**2 * np.sin(angle)) / total
        inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * np.cos(angle) ** 2 / total)
        spinning = (GRAVITY * np.sin(angle) - np.cos(angle) * push) / inertia
        moving = push - moment * spinning * np.cos(angle) / total
        after = np.stack(
            [x + SECONDS * v, v + SECONDS * moving, angle + SECONDS * spin, spin + SECONDS * spinning], axis=1
        )
        self._steps += 1
        fallen = (np.abs(after[:, 0]) > TRACK) | (np.abs(after[:, 2]) > ANGLE)
        late = ~fallen & (self._steps >= LONGEST)
        ended = fallen | late
        self.states = np.where(ended[:, None], self._fresh(len(after)), after)
        self._steps[ended] = 0
        return fallen, late, after
