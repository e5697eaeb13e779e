"""The limit on descriptors of this process: each connection and each open file takes one."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

MOST_DESCRIPTORS = 65_536
"""What the units in `deploy/` allow, too."""
SPARE_DESCRIPTORS = 256
"""Descriptors for what is no connection to a server: files, sockets, the agents of environments."""


def allow_connections(count: int) -> None:
    """Raises the limit so that it holds `count` connections beside everything else; logs a warning if it does not."""
    if (limit := raise_descriptor_limit(max(MOST_DESCRIPTORS, count + SPARE_DESCRIPTORS))) < count + SPARE_DESCRIPTORS:
        logger.warning(
            "this process may open %d files, and %d requests at once may need %d: raise the limit (`ulimit -Hn`, "
            "LimitNOFILE= of systemd), or lower schedule.max_inflight_rollouts",
            limit, count, count + SPARE_DESCRIPTORS,
        )  # fmt: skip


def raise_descriptor_limit(wanted: int) -> int:
    """Raises the limit to `wanted` or as far as this process may, and returns it; a higher one stays.

    Processes that it starts inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft
