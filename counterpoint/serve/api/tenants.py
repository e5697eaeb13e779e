"""`/jobs/{job}/tenants`: who uses a job's service for the Tinker SDK: sessions, models, samplers, queue and ledger.

It reads what the service says of itself (`counterpoint/service/tinker/status.py`). Names are those of clients, and
so hostile.
"""

from __future__ import annotations

from typing import Any

import msgspec

from counterpoint.job.reading.rollouts.view import name_of
from counterpoint.serve.api.population import JobParameters
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.service.keys import owner_name
from counterpoint.service.records.structs import ModelRecord
from counterpoint.service.tinker.status import STATUS_FILE, Status
from counterpoint.transport.config import Config
from counterpoint.transport.files.untrusted import UntrustedFileError, read_bytes
from counterpoint.transport.typed import met

MOST_STATUS_BYTES = 8 * 2**20

READ_SECONDS = 5.0


class KeyEntry(Config):
    """One key. Null: no limit."""

    key: str
    """The name of the key."""
    models: int
    """Models open."""
    most_models: int | None
    """Its quota of these."""
    pending: int
    """Requests without a result."""
    tokens_today: int
    """Tokens of today, in UTC."""
    most_tokens: int | None
    """Its quota of these."""
    disk_bytes: int
    """Bytes of saved weights on the disk."""
    most_bytes: int | None
    """Its quota of these."""


class SessionEntry(Config):
    """One session of a client."""

    session: str
    """The id of the session."""
    key: str
    """The name of its key."""
    name: str
    """The name that its client gave it; empty if none."""
    created: float
    """The time when it began, in Unix seconds."""
    finished: bool
    """Whether its client, or a long silence, has ended it."""


class ModelEntry(Config):
    """One model."""

    model: str
    """The id of the model."""
    key: str
    """The name of its key."""
    rank: int
    """The rank of its adapter."""
    created: float
    """The time when it was asked for, in Unix seconds."""
    state: str
    """`trained`, `waits: ` and why, or `closed`."""


class SamplerEntry(Config):
    """One sampler."""

    sampler: str
    """The id of the sampler."""
    key: str
    """The name of its key."""
    weights: str
    """What it samples from: the URI of its weights, or the model; empty for the base model."""
    step: int
    """The update of the model that made the weights."""


class LedgerEntry(Config):
    """What a key has used on one day."""

    day: str
    """The day in UTC."""
    key: str
    """The name of the key."""
    project: str
    """The project; empty if there is none."""
    trained: int
    """Tokens of `forward_backward`."""
    forward: int
    """Tokens of `forward`."""
    prompt: int
    """Tokens of prompts."""
    sampled: int
    """Tokens of completions."""
    seconds: float
    """Seconds of the trainer's accelerators."""
    cost: float | None
    """The cost by `tinker.price`; null without prices."""


class TenantsAnswer(Config):
    """Who uses the service."""

    written: float
    """The time of keys, queue and ledger, in Unix seconds."""
    keys: list[KeyEntry]
    """The keys by name."""
    sessions: list[SessionEntry]
    """The newest sessions."""
    models: list[ModelEntry]
    """The newest models."""
    samplers: list[SamplerEntry]
    """The newest samplers."""
    ledger: list[LedgerEntry]
    """The ledger, the newest day first."""


@reads("/jobs/{job}/tenants", "Shows who uses a job's service for the Tinker SDK.", fresh_seconds=READ_SECONDS)
def show_tenants(jobs: Jobs, given: JobParameters) -> TenantsAnswer:
    """Answers `GET /jobs/{job}/tenants`. Raises `NotFound` where no service has run."""
    directory = jobs.get(given.job).directory / "service"
    try:
        status = msgspec.json.decode(read_bytes(directory / STATUS_FILE, MOST_STATUS_BYTES), type=met(Status))
    except (OSError, UntrustedFileError, msgspec.MsgspecError) as error:
        raise NotFound("no service for the Tinker SDK has run in this job") from error

    def key(owner: str) -> str:
        return name_of(known.name) if (known := status.keys.get(owner)) is not None else owner_name(owner)

    def state(model: ModelRecord) -> str:
        reason = status.open.get(model.model_id)
        return "closed" if reason is None else name_of(f"waits: {reason}") if reason else "trained"

    return TenantsAnswer(
        written=status.time,
        keys=[
            KeyEntry(
                key=name_of(each.name), models=each.models, most_models=each.most_models, pending=each.pending,
                tokens_today=each.tokens_today, most_tokens=each.most_tokens, disk_bytes=each.disk_bytes,
                most_bytes=each.most_bytes,
            )
            for each in sorted(status.keys.values(), key=lambda each: each.name)
        ],
        sessions=[
            SessionEntry(
                session=name_of(each.session_id), key=key(each.owner), name=name_of(each.display_name or ""),
                created=each.created, finished=each.finished,
            )
            for each in status.sessions
        ],
        models=[
            ModelEntry(
                model=name_of(each.model_id), key=key(each.owner), rank=each.rank, created=each.created, state=state(each)
            )
            for each in status.models
        ],
        samplers=[
            SamplerEntry(
                sampler=name_of(each.sampler_id), key=key(each.owner), step=each.step,
                weights=name_of(each.path or each.model_id or each.follows),
            )
            for each in status.samplers
        ],
        ledger=[
            LedgerEntry(
                day=name_of(each.day), key=name_of(each.key), project=name_of(each.project), cost=each.cost,
                **msgspec.structs.asdict(each.used),
            )
            for each in status.ledger
        ],
    )  # fmt: skip


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_tenants,)
