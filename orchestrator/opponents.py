"""The opponents of a run: a pool of requests for each of `[opponents]`, which no weight update of the run reaches.

A pool of its own, also at the run's own servers: it names another model there, it needs no proof of the run's weights, and it
never unloads what another run owns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from counterpoint.inference.base import InferenceError
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.inference.pool.sources import OPERATOR_FILE
from counterpoint.orchestrator.loop_health.watchdog import awaiting
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.run.config import RunConfig
from counterpoint.run.opponents import OpponentConfig
from counterpoint.transport.outages import Outages


@asynccontextmanager
async def opponents_of(config: RunConfig, outages: Outages | None = None) -> AsyncIterator[Mapping[str, InferencePool]]:
    """Yields the pool of each opponent by name, once a server of each is healthy. Closes them. `outages` gets their servers'.

    Raises `ConfigurationError` for opponents that cannot be, `InferenceError` where no server of one becomes healthy in time.
    """
    pools: dict[str, InferencePool] = {}
    try:
        for name, opponent in config.opponents.items():
            pools[name] = pool = _pool_of(name, opponent, config, outages)
            with awaiting(f"the first healthy server of opponent {name!r}", pool.describe_sources()):
                try:
                    await pool.start()
                except InferenceError as error:
                    raise InferenceError(f"opponent {name!r}: {error}") from error
        yield pools
    finally:
        for pool in pools.values():
            await pool.close()


def _pool_of(name: str, opponent: OpponentConfig, config: RunConfig, outages: Outages | None) -> InferencePool:
    called = f"the server of opponent {name!r},"
    base = config.served_model or config.model
    limits: dict[str, Any] = {
        "max_concurrent_requests_per_server": opponent.max_concurrent_requests,
        "capacity": "fixed",
    }
    try:
        if "://" not in opponent.model:
            model = base if opponent.model == "base" else opponent.model.removeprefix("run:")
            servers = config.inference.model_copy(update=limits)
            bounds, operator_file = read_bounds(Path(config.model)), config.output_dir / OPERATOR_FILE
            follows = opponent.model != "base"
            return InferencePool(
                servers,
                model,
                operator_file=operator_file,
                bounds=bounds,
                follows=follows,
                outages=outages,
                called=called,
            )
        own: dict[str, Any] = {"dns": None, "urls_file": None, "urls": [opponent.model], "identity_file": None}
        own |= {"protocol": opponent.protocol, "api_key_file": opponent.api_key_file}
        servers = config.inference.model_copy(update=limits | own)
        model = opponent.served_model or base
        return InferencePool(servers, model, follows=True, outages=outages, called=called)
    except ValueError as error:
        raise ConfigurationError(f"opponents.{name}: {error}") from error
