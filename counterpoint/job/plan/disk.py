"""What runs keep on the disk for resumes, branches and checks: checkpoints of the trainer, and recorded batches."""

from __future__ import annotations

from math import inf

import numpy as np

from counterpoint.job.plan.devices import GIB
from counterpoint.job.plan.dry_run import ModelSizes
from counterpoint.job.plan.planned import Planned
from counterpoint.transport.records import COLUMNS, TOKEN_COLUMNS

_ROUTED_BYTES = 2
"""Most bytes of one expert's index in a recorded batch."""


def disk_parts(sizes: ModelSizes, planned: Planned, checkpoint: int) -> dict[str, int]:
    """Returns the bytes of each part, once all steps are trained. `checkpoint` is that of one step of all runs together.

    A batch is counted as if each rollout had as many tokens as a server takes.
    """
    routed = sizes.layers * sizes.experts_per_token * _ROUTED_BYTES if planned.trainer.router_replay else 0
    token = sum(np.dtype(COLUMNS[name].dtype).itemsize for name in TOKEN_COLUMNS) + routed
    batches = (min(tokens * token, inf if gib is None else int(gib * GIB)) for tokens, gib in planned.kept_batches)
    parts = {
        "checkpoints": checkpoint * planned.trainer.keep_checkpoints,
        "checkpoints by keep_every": checkpoint * planned.kept_checkpoints // len(planned.runs),
        "kept batches": int(sum(batches)),
    }
    return {name: count for name, count in parts.items() if count}
