"""What a worker is told when it starts, as JSON on its standard input: it holds a token, which no command line may show."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, repr=False)
class Boot:
    """The orders of one worker. Without a representation, since it holds secrets."""

    address: str
    token: str
    """Shows the orchestrator that it is the worker that it started."""
    environment: dict[str, Any]
    """`EnvironmentConfig`."""
    directory: str
    """The worker's own directory."""
    model: str
    seed: int
    stack_file: str
    most_user_processes: int = 0
    """Processes that the user may have before this worker can start no more; 0: no such limit."""

    def write(self) -> bytes:
        """Returns what `read` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, data: bytes) -> Boot:
        """Returns the orders."""
        return cls(**json.loads(data))
