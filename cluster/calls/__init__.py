"""Calls from a worker to the workers of another role, directly between their processes.

A worker marks methods with `remote`; others call them by a `RoleGroup`. The worker's process has a `Caller` for its own calls
and a `CallServer` for those of others.
"""

from cluster.calls.call import Call, Calls
from cluster.calls.group import DEFAULT_TIMEOUT_SECONDS, RoleGroup
from cluster.calls.remote import remote

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Call", "Calls", "RoleGroup", "remote"]
