"""The limit on descriptors: raised as far as the process may, and a warning where that is too little."""

from __future__ import annotations

import logging
import resource

import pytest

from counterpoint.transport.process.descriptors import (
    MOST_DESCRIPTORS,
    SPARE_DESCRIPTORS,
    allow_connections,
    raise_descriptor_limit,
)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits, soft and hard, that were set; the last ones are those in force."""
    found = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: found.append(values))
    return found


def test_it_is_raised_to_what_is_wanted_and_never_lowered(limits: list[tuple[int, int]]) -> None:
    assert raise_descriptor_limit(1000) == 1024
    assert raise_descriptor_limit(2000) == 2000
    assert raise_descriptor_limit(10_000) == 4096
    assert raise_descriptor_limit(10) == 4096
    assert limits == [(1024, 4096), (2000, 4096), (4096, 4096)]


def test_without_a_hard_limit_it_is_what_is_wanted(limits: list[tuple[int, int]]) -> None:
    limits.append((1024, resource.RLIM_INFINITY))
    assert raise_descriptor_limit(10_000) == 10_000
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert raise_descriptor_limit(20_000) == 20_000
    assert limits[-1] == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_a_limit_below_the_connections_is_a_warning(
    limits: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        allow_connections(4096 - SPARE_DESCRIPTORS)
        assert caplog.text == ""
        allow_connections(4096)
    assert "may open 4096 files, and 4096 requests at once may need 4352" in caplog.text
    limits.append((1024, resource.RLIM_INFINITY))
    allow_connections(MOST_DESCRIPTORS)
    assert limits[-1][0] == MOST_DESCRIPTORS + SPARE_DESCRIPTORS
