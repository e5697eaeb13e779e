"""Environments that hold resources: started before the first rollout, closed after the last, whatever happens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from environments.base import EnvironmentContext
from environments.lifecycle import started

CONTEXT = EnvironmentContext("mine", Path("/nowhere"), Path("/model"), 3)


class Holder:
    """Notes what is called."""

    def __init__(self, at_start: BaseException | None = None, at_close: BaseException | None = None) -> None:
        self.calls: list[Any] = []
        self._at_start, self._at_close = at_start, at_close

    async def start(self, context: EnvironmentContext) -> None:
        self.calls.append(context)
        if self._at_start is not None:
            raise self._at_start

    async def close(self) -> None:
        self.calls.append("close")
        if self._at_close is not None:
            raise self._at_close


async def test_it_is_closed_after_the_block() -> None:
    holder = Holder()
    async with started(holder, CONTEXT):  # type: ignore[arg-type]
        assert holder.calls == [CONTEXT]
    assert holder.calls == [CONTEXT, "close"]


@pytest.mark.parametrize("error", [OSError("no socket"), SystemExit(3)])
async def test_a_failure_to_start_names_the_environment_and_closes_it(error: BaseException) -> None:
    holder = Holder(at_start=error)
    with pytest.raises(ValueError, match="environment 'mine': its start failed"):
        async with started(holder, CONTEXT):  # type: ignore[arg-type]
            pytest.fail("it started")
    assert holder.calls == [CONTEXT, "close"]


async def test_a_failure_to_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with started(Holder(at_close=OSError("busy")), CONTEXT):  # type: ignore[arg-type]
            pass
    assert "environment 'mine' was not closed in order: OSError('busy')" in caplog.text


async def test_an_environment_without_resources() -> None:
    async with started(object(), CONTEXT):  # type: ignore[arg-type]
        pass
