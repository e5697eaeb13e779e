"""The model that an evaluation plays: an adapter of one version under another name, or the weights that training uses.

Several adapters fit a server, so an evaluation of a run that trains an adapter has the weights of its step throughout, whatever
training loads meanwhile. Of full weights a server holds one version: rollouts of an evaluation go on across a weight update, as
those of training do, and the result names the versions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from counterpoint.inference.base import Probe, WeightUpdate
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.orchestrator.run_directory import claim_of
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.loop_health.watchdog import awaiting

SUFFIX = ".evaluation"


def adapter_name(run_id: str) -> str:
    """Returns the name of the adapter that a run's evaluations use at the servers."""
    return f"{run_id}{SUFFIX}"


@asynccontextmanager
async def serving_adapter(
    config: RunConfig, servers: InferencePool, version: int, directory: Path
) -> AsyncIterator[Served]:
    """Has `servers` serve the adapter in `directory`, proven, during the block. They unload it afterwards.

    Raises `InferenceError` if no server takes it, `OSError` and `ValueError` for a probe that cannot be read.
    """
    name = adapter_name(config.run_id)
    probe = await in_thread(Probe.read, directory / "probe.json")
    bounds, claim = await in_thread(read_bounds, Path(config.model)), await in_thread(claim_of, config)
    served = servers.model(name, bounds=bounds, claim=claim, called="the evaluations' adapter at")
    try:
        with awaiting(f"inference to load policy version {version} for an evaluation", str(directory)):
            await served.start()
            await served.update(WeightUpdate(version, directory, probe, name))
        yield served
    finally:
        await served.release()
