"""The service's status for the page and the console: its keys, their newest records, its queue and the ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from counterpoint.service.config import QuotaConfig
from counterpoint.service.records.ledger import Used, owner_of, project_of
from counterpoint.service.records.structs import ModelRecord, SamplerRecord, SavedRecord, SessionRecord
from counterpoint.service.tinker.tenants import cost
from counterpoint.transport.files.atomic import write_atomically

if TYPE_CHECKING:  # the page's process needs none of it
    from counterpoint.service.records.store import RecordStore
    from counterpoint.service.tinker.service import Service

STATUS_FILE = "status.json"

MOST_ROWS = 2000
"""Rows of the ledger in the status, the newest first."""

MOST_SHOWN = 200
"""Sessions, models and samplers in the status, the newest of each."""

MOST_NAME = 200
"""Characters of the name of a session."""

MOST_MODELS = 20
"""Models with their newest weights in the status, those with the most updates first."""


class KeyStatus(msgspec.Struct, frozen=True):
    """One key, and the rest of its quota. None: no limit."""

    name: str
    models: int
    """Models open."""
    pending: int
    """Requests without a result."""
    tokens_today: int
    disk_bytes: int
    most_models: int | None = None
    most_tokens: int | None = None
    most_bytes: int | None = None


class Row(msgspec.Struct, frozen=True):
    """The use of a key on one day, in one project."""

    day: str
    key: str
    project: str
    used: Used
    cost: float | None = None
    """None without prices."""


class Status(msgspec.Struct, frozen=True):
    """The whole status."""

    time: float
    """When it was written, in seconds since 1970."""
    keys: dict[str, KeyStatus]
    """By owner."""
    open: dict[str, str]
    """The open models, with why each waits, or empty if the trainer takes its items."""
    ledger: list[Row]
    updates: dict[str, int] = {}
    """The updates of the models that have been open since the service's start."""
    oldest: str = ""
    """The id of the oldest request without a result, or empty."""
    since: float = 0.0
    """When that began, in seconds since 1970."""
    sessions: list[SessionRecord] = []
    """The newest ones, like the models and samplers, without clients' long notes."""
    models: list[ModelRecord] = []
    samplers: list[SamplerRecord] = []
    newest: dict[str, SavedRecord] = {}
    """The last saved weights, by model, of those with the most updates."""


def status_of(service: Service) -> Status:
    """Returns the present status."""
    tenants, config = service.tenants, service.config
    ledger, days = service.store.ledger, service.store.ledger.days()
    owners = {*tenants.owners, *(owner_of(account) for accounts in days.values() for account in accounts)}
    has_prices = any(config.price.model_dump().values())
    rows = [
        Row(
            day,
            tenants.name(owner_of(account)),
            project_of(account),
            used,
            cost(used, config.price) if has_prices else None,
        )
        for day in sorted(days, reverse=True)
        for account, used in sorted(days[day].items())
    ]

    def key(owner: str) -> KeyStatus:
        quota: QuotaConfig = tenants.quota(owner)
        return KeyStatus(
            tenants.name(owner), service.open_models(owner), service.results.of(owner).pending, ledger.today(owner),
            tenants.disk[owner], quota.models, quota.tokens_per_day, quota.disk_bytes,
        )  # fmt: skip

    since, oldest = service.results.oldest or (0.0, "")
    keys = {owner: key(owner) for owner in owners}
    return Status(time.time(), keys, service.open_reasons, rows[:MOST_ROWS], service.updates, oldest, since)


def write_status(status: Status, store: RecordStore) -> None:
    """Writes a status, with the newest records. Blocks. Raises `OSError`."""
    most_updates = sorted(status.updates, key=lambda each: -status.updates[each])[:MOST_MODELS]
    saved = [store.all_saved(model_id) for model_id in most_updates]
    whole = msgspec.structs.replace(
        status,
        sessions=[
            msgspec.structs.replace(each, display_name=(each.display_name or "")[:MOST_NAME], ending=None)
            for each in store.all(SessionRecord, f"1 ORDER BY heard DESC LIMIT {MOST_SHOWN}")
        ],
        models=store.all(ModelRecord, f"1 ORDER BY rowid DESC LIMIT {MOST_SHOWN}"),
        samplers=store.all(SamplerRecord, f"1 ORDER BY rowid DESC LIMIT {MOST_SHOWN}"),
        newest={each[0].model_id: max(each, key=lambda one: one.number) for each in saved if each},
    )
    write_atomically(store.directory / STATUS_FILE, msgspec.json.encode(whole), durable=False)
