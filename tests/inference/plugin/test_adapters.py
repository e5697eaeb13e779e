"""Loads of an adapter: what answers say while one is under way, and after one that not all ranks could take."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from counterpoint.inference.loads import STARTED, LoadClaim, Loads
from tests.support.polling import until

pytestmark = pytest.mark.slow  # vLLM is imported

CLAIM = LoadClaim("a key", "an owner")
TENSORS = frozenset({"a tensor"})
TAKEN: tuple[Any, str] = ({"0": 7}, "")
KEPT: tuple[Any, str] = (None, "ValueError: no memory")
UNREAD: tuple[Any, str] = ({}, "RuntimeError: no kernel")


@pytest.fixture(scope="module", autouse=True)
def _vllm_compiles_nothing() -> None:
    """Imports vLLM as its server does: without functions that torch compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        import counterpoint.inference.plugin.adapters  # noqa: F401


class Engine:
    """Whose ranks answer what they are told to."""

    def __init__(self) -> None:
        self.ranks = [TAKEN]
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.removed: list[int] = []
        self.output_processor = SimpleNamespace(request_states={})
        lora = SimpleNamespace(max_loras=2, max_lora_rank=8, lora_dtype="torch.float32")
        self.vllm_config = SimpleNamespace(lora_config=lora)

    async def collective_rpc(self, name: str, args: Any) -> list[Any]:
        self.calls.append(name)
        await self.gate.wait()
        return self.ranks

    async def remove_lora(self, number: int) -> None:
        self.removed.append(number)


class Server:
    """The adapters of a server, without vLLM's models and the checks of files."""

    def __init__(self, tmp_path: Path) -> None:
        from counterpoint.inference.checkpoint import ADAPTER_FILES
        from counterpoint.inference.plugin.adapter_files import AdapterFiles
        from counterpoint.inference.plugin.adapters import Adapters

        self.given = tmp_path / "given"
        self.given.mkdir()
        for name in ADAPTER_FILES:
            (self.given / name).write_text("its content")
        self.engine = Engine()
        numbers = iter(range(1, 100))
        self.models = SimpleNamespace(
            lora_requests={},
            is_base_model=lambda _name: False,
            lora_id_counter=SimpleNamespace(inc=lambda _: next(numbers)),
        )
        self.loads = Loads("here")
        adapters: Any = Adapters(self.engine, self.models, self.loads)
        files = adapters._copies = AdapterFiles()
        adapters._copy = lambda directory, number, load: (files.copy(directory, number, load), TENSORS)
        adapters._provable[TENSORS] = frozenset({"0"})
        self.adapters, self.root = adapters, files._root

    async def load(self, version: int) -> Any:
        load = self.loads.next("a", version, CLAIM)
        return await self.adapters.load("a", load, self.given, CLAIM)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def test_an_answer_that_ends_during_a_load_names_it(server: Server) -> None:
    await server.load(1)
    first = server.loads.now("a")
    server.engine.gate.clear()
    loading = asyncio.create_task(server.load(2))
    await until(lambda: len(server.engine.calls) == 2, "the engine's load")
    assert (server.adapters.origin("a", first).first, server.adapters.origin("a", first).last) == (1, 2)
    assert server.loads.now("a") == first, "what begins now may still be computed with the former one"
    server.engine.gate.set()
    held = await loading
    assert (held.layers, held.load, server.loads.now("a").number) == ({"0": f"{7:016x}"}, 2, 2)


async def test_a_newer_version_takes_the_place_of_the_older_one(server: Server) -> None:
    """By the same number and path, so that no request in flight can bring the older one back."""
    await server.load(1)
    former = server.models.lora_requests["a"]
    await server.load(2)
    newer = server.models.lora_requests["a"]
    assert (newer.lora_int_id, newer.lora_path) == (former.lora_int_id, former.lora_path)
    assert newer is not former
    assert os.readlink(newer.lora_path) == "1.2"
    assert len(list(server.root.iterdir())) == 2, "the link, and what it leads to"
    assert server.adapters.described() == {"a": {"load": 2, "version": 2, "owner": "an owner", "digest": None}}


async def test_a_change_by_vllms_own_routes_is_nobodys_load(server: Server) -> None:
    await server.load(1)
    first, request = server.loads.now("a"), server.models.lora_requests["a"]
    server.models.lora_requests["a"] = copy.copy(request)
    assert server.adapters.origin("a", first).last == 2
    assert server.adapters.described()["a"]["version"] is None
    assert server.adapters.origin("a", first).last == 2, "it is seen once"
    del server.models.lora_requests["a"]
    assert server.adapters.origin("a", first).last == 3


async def test_an_adapter_is_removed_when_no_request_can_make_the_engine_read_it_again(server: Server) -> None:
    await server.load(1)
    entered, leaving = asyncio.Event(), asyncio.Event()

    async def request() -> None:
        async with server.adapters.using("a") as used:
            assert used is not None
            entered.set()
            await leaving.wait()

    running = asyncio.create_task(request())
    await entered.wait()
    unloading = asyncio.create_task(server.adapters.unload("a"))
    await until(lambda: not server.models.lora_requests, "the beginning of the end")
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.engine.removed == []
    leaving.set()
    await running
    assert await unloading
    assert (server.engine.removed, list(server.root.iterdir())) == ([1], [])
    assert not await server.adapters.unload("a")


async def test_an_adapter_that_no_rank_takes_leaves_the_former_one(server: Server) -> None:
    from counterpoint.inference.plugin.adapters import UpdateRefused

    await server.load(1)
    first, files = server.loads.now("a"), sorted(server.root.iterdir())
    server.engine.ranks = [KEPT, KEPT]
    with pytest.raises(UpdateRefused, match=r"rank 0: ValueError: no memory; rank 1"):
        await server.load(2)
    assert server.adapters.origin("a", first).last == 1
    assert server.models.lora_requests["a"].lora_int_id == 1
    assert (sorted(server.root.iterdir()), server.engine.removed) == (files, [])


@pytest.mark.parametrize("had_one", [True, False])
@pytest.mark.parametrize("ranks", [[TAKEN, KEPT], [KEPT, TAKEN], [TAKEN, UNREAD], [UNREAD], [KEPT, UNREAD]])
async def test_an_adapter_that_some_ranks_took_is_served_no_more(
    server: Server, had_one: bool, ranks: list[tuple[Any, str]]
) -> None:
    """A mixture of two loads is neither: nothing may be computed with it, and no answer says that it was."""
    from counterpoint.inference.plugin.adapters import UpdateRefused

    first = STARTED
    if had_one:
        await server.load(1)
        first = server.loads.now("a")
    server.engine.ranks = ranks
    with pytest.raises(UpdateRefused, match="rank"):
        await server.load(2)
    origin = server.adapters.origin("a", first)
    assert origin.last == 2 + had_one, "one that no pool has loaded"
    assert "by another way" in origin.described
    assert (server.models.lora_requests, len(server.engine.removed), list(server.root.iterdir())) == ({}, 1, [])
    async with server.adapters.using("a") as used:
        assert used is None
    server.engine.ranks = [TAKEN, TAKEN]
    held = await server.load(3)
    assert server.adapters.origin("a", server.loads.now("a")).last == held.load


@pytest.mark.parametrize(("fails", "expected"), [("add", KEPT[0]), ("read", UNREAD[0])])
def test_a_rank_answers_whatever_happens(monkeypatch: pytest.MonkeyPatch, fails: str, expected: Any) -> None:
    """Else vLLM would take another rank's answer for that to the next call."""
    from counterpoint.inference.plugin import worker_digest

    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    worker: Any = worker_digest.WeightReader()
    manager = SimpleNamespace(lora_index_to_id=[None, 4], modules={})
    add: Callable[..., None] = fail if fails == "add" else lambda _request: None
    worker.model_runner = SimpleNamespace(add_lora=add, lora_manager=SimpleNamespace(_adapter_manager=manager))
    monkeypatch.setattr(worker_digest, "held_adapter", fail)
    assert worker.counterpoint_add_adapter("a", 4, "nowhere", "float32") == (expected, "RuntimeError: no room")


@pytest.mark.parametrize("name", ["lora_a_stacked", "lora_b_stacked"])
def test_an_adapter_of_the_output_layer_is_read_too(name: str) -> None:
    """vLLM has its slots in one tensor (`LogitsProcessorWithLoRA`), those of other layers in a tuple."""
    from counterpoint.inference.digest import hash_sum
    from counterpoint.inference.plugin.worker_digest import held_adapter

    slots = torch.arange(24.0).reshape(2, 1, 3, 4)
    each: list[Any] = [nn.Module(), nn.Module()]
    setattr(each[0], name, slots)
    setattr(each[1], name, (slots,))
    found = [list(held_adapter({"lm_head": module}, 1, torch.float32)) for module in each]
    assert found[0] == found[1] == [(f"lm_head.{name}#0", hash_sum(slots[1], torch.float32))]
