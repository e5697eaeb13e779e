"""Watches for new weights and loads them: the newest stable broadcast goes to the pool, then an event to the scheduler.

The order matters. First the scheduler cancels groups that the new version would make too stale, then the weights load, then
scheduling continues with the new version.

Next in the reading order of `docs/architecture.md`: `counterpoint/job/derive.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from counterpoint.inference.base import InferenceError, ModelNotServed, Probe, WeightsNotSeen, WeightUpdate
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.scheduling.events import PolicyUpdated, PolicyUpdateStarting
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.transport.files.arrivals import Arrivals
from counterpoint.transport.files.atomic import STABLE, published_steps

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Seconds between two looks for a version that the trainer has named, if the kernel does not report its arrival."""

IDLE_SECONDS = 1.0
"""Seconds between two looks while the trainer has named none that is newer."""

Report = Callable[[PolicyUpdateStarting | PolicyUpdated], None]


class Pool(Protocol):
    """The part of `inference.pool.pool.Served` that the watcher uses."""

    async def update(self, update: WeightUpdate, on_loaded: Callable[[], None] | None = None) -> None:
        """Loads the weights at all servers. Raises `InferenceError` if none took them.

        Calls `on_loaded` when requests may begin, before the proof is complete.
        """


class ListingPool(Protocol):
    """The part of `inference.pool.pool.Served` that shows which models the servers have."""

    async def check_model(self, model: str) -> None:
        """Raises `ModelNotServed` if no server has the model. Its message names a server, the model and the server's models."""


async def check_base_model(pool: ListingPool, config: RunConfig) -> None:
    """Raises `ConfigurationError` if a run of full weights finds a model of another name at the servers.

    An adapter has another name than its base model, so for an adapter this is only logged.
    """
    try:
        with awaiting("the names of the models that the servers have", "inference"):
            await pool.check_model(config.served_model or config.model)
    except ModelNotServed as error:
        advice = "name servers of the run's model, or, if they call it otherwise, set served_model to their name"
        if config.training.lora is None:
            raise ConfigurationError(f"{error}; {advice}") from error
        logger.warning("%s. The run's adapters fit only its own model: %s", error, advice)


class ForeignBroadcastError(RuntimeError):
    """A broadcast directory that this run's trainer cannot have written. The message says why."""


class PolicyWatcher:
    """Loads new policy versions into the pool.

    `report` receives the scheduler's events. `newest_step` returns the last committed step, and no newer weights can exist.
    `adapter` is the LoRA adapter's name at the servers, None for full weights. `is_used` says whether anything will be
    generated with a version. After the first, only such versions are loaded. `told` returns the version that the trainer has
    named last. The watcher opens it by its name, since on NFS the list of the directory may be a minute old.
    """

    def __init__(
        self,
        run_dir: Path,
        pool: Pool,
        adapter: str | None,
        report: Report,
        is_used: Callable[[int], bool],
        newest_step: Callable[[], int],
        told: Callable[[], int] = lambda: -1,
    ) -> None:
        self._directory = run_dir / "broadcast"
        self._pool = pool
        self._adapter = adapter
        self._report = report
        self._newest_step = newest_step
        self._told = told
        self._is_used = is_used
        self._arrivals: Arrivals | None = None
        self.version: int | None = None
        """The version with which requests begin, or None before the first load."""

    def look(self) -> None:
        """Has the watcher look at once, since the trainer has named a version."""
        if self._arrivals is not None:
            self._arrivals.notice()

    async def load_first(self, version: int) -> None:
        """Waits for a broadcast of `version` or later, and loads the newest.

        The trainer publishes `version` before its READY, and may since have trained batches that are sent again. Raises as
        `run` does.
        """
        with awaiting(f"the broadcast of policy version {version}", str(self._directory)):
            await self._follow(version, once=True)

    async def run(self) -> None:
        """Loads every newer version that is used, until cancelled.

        Raises `ForeignBroadcastError`, `ValueError` for a bad probe file, and the errors of `Pool.update`.
        """
        await self._follow(0, once=False)

    async def _follow(self, least: int, once: bool) -> None:
        """Loads each new version from `least` on, or only one with `once`."""
        with closing(Arrivals(self._directory)) as arrivals:
            self._arrivals = arrivals
            while not once or self.version is None:
                arrivals.watch()
                newest = await self._newest()
                if newest >= least and self._is_to_be_loaded(newest):
                    await self._load(newest)
                else:
                    await arrivals.wait(POLL_SECONDS if self._told() > newest else IDLE_SECONDS)

    def _is_to_be_loaded(self, version: int) -> bool:
        if self.version is not None and version <= self.version:
            return False
        self._check_own(version)  # a foreign one would hide those of this run
        return self.version is None or self._is_used(version)

    def _check_own(self, version: int) -> None:
        if version > self._newest_step():
            raise ForeignBroadcastError(
                f"{self._directory / f'step_{version}'} holds weights after step {version}, but this run has sent batches up to "
                f"step {self._newest_step()} only: another process or another run wrote it. If another orchestrator continues "
                "this run, leave it to that one; else remove the directory and resume"
            )

    async def _newest(self) -> int:
        return max(await in_thread(self._published), default=-1)

    def _published(self) -> list[int]:
        told = self._told()
        is_there = told >= 0 and (self._directory / f"step_{told}" / STABLE).exists()
        return published_steps(self._directory) + [told] * is_there

    async def _load(self, version: int) -> None:
        directory = self._directory / f"step_{version}"
        try:
            probe = await in_thread(Probe.read, directory / "probe.json")
        except FileNotFoundError:
            if (directory / STABLE).exists():
                raise
            return  # The trainer is removing it, the marker first, since it has published a newer one.
        if probe.version != version:
            raise ForeignBroadcastError(f"{directory}/probe.json is of version {probe.version}; expected {version}")
        started = time.perf_counter()
        self._report(PolicyUpdateStarting(version))

        def loaded() -> None:
            if self.version != version:
                self.version = version
                logger.info(
                    "requests begin with policy version %d (after %.3f s)", version, time.perf_counter() - started
                )
                self._report(PolicyUpdated(version))

        try:
            with awaiting(f"inference to load policy version {version}", str(directory)):
                await self._pool.update(WeightUpdate(version, directory, probe, self._adapter), loaded)
        except InferenceError as error:
            if self.version == version or version in await in_thread(self._published):
                if isinstance(error, WeightsNotSeen):
                    raise ConfigurationError(str(error)) from error
                raise
            # The trainer replaced it by newer ones, or removed it on its resume from a checkpoint.
            logger.warning("policy version %d was removed while it was loaded: %s", version, error)
            return
        loaded()
