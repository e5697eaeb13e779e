"""The trainer of the PPO example, held back, so that its job is not done before all its roles have been killed."""

from __future__ import annotations

from pathlib import Path

from examples.ppo.roles import Trainer

ALLOWED = "allowed"
"""A file in the job's directory with the last iteration that may be made; none may without it."""


class PacedTrainer(Trainer):
    """Waits for permission before each iteration."""

    def iterate(self, iteration: int) -> dict[str, float]:
        """Makes the iteration once it is allowed."""
        file = Path(self.context.directory) / ALLOWED
        while not (file.exists() and iteration <= int(file.read_text() or 0)):
            if self.context.stop.wait(0.02):
                raise SystemExit(1)
        return super().iterate(iteration)
