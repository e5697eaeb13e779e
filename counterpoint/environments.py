"""Environments: the protocol, examples and rollouts, data, tools, the sandbox, the gateway, seats (docs/environments.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from environments import *
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
