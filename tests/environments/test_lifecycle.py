"""Environments that hold resources: started before the first rollout, closed after the last, whatever happens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.lifecycle import metrics_of, started

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


class Odd(BaseException):
    """As test frameworks and schedulers have them: no `Exception`."""


@pytest.mark.parametrize("error", [OSError("no socket"), SystemExit(3), Odd("of its own")])
async def test_a_failure_to_start_names_the_environment_and_closes_it(error: BaseException) -> None:
    holder = Holder(at_start=error)
    with pytest.raises(ValueError, match="environment 'mine': its start failed"):
        async with started(holder, CONTEXT):  # type: ignore[arg-type]
            pytest.fail("it started")
    assert holder.calls == [CONTEXT, "close"]


@pytest.mark.parametrize("error", [OSError("busy"), Odd("busy")])
async def test_a_failure_to_close_is_logged(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with started(Holder(at_close=error), CONTEXT):  # type: ignore[arg-type]
            pass
    assert f"environment 'mine' was not closed in order: {error!r}" in caplog.text


def test_metrics_that_cannot_be_taken_cost_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Metrics:
        def __init__(self, taken: Any) -> None:
            self._taken = taken

        def take_metrics(self) -> Any:
            if isinstance(self._taken, BaseException):
                raise self._taken
            return self._taken

    wrong = {"b": float("nan"), "c": "1", 3: 4, "d": True, "e": 10**400}
    of_all = [KeyError("none"), SystemExit(1), Odd("none"), None, {"a": 1, **wrong}, {"d": 0.5}]
    assert metrics_of([Metrics(taken) for taken in of_all]) == {"a": 1, "d": 0.5}  # type: ignore[misc]
    assert "Metrics.take_metrics failed: KeyError: 'none' (in take_metrics, " in caplog.text


async def test_an_environment_without_resources() -> None:
    async with started(object(), CONTEXT):  # type: ignore[arg-type]
        pass
