"""The answer to an update begins once what comes is computed with the new weights, and the load goes on whoever hangs up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from counterpoint.inference.base import HeldWeights
from counterpoint.inference.loads import Load, LoadClaim, Loads
from tests.support.polling import until

pytestmark = pytest.mark.slow  # vLLM is imported
CLAIM = LoadClaim("a key", "an owner")


@pytest.fixture(scope="module", autouse=True)
def _vllm_compiles_nothing() -> None:
    """Imports vLLM as its server does: without functions that torch compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        import counterpoint.inference.plugin.routes  # noqa: F401


class Engine:
    """What the updater calls, in order. The load ends when it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded = asyncio.Event()
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.vllm_config, self.model_config = SimpleNamespace(lora_config=None), SimpleNamespace(dtype="torch.float32")

    async def _pause(self, **_: Any) -> None:
        self.calls.append("pause")

    async def collective_rpc(self, name: str, args: Any) -> list[Any]:
        self.calls.append(name)
        await self.loaded.wait()
        return [({"0": 7}, True)]

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


async def test_requests_begin_behind_the_load_and_with_its_number() -> None:
    from counterpoint.inference.plugin.update import Updater

    engine: Any = Engine()
    updater = Updater(engine, None, Loads("here"))
    begun: list[tuple[int, list[str]]] = []

    def begin() -> None:
        begun.append((updater.loads.now(None).number, list(engine.calls)))

    former_salt = updater.cache_salt
    switching = asyncio.create_task(updater._switch(Load(1, 5, "an owner"), Path("nowhere"), CLAIM, begin))
    await until(lambda: bool(begun), "the beginning")
    assert begun == [(1, ["pause", "counterpoint_load"])]
    assert not switching.done()
    assert updater.cache_salt != former_salt, "what begins now shares no prefix with what was computed before"
    engine.loaded.set()
    assert await switching == {"0": f"{7:016x}"}
    assert engine.calls[2:] == ["version 5@1", "resume"]


async def test_the_digest_is_of_all_slices_that_all_ranks_read() -> None:
    from counterpoint.inference.plugin.update import Updater

    engine: Any = Engine()
    slices = [
        [({"layers.0.a": 1}, False), ({"layers.0.a": 2}, False)],
        [({"layers.1.a": 4}, False), ({"layers.0.b": 8}, True)],
        [({"layers.1.b": 16}, True), ({}, True)],
    ]

    async def answer(name: str, args: Any) -> list[Any]:
        engine.calls.append(name)
        return slices.pop(0)

    engine.collective_rpc = answer
    updater = Updater(engine, None, Loads("here"))
    found = await updater._switch(Load(1, 5, "an owner"), Path("nowhere"), CLAIM, lambda: None)
    assert found == {"0": f"{1 + 2 + 8:016x}", "1": f"{4 + 16:016x}"}
    assert engine.calls == ["pause", "counterpoint_load", "version 5@1", "resume", *["counterpoint_read_on"] * 2]


async def test_what_proves_the_weights_is_found_once_before_the_first_load_and_again_after_an_error() -> None:
    from counterpoint.inference.plugin.update import Updater

    engine: Any = Engine()
    engine.model_config = SimpleNamespace(dtype="torch.float32", model="the model", hf_config=SimpleNamespace())
    is_broken = False

    async def answer(name: str, args: Any) -> list[Any]:
        engine.calls.append(name)
        if is_broken:
            raise OSError("the disk is away")
        return [{"layers.0.a": 7}] if name == "counterpoint_written" else [({"layers.0.a": 7}, True)]

    engine.collective_rpc = answer
    updater = Updater(engine, None, Loads("here"))
    updater.find_provable_layers()
    assert engine.calls == []
    given_up = asyncio.create_task(updater._found_provable())
    await asyncio.sleep(0)
    given_up.cancel()
    assert await updater._found_provable() == await updater._found_provable() == frozenset({"0"})
    assert engine.calls == ["counterpoint_written", "counterpoint_read"], "a load that is given up ends nothing"
    is_broken = True
    updater.find_provable_layers()
    with pytest.raises(OSError, match="the disk is away"):
        await updater._found_provable()
    is_broken = False
    assert await updater._found_provable() == frozenset({"0"})


async def test_a_server_of_adapters_finds_nothing_before_its_first_load() -> None:
    from counterpoint.inference.plugin.update import Updater

    engine: Any = Engine()
    engine.vllm_config = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=1, max_lora_rank=8, lora_dtype="float32")
    )
    Updater(engine, SimpleNamespace(), Loads("here")).find_provable_layers()
    await asyncio.sleep(0)
    assert engine.calls == []


class StandIn:
    """An updater whose loads begin, end and fail as they are told to."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.refuses = False
        self.loads = Loads("here")
        self.done = 0

    async def update(self, version: int, directory: Path, adapter: str | None, claim: LoadClaim, on_begun: Any) -> Any:
        from counterpoint.inference.plugin.adapters import UpdateRefused

        if self.refuses:
            raise UpdateRefused("these are not weights")
        on_begun()
        await self.ends.wait()
        self.done += 1
        return HeldWeights("float32", {"0": "7"}, self.done)


async def asked(updater: StandIn) -> tuple[Any, Response]:
    from counterpoint.inference.plugin.routes import CounterpointRoutes

    routes: Any = CounterpointRoutes()
    routes.updater, routes.loading = updater, set()
    fields = {"version": 5, "directory": "nowhere", "adapter": None, "claim": CLAIM.encode()}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": orjson.dumps(fields), "more_body": False}

    return routes, await routes.update(Request({"type": "http", "method": "POST", "headers": []}, receive))


async def test_the_answer_begins_before_the_load_ends() -> None:
    updater = StandIn()
    _, answer = await asked(updater)
    assert isinstance(answer, StreamingResponse)
    updater.ends.set()
    body = b"".join([bytes(part) async for part in answer.body_iterator])
    assert orjson.loads(body) == {"version": 5, "held": {"dtype": "float32", "layers": {"0": "7"}, "load": 1}}


async def test_a_refusal_says_so_by_its_status() -> None:
    updater = StandIn()
    updater.refuses = True
    _, answer = await asked(updater)
    assert answer.status_code == 422


async def test_a_client_that_hangs_up_ends_no_load() -> None:
    updater = StandIn()
    routes, answer = await asked(updater)
    assert isinstance(answer, StreamingResponse)
    reading = asyncio.ensure_future(anext(aiter(answer.body_iterator)))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    updater.ends.set()
    (loading,) = routes.loading
    assert (await loading).status_code == 200
    assert updater.done == 1
