"""The masters of a job that was submitted to Ray: detached actors, which Ray starts again whenever their processes die.

There are two, unless the job is to have no standby: whoever has the lock acts, and the other waits for it.

Each runs a master as a process of one machine does (`counterpoint/cluster/master/main.py`), in the main thread: a plain actor
has it for one method, and nobody calls another. A call is not repeated once its caller is gone, so the actor calls itself each
time that it is made. Both are on the node where the job was submitted: its directory is there, with its state, lock and socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from counterpoint.cluster import job_files
from counterpoint.cluster.backends.ray_cluster import ADDRESS, RayCluster, keep_connection
from counterpoint.cluster.backends.ray_places import NAMESPACE, job_key
from counterpoint.cluster.errors import BackendError
from counterpoint.cluster.master.control import NoMaster, ask
from counterpoint.cluster.master.main import LOG_FORMAT, MasterProcess
from counterpoint.cluster.master.standby import HungMaster

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05


class MasterActor:
    """A master of one job."""

    def __init__(self, directory: str, address: str) -> None:
        """Begins at once. `address`: that of Ray."""
        import ray

        self._directory, self._address = Path(directory), address
        ray.get_runtime_context().current_actor.run.remote()

    def run(self) -> None:
        """Runs the master to its end, and ends the actor for good."""
        import ray

        log = os.open(self._directory / job_files.MASTER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        os.environ[ADDRESS] = self._address
        keep_connection(self._address)
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())  # Ray's own is uvloop's
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        try:
            job = job_files.read_job(self._directory)
            hung = HungMaster(self._directory, job.spec.lease_seconds) if job.standby else None
            asyncio.run(MasterProcess(self._directory, job, hung=hung).run())
        except Exception:
            logger.exception("the master cannot run")
        finally:  # `exit_actor` would wait for this call, which is the actor's own
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def start_actors(directory: Path, job: job_files.JobFile) -> int:
    """Makes the actors of a job's masters that are not there; returns 0 once one answers or the job has ended.

    Raises `BackendError` if Ray cannot be reached, or cannot make them.
    """
    cluster = RayCluster(str(job.options.get("address", "")))
    cluster.connect()  # says what to do where Ray is not installed
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1 if job.standby else 0,
        "max_task_retries": -1,  # else its call to itself fails if it comes before Ray takes the actor for alive again
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    key = job_key(job.spec.name, directory)
    actors = [
        ray.remote(MasterActor).options(name=f"{key}/{name}", **options).remote(str(directory), cluster.address)
        for name in (["master", "standby"] if job.standby else ["master"])
    ]
    made = [actor.__ray_ready__.remote() for actor in actors]
    while job_files.read_outcome(directory) is None:
        with contextlib.suppress(NoMaster):
            ask(job_files.control_path(directory), {"ask": "status"})
            if (directory / job_files.MASTER_FILE).exists():  # before that it has not begun the job
                break
        time.sleep(POLL_SECONDS)
        if done := ray.wait(made, timeout=0)[0]:
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                raise BackendError(f"an actor of the job's masters cannot be made: {error}") from None
    cluster.disconnect()
    return 0
