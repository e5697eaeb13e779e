"""The errors that your code may meet where it calls `counterpoint` from Python, as a tree.

Each error stands below the one that it is a kind of, so `except CallError` catches `ActorDied`, too:

* UserError                 a file, a key, a path or an argument is wrong; the message says which, and what to do
  + Obstructed              it may go well the next time: a port is in use, or another process holds the directory
* ClusterError              a job of roles, its master or its backend cannot do what was asked
  + JobExists               the directory has a job already
  + JobFailed               the job ended before its work was complete; `code` is its exit code
  + CapacityError           no machine can ever hold what a worker needs
  + CallError               a call between workers failed
    - ActorDied             the callee died; nobody knows whether the method ran
    - ActorRestarting       the callee is being started again; the method did not run
    - ActorBusy             the callee runs a method whose deadline has passed; this one did not run
    - NoSuchActor           the job has no worker of that role and rank
    - CallTimeout           no answer came in time; the method may still run
    - RemoteError           the method raised; `remote_traceback` is its traceback
* TuneError                 an experiment, a trial or a configuration is wrong, or cannot go on
  + AbortTrialExecution     a trial can never be restored
* SweepFailed               targets of a sweep failed: a group of their exceptions
* StoreError                a sweep's storage did not answer; the request may have been carried out
* InferenceError            the servers did not answer a request
  + RequestRefused          no server will ever serve it
  + ModelNotServed          no server has the model
* RunLost                   a run takes no items any more; the message says why
* ItemFailed                an item of a run was not carried out; `by_asker`: its request is at fault
* DataError                 rows of a data set cannot be read
* SandboxUnavailable        this machine cannot confine programs

A wrong argument of a function is a `ValueError` or a `TypeError`, as in Python. The packages have more errors, for those who
write backends, stores or executors. There is no logic here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.cluster.errors import ActorBusy as ActorBusy
    from counterpoint.cluster.errors import ActorDied as ActorDied
    from counterpoint.cluster.errors import ActorRestarting as ActorRestarting
    from counterpoint.cluster.errors import CallError as CallError
    from counterpoint.cluster.errors import CallTimeout as CallTimeout
    from counterpoint.cluster.errors import CapacityError as CapacityError
    from counterpoint.cluster.errors import ClusterError as ClusterError
    from counterpoint.cluster.errors import JobExists as JobExists
    from counterpoint.cluster.errors import JobFailed as JobFailed
    from counterpoint.cluster.errors import NoSuchActor as NoSuchActor
    from counterpoint.cluster.errors import RemoteError as RemoteError
    from counterpoint.environments.data.rows import DataError as DataError
    from counterpoint.environments.sandbox.python_sandbox import SandboxUnavailable as SandboxUnavailable
    from counterpoint.inference.base import InferenceError as InferenceError
    from counterpoint.inference.base import ModelNotServed as ModelNotServed
    from counterpoint.inference.base import RequestRefused as RequestRefused
    from counterpoint.service.runs import ItemFailed as ItemFailed
    from counterpoint.service.runs import RunLost as RunLost
    from counterpoint.sweep.claim import SweepFailed as SweepFailed
    from counterpoint.sweep.store import StoreError as StoreError
    from counterpoint.transport.errors import Obstructed as Obstructed
    from counterpoint.transport.errors import UserError as UserError
    from counterpoint.tune.errors import AbortTrialExecution as AbortTrialExecution
    from counterpoint.tune.errors import TuneError as TuneError
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
