"""The backend for Ray: what every backend must do, and what Ray adds; in a process of its own (`ray_suite.py`).

What becomes of failures that Ray has no means to cause is tried here, without Ray.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends import on_ray
from counterpoint.cluster.backends.actor_link import ActorLink
from counterpoint.cluster.backends.on_ray import RayBackend
from counterpoint.cluster.backends.ray_places import ActorName
from tests.cluster.backends.contract import JOB
from tests.support.suite_process import SUITE_SECONDS, run_suite

NAME = ActorName("job", "plain-0", "plain-0", 1)


@pytest.mark.slow
@pytest.mark.timeout(SUITE_SECONDS + 60)
def test_the_backend_for_ray_does_what_it_must(tmp_path: Path) -> None:
    run_suite(Path(__file__).with_name("ray_suite.py"), tmp_path / "suite")


async def nothing(*_: Any) -> None:
    """Stands for what is not needed."""


@pytest.mark.parametrize("broken", ["read", "write"])
async def test_a_defect_while_bytes_are_relayed_is_told_as_what_it_is(broken: str) -> None:
    class Broken(ActorLink):
        async def _ask(self, method: str, *arguments: Any, seconds: float = 0.0) -> dict[str, Any]:
            if method == broken:
                raise KeyError("data")
            if method == "read":
                await asyncio.sleep(600)
            return {"node": "node", "address": "", "over": False}

    link = Broken(NAME, 1, nothing, nothing, lambda: 0.0, lambda *_: None)
    await link.find(1, 60.0)
    async with asyncio.timeout(60.0):
        await link.run()
    assert "its bytes cannot be relayed: KeyError('data')" in str(link.loss_event())


async def test_a_defect_while_one_is_buried_hides_no_end() -> None:
    class Found(ActorLink):
        async def _ask(self, method: str, *arguments: Any, seconds: float = 0.0) -> dict[str, Any]:
            return {"node": "node", "address": "", "over": method == "read", "data": b""}

    async def bury(_: ActorLink) -> None:
        raise OSError("no such file")

    link = Found(NAME, 1, nothing, bury, lambda: 0.0, lambda *_: None)
    await link.find(1, 60.0)
    async with asyncio.timeout(60.0):
        await link.run()
    assert link.gone.is_set()


async def test_an_actor_that_never_said_where_it_is_gives_no_node_a_bad_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    async def call(what: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(what)
        return []

    backend = RayBackend(JOB.model_copy(update={"lease_seconds": 0.01}), tmp_path, 1, address="127.0.0.1:1")
    monkeypatch.setattr(backend, "_call", call)
    link = backend._link_to(NAME, nothing)
    with caplog.at_level(logging.WARNING, on_ray.__name__):
        await link.bury()
    assert "fence of worker plain-0 is over: its actor never said on which node it is" in caplog.text
    assert asked == ["removing actor job/plain-0/plain-0/1"]
    assert not backend._unreachable
    assert not link.node_is_gone
