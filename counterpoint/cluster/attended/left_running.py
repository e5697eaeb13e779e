"""Whether an earlier process left a job running in a directory: its workers, on this machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from counterpoint.cluster.backends.keeper_link import SUFFIX, WORKERS, lives
from counterpoint.cluster.backends.link import LEASES_OF_THE_FENCE
from counterpoint.cluster.errors import BackendError, ClusterError
from counterpoint.cluster.job_files import JobFile, read_job, read_outcome
from counterpoint.cluster.remains import has_agents_of_old

logger = logging.getLogger(__name__)


def has_workers(directory: Path) -> bool:
    """Whether workers of a job in this directory live on this machine, or may on Ray, which is not asked."""
    with contextlib.suppress(ClusterError):
        if read_job(directory).backend == "ray" and read_outcome(directory) is None:
            return True
    return any(map(lives, (directory / WORKERS).glob(f"*{SUFFIX}"))) or has_agents_of_old(directory)


async def left_running(directory: Path) -> bool:
    """Whether workers of a job in this directory live, wherever its backend put them.

    If its Ray cluster does not answer, returns once nothing that was there can run any more.
    """
    try:
        job = read_job(directory)
    except ClusterError:  # none, or a damaged one
        return has_workers(directory)
    if job.backend != "ray":
        return has_workers(directory)
    return read_outcome(directory) is None and await _has_actors(job, directory)


async def _has_actors(job: JobFile, directory: Path) -> bool:
    """Asks Ray."""
    from counterpoint.cluster.backends.on_ray import CALL_SECONDS, CONNECT_SECONDS
    from counterpoint.cluster.backends.ray_cluster import RayCluster, in_thread
    from counterpoint.cluster.backends.ray_places import job_key

    cluster = RayCluster(str(job.options.get("address", "")))
    try:
        await in_thread(f"connecting to Ray at {cluster.address}", CONNECT_SECONDS, cluster.connect)
    except BackendError as error:
        fence = LEASES_OF_THE_FENCE * job.spec.lease_seconds
        logger.warning("waiting %g s, within which all ends that an earlier command left on Ray: %s", fence, error)
        await asyncio.sleep(fence)
        return False
    try:
        key = job_key(job.spec.name, directory)
        return bool(await in_thread("listing the job's actors", CALL_SECONDS, cluster.actors, key))
    finally:
        await in_thread("disconnecting from Ray", CALL_SECONDS, cluster.disconnect)
