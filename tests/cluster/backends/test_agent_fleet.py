"""What backends with agents share, where the contract does not reach: here over the local backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends.local import LocalBackend
from tests.cluster.backends.contract import JOB, Watched


@pytest.mark.slow
async def test_the_end_of_an_agent_frees_its_socket_even_if_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the master would wait for ever when it closes the backend."""
    backend = LocalBackend(JOB, tmp_path, 1)
    fencing = asyncio.Event()

    async def hang(*_: Any) -> bool:
        fencing.set()
        await asyncio.Event().wait()
        return False

    async with Watched(backend, tmp_path) as master:
        await master.run("program-0")
        (seat,) = backend.seats.values()
        link = seat.link
        assert link is not None
        with monkeypatch.context() as patched:
            patched.setattr(backend, "fence", hang)
            ending = asyncio.create_task(backend._end_seat(seat))
            async with asyncio.timeout(60):
                await fencing.wait()
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        assert link._socket.closed
        await backend.fence(seat, link.endpoint)
    await backend.close(end=True)
