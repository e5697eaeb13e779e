"""Workers claim targets without a coordinator, and exactly one runs each. Needs storage and nothing else.

It imports no other package of this project, so that it can be used alone; a training as a target, `run_training_on_worker`, is
loaded when it is first used. It therefore has its own atomic files, file lock and signal handlers, in
`counterpoint/sweep/stores/local.py` and `counterpoint/sweep/interruption.py`, whose rules differ from those of `transport`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.job.sweep.training import extras_for_resources as extras_for_resources
    from counterpoint.job.sweep.training import resolve_training_env as resolve_training_env
    from counterpoint.job.sweep.training import run_training_on_worker as run_training_on_worker
    from counterpoint.sweep.claim import BodyExited as BodyExited
    from counterpoint.sweep.claim import SweepFailed as SweepFailed
    from counterpoint.sweep.claim import SweepTarget as SweepTarget
    from counterpoint.sweep.claim import claim_and_run as claim_and_run
    from counterpoint.sweep.claim import claim_and_run_async as claim_and_run_async
    from counterpoint.sweep.lock import Claim as Claim
    from counterpoint.sweep.lock import PreviousTaskFailed as PreviousTaskFailed
    from counterpoint.sweep.lock import StepAlreadyDone as StepAlreadyDone
    from counterpoint.sweep.lock import StepHeld as StepHeld
    from counterpoint.sweep.lock import step_lock as step_lock
    from counterpoint.sweep.placeholders import InputName as InputName
    from counterpoint.sweep.placeholders import OutputName as OutputName
    from counterpoint.sweep.placeholders import resolve_names as resolve_names
    from counterpoint.sweep.protocol import LeaseLost as LeaseLost
    from counterpoint.sweep.record import STATUS_FAILED as STATUS_FAILED
    from counterpoint.sweep.record import STATUS_SUCCESS as STATUS_SUCCESS
    from counterpoint.sweep.record import RecordError as RecordError
    from counterpoint.sweep.regions import region_root as region_root
    from counterpoint.sweep.regions import sweep_root as sweep_root
    from counterpoint.sweep.status import TargetStatus as TargetStatus
    from counterpoint.sweep.status import sweep_status as sweep_status
    from counterpoint.sweep.store import StoreError as StoreError
    from counterpoint.sweep.store import UnsafeStoreError as UnsafeStoreError
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
