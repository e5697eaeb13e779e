"""A directory that appears by a rename is noticed at once; without notice a wait just lasts its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from counterpoint.transport.files.arrivals import Arrivals
from counterpoint.transport.files.atomic import publish_directory, remove_directory
from tests.support.polling import until


@pytest.fixture
async def arrivals(tmp_path: Path) -> AsyncIterator[Arrivals]:
    with closing(Arrivals(tmp_path / "broadcast")) as arrivals:
        if arrivals._descriptor < 0:
            pytest.skip("this machine has no inotify instance left")
        yield arrivals


async def noticed(arrivals: Arrivals) -> None:
    """Only a notice ends this wait in time."""
    await asyncio.wait_for(arrivals.wait(3600), 60)


async def test_a_publication_ends_the_wait(tmp_path: Path, arrivals: Arrivals) -> None:
    (tmp_path / "broadcast").mkdir()
    for version in range(3):
        arrivals.watch()
        with publish_directory(tmp_path / "broadcast" / f"step_{version}", durable=False):
            pass
        await noticed(arrivals)


async def test_one_between_the_watch_and_the_wait_is_not_missed(tmp_path: Path, arrivals: Arrivals) -> None:
    (tmp_path / "broadcast").mkdir()
    arrivals.watch()
    with publish_directory(tmp_path / "broadcast" / "step_1", durable=False):
        pass
    await asyncio.sleep(0)
    await noticed(arrivals)


async def test_a_directory_that_is_made_again_is_watched_again(tmp_path: Path, arrivals: Arrivals) -> None:
    arrivals.watch()
    await arrivals.wait(0.01)  # there is none yet
    for _ in range(2):
        (tmp_path / "broadcast").mkdir()
        arrivals.watch()
        with publish_directory(tmp_path / "broadcast" / "step_1", durable=False):
            pass
        await noticed(arrivals)
        remove_directory(tmp_path / "broadcast")
        await until(lambda: arrivals._watch < 0, "the notice of the removal")


async def test_without_notice_the_wait_lasts_its_time(tmp_path: Path, arrivals: Arrivals) -> None:
    arrivals.close()
    arrivals.close()
    arrivals.watch()
    await arrivals.wait(0.01)
