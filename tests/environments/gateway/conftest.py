"""A gateway with one session of a scripted model, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from counterpoint.environments.gateway import Gateway


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    await gateway.close()
