"""Workers claim targets without a coordinator, and exactly one runs each. Needs storage and nothing else.

It imports no other package of this project, so that it can be used alone. It therefore has its own atomic files, file lock
and signal handlers, in `sweep/stores/local.py` and `sweep/interruption.py`, whose rules differ from those of `transport`.
"""

from sweep.claim import BodyExited, SweepFailed, SweepTarget, claim_and_run, claim_and_run_async
from sweep.lock import Claim, PreviousTaskFailed, StepAlreadyDone, StepHeld, step_lock
from sweep.placeholders import InputName, OutputName, resolve_names
from sweep.protocol import LeaseLost
from sweep.record import STATUS_FAILED, STATUS_SUCCESS, RecordError
from sweep.regions import region_root, sweep_root
from sweep.status import TargetStatus, sweep_status
from sweep.store import StoreError, UnsafeStoreError

__all__ = [
    "STATUS_FAILED",
    "STATUS_SUCCESS",
    "BodyExited",
    "Claim",
    "InputName",
    "LeaseLost",
    "OutputName",
    "PreviousTaskFailed",
    "RecordError",
    "StepAlreadyDone",
    "StepHeld",
    "StoreError",
    "SweepFailed",
    "SweepTarget",
    "TargetStatus",
    "UnsafeStoreError",
    "claim_and_run",
    "claim_and_run_async",
    "region_root",
    "resolve_names",
    "step_lock",
    "sweep_root",
    "sweep_status",
]
