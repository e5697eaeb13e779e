"""The opponents of a run: a name of weights for each of `[opponents]`, which no weight update of the run reaches.

At the run's servers an opponent shares health checks and caps with the policy, and never unloads weights of another run. An
opponent by address has a separate pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from counterpoint.inference.base import InferenceError
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.run.opponents import OpponentConfig
from counterpoint.transport.outages import Outages


@asynccontextmanager
async def opponents_of(
    config: RunConfig, servers: InferencePool, outages: Outages | None = None
) -> AsyncIterator[Mapping[str, Served]]:
    """Yields each opponent by name, once a server of each is healthy, and releases them. `servers` are the run's.

    Adds outages of others' servers to `outages`.

    Raises `ConfigurationError` for opponents that cannot be, `InferenceError` if no server of one becomes healthy in time.
    """
    opponents: dict[str, Served] = {}
    try:
        for name, opponent in config.opponents.items():
            opponents[name] = served = _served(name, opponent, config, servers, outages)
            with awaiting(f"the first healthy server of opponent {name!r}", served.describe_sources()):
                try:
                    await served.start()
                except InferenceError as error:
                    raise InferenceError(f"opponent {name!r}: {error}") from error
        yield opponents
    finally:
        for served in opponents.values():
            await served.release()


def _served(
    name: str, opponent: OpponentConfig, config: RunConfig, servers: InferencePool, outages: Outages | None
) -> Served:
    called = f"the server of opponent {name!r},"
    base, limit = config.served_model or config.model, opponent.max_concurrent_requests
    try:
        if "://" not in opponent.model:
            model = base if opponent.model == "base" else opponent.model.removeprefix("run:")
            bounds, follows = read_bounds(Path(config.model)), opponent.model != "base"
            return servers.model(model, bounds=bounds, follows=follows, limit=limit, called=called)
        own = config.inference.apart([opponent.model], opponent.protocol, opponent.api_key_file, limit)
        return InferencePool(own, outages=outages).model(opponent.served_model or base, follows=True, called=called)
    except ValueError as error:
        raise ConfigurationError(f"opponents.{name}: {error}") from error
