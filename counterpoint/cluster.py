"""Jobs of roles: workers, calls, channels, elastic training, jobs made of one function (docs/cluster.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from cluster import *
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
