"""Room for adapters at the servers: no key waits for ever while another samples without a pause."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.model_facts import UNBOUNDED
from counterpoint.service import samplers as module
from counterpoint.service.samplers import Metered, Samplers
from counterpoint.transport.records import Turn
from tests.support.polling import until

PROMPT = np.array([1], np.int32)


class Name:
    """A name at the servers, whose calls last a moment."""

    def __init__(self, pool: Pool, model: str) -> None:
        self.pool, self.model = pool, model

    async def generate(self, prompt: Any, sampling: Any, *, affinity: str, on_cut: Any) -> Turn:
        assert self.model in self.pool.loaded
        await asyncio.sleep(0)
        self.pool.calls[affinity] += 1
        return Turn(PROMPT, PROMPT, np.zeros(1, np.float32), 0, "stop")

    def forget_group(self, affinity: str) -> None:
        self.pool.forgotten.append((self.model, affinity))

    async def release(self) -> None:
        self.pool.loaded.discard(self.model)


class Pool:
    """Servers with adapters by name."""

    def __init__(self) -> None:
        self.loaded, self.calls, self.most = set[str](), Counter[str](), 0
        self.forgotten: list[tuple[str, str]] = []

    def model(self, model: str, *_: object, **__: object) -> Name:
        self.loaded.add(model)
        self.most = max(self.most, len(self.loaded))
        return Name(self, model)


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take a moment."""

    async def load(*_: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(module, "_load", load)


def samplers_of(pool: Pool, most: int) -> Samplers:
    return Samplers(cast(Any, pool), "base", UNBOUNDED, most, LoadClaim.of_process())


async def sample(samplers: Samplers, key: str, adapter: int) -> None:
    place = (f"{key}{adapter}", Path(f"{key}{adapter}"))
    await samplers.sample(place, PROMPT, SamplingParameters(max_tokens=1), key, key)


async def played(most: int, adapters: dict[str, int], ended: Callable[[Pool], bool]) -> Pool:
    """Each key samples without a pause by so many adapters, three calls of each at once."""
    samplers = samplers_of(pool := Pool(), most)

    async def for_ever(key: str, adapter: int) -> None:
        while True:
            await sample(samplers, key, adapter)

    tasks = [
        asyncio.create_task(for_ever(key, each))
        for key, count in adapters.items()
        for each in range(count)
        for _ in "abc"
    ]
    await until(lambda: ended(pool), "the calls of every key")
    assert pool.most <= most + 1, "the base model has its name, too"
    assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await samplers.close()
    assert pool.loaded == set()
    return pool


async def test_a_key_that_uses_all_adapters_without_a_pause_makes_room_for_another() -> None:
    pool = await played(4, {"a": 4, "b": 1}, lambda pool: pool.calls["b"] > 100)
    assert pool.calls["a"] > 100


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_every_key_is_served_however_many_adapters_others_use(most: int, counts: list[int]) -> None:
    adapters = {"abcd"[number]: count for number, count in enumerate(counts)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_load", lambda *_: asyncio.sleep(0))
        asyncio.run(played(most, adapters, lambda pool: all(pool.calls[key] > 20 for key in adapters)))


async def test_an_adapter_that_nobody_uses_makes_room() -> None:
    samplers = samplers_of(pool := Pool(), 2)
    for adapter in (0, 1, 0, 2):
        await sample(samplers, "a", adapter)
    assert pool.loaded == {"base", "a0", "a2"}
    await samplers.close()


async def test_what_a_request_had_asked_of_which_server_is_forgotten_at_its_end() -> None:
    samplers = samplers_of(pool := Pool(), 2)
    samplers.calls.resize(4)
    servers, one = Metered(samplers, "a"), SamplingParameters(max_tokens=1)
    await servers.turns(None, [(PROMPT, one, f"s.1-{index}") for index in range(3)])
    await servers.turns(("x", Path("x")), [(PROMPT, one, "s.1-0"), (PROMPT, one, "s.2-0")])
    await servers.turns(("y", Path("y")), [(PROMPT, one, "s.1-0")])
    await servers.turns(("z", Path("z")), [(PROMPT, one, "s.1-0")])  # x had to make room
    servers.end()
    assert pool.forgotten == [("base", "s.1-0"), ("y", "s.1-0"), ("z", "s.1-0")]
    await samplers.close()


async def test_a_call_that_is_cancelled_as_its_adapter_is_loaded_leaves_it_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = asyncio.get_running_loop().create_future()

    async def load(*_: object) -> None:
        await loaded

    monkeypatch.setattr(module, "_load", load)
    samplers = samplers_of(pool := Pool(), 2)
    first, other = (asyncio.create_task(sample(samplers, "a", 0)) for _ in "ab")
    await until(lambda: bool(samplers._loaded), "the load")
    [adapter] = samplers._loaded.values()
    await until(lambda: adapter.users == 2, "both calls")
    adapter.ready.add_done_callback(lambda _: first.cancel())
    loaded.set_result(None)
    await asyncio.gather(first, other, return_exceptions=True)
    assert first.cancelled()
    assert other.exception() is None
    assert "a0" in pool.loaded
    await samplers.close()
