"""One object that the sessions, models and samplers of all clients share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from counterpoint.service.config import ServiceConfig
from counterpoint.service.records.store import RecordStore
from counterpoint.service.samplers import Samplers
from counterpoint.service.tasks import Tasks
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.replay import Replays
from counterpoint.service.tinker.results import FutureResults
from counterpoint.service.tinker.sessions import ClientSessions
from counterpoint.service.tinker.tenants import Tenants
from counterpoint.service.tinker.weights.named import Weights
from counterpoint.transport.room import Room

MOST_WAITING_BYTES = 2**30
"""The bytes of all models' requests in memory, which wait for the journal, or for an earlier one."""


class ServiceContext:
    """The shared parts of a service."""

    def __init__(
        self,
        config: ServiceConfig,
        store: RecordStore,
        servers: Samplers,
        vocabulary: int | None,
        keys: Mapping[bytes, str],
        *,
        has_experts: bool = False,
    ) -> None:
        """`keys` has the names of the accepted ones, by digest. The model has `vocabulary` tokens, if known."""
        self.config = config
        self.store = store
        self.servers = servers
        self.vocabulary = vocabulary
        self.names = {re.sub(r":peft:.*", "", name) for name in (config.name, config.model, *config.models) if name}
        """The names of the model for clients."""
        self.base_model = config.name or config.model
        """Its name in answers to clients."""
        self.removing = asyncio.Lock()
        """Held during the removal of saved weights from the disk, and while a model or sampler begins to need some."""
        self.room = Room(MOST_WAITING_BYTES)
        self.tasks = Tasks("the service")
        self.sessions = ClientSessions(store)
        self.tenants = Tenants(config, keys, store.ledger)
        self.results = FutureResults(config, self.tasks, self.tenants.ended)
        self.replays = Replays(config, has_experts=has_experts)
        self.weights = Weights(store)

    def check_base(self, name: str) -> None:
        """Raises `BadRequest` unless the job's model has this name, or with a variant, as in `NAME:peft:262144`."""
        if re.sub(r":peft:.*", "", name) not in self.names:
            raise BadRequest(f"base_model = {name[:120]!r} is not served; expected {', '.join(sorted(self.names))}")
