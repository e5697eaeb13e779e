"""The division of a machine's cores between the roles of a job that compute on a CPU at the same time.

With a thread for each core in each of them, every operation waits for threads whose core another role has. The job says in a
variable how the cores are to be divided, and each role that finds itself on a CPU counts them.
"""

from __future__ import annotations

import os

CORES_VARIABLE = "CLUSTER_CORES"
"""`TAKEN:ROLES`: of the cores that `TAKEN` threads leave, each of `ROLES` roles has the same number."""


def divided(taken: int, roles: int) -> dict[str, str]:
    """Returns the variable."""
    return {CORES_VARIABLE: f"{taken}:{roles}"}


def own_cores() -> int | None:
    """Returns the cores of this role, at least 1; None if nobody divides them."""
    if (division := os.environ.get(CORES_VARIABLE)) is None:
        return None
    taken, roles = map(int, division.split(":"))
    return max(1, (len(os.sched_getaffinity(0)) - taken) // roles)
