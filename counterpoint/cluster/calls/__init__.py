"""Calls from a worker to the workers of another role, directly between their processes.

A worker marks methods with `remote`; others call them by a `RoleGroup`. The worker's process has a `Caller` for its own calls
and a `CallServer` for those of others.
"""
