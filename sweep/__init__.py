"""Apart: targets raced over by workers without a coordinator; exactly one wins each. Needs storage and nothing else."""

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
