"""The tenants: what each owner's quota still allows, and the refusals in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from counterpoint.service.config import PriceConfig, QuotaConfig, TinkerConfig
from counterpoint.service.keys import owner_name
from counterpoint.service.ledger import Ledger, Used
from counterpoint.service.tinker.datums import BadRequest
from counterpoint.service.tinker.refusals import OverQuota
from counterpoint.transport.config import IDENTIFIER_PATTERN


class Tenants:
    """The owners of all that is here, by the digests of their keys."""

    def __init__(self, config: TinkerConfig, keys: Mapping[bytes, str], ledger: Ledger) -> None:
        """`keys` has the names of digests; what was used is in `ledger`."""
        self._config = config
        self._names = {key.hex(): name for key, name in keys.items()}
        self._ledger = ledger
        self.disk = Counter[str]()
        """The bytes of saved weights by owner, as of the last look at the disk, and of what was saved since."""

    @property
    def owners(self) -> list[str]:
        """The owners that there can be; one, of no key, where there are no keys."""
        return [*self._names] or [""]

    def name(self, owner: str) -> str:
        """Returns the name of an owner."""
        return owner_name(owner, self._names.get(owner, ""))

    def quota(self, owner: str) -> QuotaConfig:
        """Returns what an owner may use."""
        own = self._config.quotas.get(self.name(owner), QuotaConfig())
        return self._config.quota.model_copy(update=own.model_dump(exclude_unset=True))

    def check_models(self, owner: str, count: int, *, is_back: bool = False) -> None:
        """Raises `OverQuota` if an owner with `count` models open may have no further one.

        `is_back`: one that was closed for its silence, whose client can wait.
        """
        most = self.quota(owner).models
        if most is not None and count >= most:
            raise OverQuota(
                f"{self.name(owner)} has {count} models open, and its quota is {most} (tinker.quota.models): finish a session, "
                "or wait until one that is silent is closed, after two minutes",
                ends_by_itself=is_back,
            )

    def check_tokens(self, owner: str) -> None:
        """Raises `OverQuota` if an owner may use no further tokens today."""
        most = self.quota(owner).tokens_per_day
        if most is not None and (count := self._ledger.today(owner)) >= most:
            midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            raise OverQuota(
                f"{self.name(owner)} has used {count:,} tokens today, and its quota is {most:,} (tinker.quota.tokens_per_day): "
                f"it goes on at {midnight:%Y-%m-%d %H:%M} UTC",
                ends_by_itself=True,
            )

    def check_disk(self, owner: str) -> None:
        """Raises `OverQuota` if an owner may save no further weights."""
        most = self.quota(owner).disk_bytes
        if most is not None and (count := self.disk[owner]) >= most:
            raise OverQuota(
                f"the saved weights of {self.name(owner)} have {count:,} bytes, and its quota is {most:,} "
                "(tinker.quota.disk_bytes): delete some, or let them expire; they leave the disk within a minute"
            )


def check_project(project: str) -> str:
    """Returns the name of a project, or of none. Raises `BadRequest`."""
    if project and not re.fullmatch(IDENTIFIER_PATTERN, project):
        raise BadRequest(f"project_id = {project[:80]!r} is no name: expected {IDENTIFIER_PATTERN}")
    return project


def cost(used: Used, price: PriceConfig) -> float:
    """Returns what use costs."""
    tokens = (
        used.trained * price.trained
        + used.forward * price.forward
        + used.prompt * price.prompt
        + used.sampled * price.sampled
    )
    return tokens / 1e6 + used.seconds * price.second
