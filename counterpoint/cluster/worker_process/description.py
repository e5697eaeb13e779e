"""What a worker's process is told of itself: `counterpoint/cluster/master/orders.py` makes it, and the process reads it."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import Field

from counterpoint.cluster.spec import LONGEST_PERIOD_SECONDS, ImportPath
from counterpoint.transport.config import Config


class Description(Config):
    """All that a worker's process needs."""

    job: str
    role: str
    rank: int
    """-1 for a SubMaster."""
    count: int
    """Workers of its role."""
    fewest: int = 1
    most: int = sys.maxsize
    """How many these may be."""
    worker: str
    incarnation: int
    import_path: ImportPath
    """The import path of its class."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration of its role."""
    directory: str
    """The directory of the job."""
    node: str = ""
    """Filled in by its keeper."""
    listen: str = "ipc"
    """The address at which it takes calls: `ipc`, or `tcp://HOST` with keys. Filled in by its keeper, which listens
    there itself."""
    task: bool = False
    """Whether the process ends once `start` has returned."""
    heartbeat_seconds: float = Field(default=LONGEST_PERIOD_SECONDS, gt=0)
    """Time between two heartbeats."""
    path: tuple[str, ...] = ()
    """Directories that are searched for its class before all others."""
