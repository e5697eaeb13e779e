"""Workers claim targets without a coordinator, and exactly one runs each. Needs storage and nothing else.

It imports no other package of this project, so that it can be used alone. It therefore has its own atomic files, file lock
and signal handlers, in `sweep/stores/local.py` and `sweep/interruption.py`, whose rules differ from those of `transport`.
"""

from sweep.claim import BodyExited, SweepFailed, SweepTarget, claim_and_run, claim_and_run_async
from sweep.lock import Claim, PreviousTaskFailed, StepAlreadyDone, StepHeld, step_lock
from sweep.protocol import LeaseLost
from sweep.status import TargetStatus, sweep_status
from sweep.store import StoreError, UnsafeStoreError

__all__ = [
    "BodyExited",
    "Claim",
    "LeaseLost",
    "PreviousTaskFailed",
    "StepAlreadyDone",
    "StepHeld",
    "StoreError",
    "SweepFailed",
    "SweepTarget",
    "TargetStatus",
    "UnsafeStoreError",
    "claim_and_run",
    "claim_and_run_async",
    "step_lock",
    "sweep_status",
]
