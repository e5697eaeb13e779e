"""The tenants: the rest of each owner's quota, and the refusals as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from counterpoint.service.config import PriceConfig, QuotaConfig, TinkerConfig
from counterpoint.service.keys import owner_name
from counterpoint.service.records.ledger import Ledger, Used
from counterpoint.service.records.structs import ModelRecord
from counterpoint.service.tinker.futures import TooMany
from counterpoint.service.tinker.refusals import BadRequest, OverQuota
from counterpoint.transport.config import IDENTIFIER_PATTERN

SMALL_BYTES = 4096
"""The bytes of a record that is written despite any quota."""


class Reserved:
    """The use that accepted requests may still add, by owner and request. Pure."""

    def __init__(self) -> None:
        self._amounts: dict[tuple[str, str], int] = {}
        self._sums = Counter[str]()

    def note(self, owner: str, request_id: str, amount: int) -> None:
        """Notes the use that an accepted request may add."""
        self.end(owner, request_id)
        self._amounts[owner, request_id] = amount
        self._sums[owner] += amount

    def end(self, owner: str, request_id: str) -> None:
        """Forgets a request, if it is noted."""
        self._sums[owner] -= self._amounts.pop((owner, request_id), 0)

    @contextmanager
    def held(self, owner: str, amount: int) -> Iterator[None]:
        """Counts `amount` as possible use during the block."""
        self._sums[owner] += amount
        try:
            yield
        finally:
            self._sums[owner] -= amount

    def of(self, owner: str) -> int:
        """Returns the possible use of an owner's requests."""
        return self._sums[owner]


class Tenants:
    """The owners of everything in the service, by the digests of their keys."""

    def __init__(self, config: TinkerConfig, keys: Mapping[bytes, str], ledger: Ledger) -> None:
        """`keys` has the names of digests, and `ledger` the use so far."""
        self._config = config
        self._names = {key.hex(): name for key, name in keys.items()}
        self._ledger = ledger
        self.tokens = Reserved()
        """The tokens that requests may still use."""
        self.disk = Counter[str]()
        """The bytes of records and saved weights by owner, as of the last look at the disk, with those written since."""
        self._writing, self._written = Counter[str](), Counter[str]()
        """The bytes of writes in progress, and of those during a look at the disk. They may count twice until the next look."""
        self._saves = Reserved()
        """The bytes that unanswered saves will take."""
        self._sizes: dict[tuple[bool, int, tuple[str, ...]], int] = {}
        """The bytes of the largest save of each kind."""

    @property
    def owners(self) -> list[str]:
        """All possible owners, or a single one without keys."""
        return [*self._names] or [""]

    def name(self, owner: str) -> str:
        """Returns the name of an owner."""
        return owner_name(owner, self._names.get(owner, ""))

    def quota(self, owner: str) -> QuotaConfig:
        """Returns the quota of an owner."""
        own = self._config.quotas.get(self.name(owner), QuotaConfig())
        return self._config.quota.model_copy(update=own.model_dump(exclude_unset=True))

    def check_models(self, owner: str, count: int, *, is_back: bool = False) -> None:
        """Raises `OverQuota` if an owner with `count` models open may have no further one.

        `is_back`: a model that was closed for its client's silence. Its client can wait.
        """
        most = self.quota(owner).models
        if most is not None and count >= most:
            raise OverQuota(
                f"{self.name(owner)} has {count} models open, and its quota is {most} (tinker.quota.models): finish a session, "
                "or wait until one that is silent is closed, after two minutes",
                ends_by_itself=is_back,
            )

    def check_tokens(self, owner: str, count: int = 0) -> None:
        """Raises `OverQuota` if an owner may not use `count` tokens today, and `TooMany` while others may still need them."""
        if (most := self.quota(owner).tokens_per_day) is None:
            return
        used, says = self._ledger.today(owner), f"{self.name(owner)}'s quota is {most:,} (tinker.quota.tokens_per_day)"
        if count > most:
            raise OverQuota(
                f"the request may use {count:,} tokens, and {says}: ask for fewer samples, or give max_tokens"
            )
        if used + max(count, 1) > most:
            midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            raise OverQuota(
                f"the request may use {count:,} tokens, {self.name(owner)} has used {used:,} tokens today, and {says}: "
                f"it goes on at {midnight:%Y-%m-%d %H:%M} UTC",
                ends_by_itself=True,
            )
        reserved = self.tokens.of(owner)
        if used + reserved + max(count, 1) > most:
            raise TooMany(
                f"the request may use {count:,} tokens, {used:,} are used today, requests that have no result yet may use "
                f"{reserved:,}, and {says}: wait for these"
            )

    def reserve_tokens(self, owner: str, request_id: str, count: int) -> None:
        """Keeps the tokens that a request may use, until it has a result."""
        if self.quota(owner).tokens_per_day is not None:
            self.tokens.note(owner, request_id, count)

    def ended(self, owner: str, request_id: str) -> None:
        """Gives back all that is kept for a request."""
        self.tokens.end(owner, request_id)
        self._saves.end(owner, request_id)

    @contextmanager
    def writing(self, owner: str, count: int) -> Iterator[None]:
        """Counts a record of `count` bytes that is written in the block. Raises `OverQuota`.

        A small one is written all the same: without a session nobody could delete anything.
        """
        if count > SMALL_BYTES:
            self._check_disk(owner, count)
        self._count(owner, count)
        self._writing[owner] += count
        try:
            yield
        finally:
            self._writing[owner] -= count

    def _count(self, owner: str, count: int) -> None:
        self.disk[owner] += count
        self._written[owner] += count

    def look(self) -> Callable[[Mapping[str, int]], None]:
        """Call it before a look at the disk. Returns a function that takes the found bytes by owner.

        Writes during the look always count: they may count twice until the next look, but are never left out.
        """
        self._written = Counter(self._writing)

        def found(held: Mapping[str, int]) -> None:
            self.disk.clear()
            self.disk.update(held)
            self.disk.update(self._written)

        return found

    def reserve_disk(
        self, owner: str, request_id: str, model: ModelRecord, kind: str, notes: int, *, is_due: bool = False
    ) -> None:
        """Keeps the bytes that a save will take, with those of its record, until it has a result.

        Raises `OverQuota`, and `TooMany` while nobody knows the size of such a save: others wait for the first, but not one
        that `is_due`, for which accepted requests wait.
        """
        if self.quota(owner).disk_bytes is None:
            return
        size = self._sizes.get(_kind_of(model, is_state=kind == "save_weights"), 0)
        reserved = self._saves.of(owner)
        if not size and reserved and not is_due:
            raise TooMany("what a save of this model weighs is known once an earlier one is done; send it again")
        self._check_disk(owner, size + notes + reserved)
        self._saves.note(owner, request_id, max(1, size + notes))

    def saved(self, model: ModelRecord, size: int, *, is_state: bool, is_new: bool = True) -> None:
        """Notes the size of a model's save, and counts it if it `is_new`."""
        kind = _kind_of(model, is_state=is_state)
        self._sizes[kind] = max(size, self._sizes.get(kind, 0))
        self._count(model.owner, size * is_new)

    def _check_disk(self, owner: str, count: int) -> None:
        most = self.quota(owner).disk_bytes
        if most is not None and (held := self.disk[owner]) + count > most:
            raise OverQuota(
                f"{count:,} bytes more do not fit: the saved weights and records of {self.name(owner)} have {held:,} bytes, and "
                f"its quota is {most:,} (tinker.quota.disk_bytes): delete some weights, or let them expire; they leave the disk "
                "within a minute"
            )


def _kind_of(model: ModelRecord, *, is_state: bool) -> tuple[bool, int, tuple[str, ...]]:
    """Returns the key of saves with the same size."""
    return is_state, model.rank, tuple(model.target_modules)


def check_project(project: str) -> str:
    """Returns the name of a project, or of none. Raises `BadRequest`."""
    if project and not re.fullmatch(IDENTIFIER_PATTERN, project):
        raise BadRequest(f"project_id = {project[:80]!r} is no name: expected {IDENTIFIER_PATTERN}")
    return project


def cost(used: Used, price: PriceConfig) -> float:
    """Returns the cost of use."""
    tokens = (
        used.trained * price.trained
        + used.forward * price.forward
        + used.prompt * price.prompt
        + used.sampled * price.sampled
    )
    return tokens / 1e6 + used.seconds * price.second
