"""Trainables of the tests: what works, and every way not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tune


class Counter(tune.Trainable):
    """Counts, and remembers where it began."""

    def setup(self, config: dict[str, Any]) -> None:
        self.count = int(config.get("begin", 0))

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count, "done": self.count >= self.config.get("until", 1000)}

    def save_checkpoint(self, checkpoint_dir: str) -> str:
        path = Path(checkpoint_dir) / "count"
        path.write_text(str(self.count))
        return str(path)

    def load_checkpoint(self, checkpoint: str) -> None:
        self.count = int(Path(checkpoint).read_text())


def reports(config: dict[str, Any]) -> None:
    for value in range(config.get("times", 3)):
        tune.report(value=value)
