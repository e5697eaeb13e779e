"""The trainable of the chaos: it counts its steps, so that a result that comes twice, or from a wrong checkpoint, shows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from counterpoint.tune.trainable.trainable import Trainable

SECONDS_A_STEP = 0.02


class Counting(Trainable):
    """Step n reports n. Its checkpoint is n."""

    def setup(self, config: dict[str, Any]) -> None:
        """See the base."""
        self._count = 0
        self._level = float(config["level"])

    def step(self) -> dict[str, Any]:
        """See the base."""
        time.sleep(SECONDS_A_STEP)
        self._count += 1
        return {"count": self._count, "score": self._level * self._count, "done": self._count >= self.config["steps"]}

    def save_checkpoint(self, checkpoint_dir: str) -> str:
        """See the base."""
        path = Path(checkpoint_dir) / "count"
        path.write_text(str(self._count))
        return str(path)

    def load_checkpoint(self, checkpoint: str) -> None:
        """See the base."""
        self._count = int(Path(checkpoint).read_text())
