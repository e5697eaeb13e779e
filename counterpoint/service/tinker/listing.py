"""The SDK's REST forms of clients' sessions, models and saved weights. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from counterpoint.service.config import PriceConfig
from counterpoint.service.keys import owner_name
from counterpoint.service.records.ledger import Used, owner_of, project_of
from counterpoint.service.records.structs import ModelRecord, SavedRecord, SessionRecord
from counterpoint.service.tinker.refusals import BadRequest

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

MOST_LISTED = 1000
"""Entries of one page."""


class Page(msgspec.Struct, frozen=True):
    """The part of a list that a client asks for."""

    limit: int = 20
    offset: int = 0

    def of(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Returns that part of `entries`. Raises `BadRequest` for a part that no list has."""
        if not (1 <= self.limit <= MOST_LISTED and 0 <= self.offset < 2**31):
            raise BadRequest(
                f"limit = {self.limit}, offset = {self.offset}; expected 1 to {MOST_LISTED}, and 0 to {2**31 - 1}"
            )
        return entries[self.offset : self.offset + self.limit]

    def cursor(self, total: int) -> dict[str, int]:
        """Returns the page's place in a list of this length."""
        return {"offset": self.offset, "limit": self.limit, "total_count": total}


def time_text(seconds: float) -> str:
    """Returns seconds since 1970 in the SDK's form of times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def checkpoint(record: SavedRecord) -> dict[str, Any]:
    """Returns saved weights as the SDK's `Checkpoint`."""
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": _TYPES[record.kind],
        "time": time_text(record.created),
        "tinker_path": record.path,
        "size_bytes": record.size,
        "public": False,
        "user_metadata": record.user_metadata,
        "expires_at": None if record.expires is None else time_text(record.expires),
    }


def training_run(model: ModelRecord, saved: Sequence[SavedRecord], base_model: str, seen: float) -> dict[str, Any]:
    """Returns a model as the SDK's `TrainingRun`, with its last sign of life at `seen`."""
    last = {each.kind: checkpoint(each) for each in sorted(saved, key=lambda each: each.created)}
    return {
        "training_run_id": model.model_id,
        "base_model": base_model,
        "model_owner": owner_name(model.owner),
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.rank,
        "last_request_time": time_text(max([seen, model.created, *(each.created for each in saved)])),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": model.user_metadata,
    }


class Cursor(msgspec.Struct, frozen=True):
    """The end of a page of found sessions."""

    last_created_at: str
    last_session_id: str


class StatusQuery(msgspec.Struct, frozen=True):
    """The status in a search."""

    type: str
    reasons: list[str] | None = None


class SearchOwner(msgspec.Struct, frozen=True):
    """The owner in a search."""

    type: str = "own"


class Search(msgspec.Struct, frozen=True):
    """The body of `sessions/search`."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: int = 50
    cursor: Cursor | None = None

    def page(
        self, sessions: Sequence[SessionRecord], noted: Callable[[SessionRecord], SessionRecord]
    ) -> tuple[Sequence[SessionRecord], Cursor | None]:
        """Returns the matching sessions, the newest first, from the cursor on, and the cursor of the next page.

        `noted` returns a session with its `user_metadata`. Raises `BadRequest`.
        """
        if self.owner.type not in ("own", "accessible"):
            raise BadRequest(f"owner: {self.owner.type!r} is not served: each key sees its own sessions alone")
        after = (math.inf, "")
        if self.cursor is not None:
            try:
                after = (datetime.fromisoformat(self.cursor.last_created_at).timestamp(), self.cursor.last_session_id)
            except ValueError as error:
                raise BadRequest(f"cursor.last_created_at: {error}") from error
        wanted = Page(self.limit)
        wanted.of(())
        ordered = sorted((each for each in sessions if _place(each) < after), key=_place, reverse=True)
        found = list(islice((each for each in ordered if self._matches(each, noted)), self.limit + 1))
        page = wanted.of(found)
        further = len(found) > len(page)
        return page, Cursor(time_text(page[-1].created), page[-1].session_id) if further else None

    def _matches(self, session: SessionRecord, noted: Callable[[SessionRecord], SessionRecord]) -> bool:
        if self.project_ids is not None and session.project not in self.project_ids:
            return False
        if self.statuses is not None and not any(_has(session, each) for each in self.statuses):
            return False
        name = (session.display_name or "").lower()
        by_name = self.display_name is not None and all(
            word in name for word in re.split(r"\s+", self.display_name.lower())
        )
        by_id = self.session_id is not None and self.session_id == session.session_id
        if not (by_name or by_id or (self.display_name is None and self.session_id is None)):
            return False
        given = (noted(session).user_metadata or {}) if self.user_metadata else {}
        return all(given.get(key) == value for key, value in self.user_metadata.items())


def _place(session: SessionRecord) -> tuple[float, str]:
    return session.created, session.session_id


def _has(session: SessionRecord, query: StatusQuery) -> bool:
    if session.finished:
        reason = (session.ending or {}).get("reason", {}).get("type")
        return query.type == "client_finished" and (query.reasons is None or reason in query.reasons)
    return query.type == "active"


def session_summary(session: SessionRecord, saved: Sequence[SavedRecord]) -> dict[str, Any]:
    """Returns a session as the SDK's `SessionSummary`."""
    return {
        "session_id": session.session_id,
        "created_at": time_text(session.created),
        "owner": owner_name(session.owner),
        "project_id": session.project,
        "status": {"type": "client_finished", **(session.ending or {"reason": {"type": "success"}})}
        if session.finished
        else {"type": "active"},
        "checkpoints_count": len(saved),
        "display_name": session.display_name,
        "user_metadata": session.user_metadata,
        "checkpoint_storage_bytes": sum(each.size or 0 for each in saved),
    }


class UseWindow(msgspec.Struct, frozen=True):
    """The time for which a client asks its use: the days of UTC that begin in it."""

    starting_on: Annotated[datetime, Meta(tz=True)]
    ending_before: Annotated[datetime, Meta(tz=True)]


def usage_events(
    days: Mapping[str, Mapping[str, Used]], owner: str, window: UseWindow, base_model: str, price: PriceConfig
) -> list[dict[str, Any]]:
    """Returns an owner's use as the SDK's `BillingUsageEvent`s, each of a day in place of an hour."""
    events: list[dict[str, Any]] = []
    for day in sorted(days):
        begin = datetime.fromisoformat(day).replace(tzinfo=UTC)
        for account, used in sorted(days[day].items()):
            if owner_of(account) != owner or not window.starting_on <= begin < window.ending_before:
                continue
            of_all: dict[str, Any] = {
                "bucket_start": begin.isoformat(),
                "bucket_end": (begin + timedelta(days=1)).isoformat(),
            }
            of_all |= {"base_model": base_model, "project_id": project_of(account) or None}
            for info, count, rate in (
                ({"type": "training"}, used.trained, price.trained),
                ({"type": "training"}, used.forward, price.forward),
                ({"type": "sampling_prefill", "cached": False}, used.prompt, price.prompt),
                ({"type": "sampling_sample"}, used.sampled, price.sampled),
            ):
                if count:
                    cost = {"estimated_cost_usd": rate * count / 1e6, "effective_rate_usd_per_million_tokens": rate}
                    events.append({**of_all, **(cost if rate else {}), "event_info": {**info, "token_count": count}})
    return events
