"""The errors that users of `cluster` meet: of calls between roles, of capacity, and of a job that ended badly."""

from __future__ import annotations


class ClusterError(Exception):
    """The base of this package's errors."""


class CallError(ClusterError):
    """A call between workers failed. The message names the callee, its incarnation and the method."""


class ActorDied(CallError):
    """The callee died while the call was in flight, or is dead for good. Whether the method ran is not known."""


class ActorRestarting(CallError):
    """The callee is being started again; the method was not sent."""


class ActorBusy(CallError):
    """The callee runs a method whose deadline has passed, and takes no other plain method until it ends; this one was not run."""


class NoSuchActor(CallError):
    """The job has no worker of that role and rank, as last known to the caller; the method was not sent."""


class CallTimeout(CallError, TimeoutError):
    """The call's deadline passed without an answer. The method may still run."""


class RemoteError(CallError):
    """The method raised. `remote_type` is the exception's type name, `remote_traceback` its traceback as text."""

    def __init__(self, message: str, remote_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class CapacityError(ClusterError):
    """A bundle can never be placed. The message states each resource's shortfall: wanted, present, missing."""


class BackendError(ClusterError):
    """The backend could not do what it was asked to do; the message says what, for which worker, and why."""


class StaleMasterError(ClusterError):
    """A keeper has obeyed a master of a higher epoch: this one must stop acting at once."""


class JobExists(ClusterError):
    """The directory has a job already, perhaps since this moment."""


class JobFailed(ClusterError):
    """A job ended before its work was complete. `code` is its exit code; the message names the worker and where its log is."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
