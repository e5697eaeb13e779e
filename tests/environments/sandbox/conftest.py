"""A confined sandbox, where the machine allows one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from counterpoint.environments.sandbox.python_sandbox import Sandbox, SandboxUnavailable


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """Its programs may not do anything."""
    made = Sandbox(at_once=2)
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()
