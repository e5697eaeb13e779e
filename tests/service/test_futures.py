"""Results are kept within bounds of memory and number, and fetched as often as a client asks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

import orjson
import pytest

from counterpoint.service.tinker import futures as futures_module
from counterpoint.service.tinker.futures import FutureResult, Futures, TooMany, failure


async def test_a_poll_waits_for_the_result() -> None:
    futures = Futures(2, 1000)
    assert futures.begin("one")
    assert not futures.begin("one"), "a repetition"
    assert await futures.fetch("one", 0.0) is None
    polling = asyncio.create_task(futures.fetch("one", 100.0))
    await asyncio.sleep(0)
    await futures.complete("one", FutureResult(b"found", is_protobuf=True))
    assert await polling == FutureResult(b"found", is_protobuf=True)
    assert await futures.fetch("one", 0.0) == FutureResult(b"found", is_protobuf=True), "the answer was lost"
    with pytest.raises(KeyError):
        await futures.fetch("other", 0.0)
    futures.close()


async def test_pending_requests_are_bounded() -> None:
    futures = Futures(1, 1000)
    futures.begin("one")
    with pytest.raises(TooMany):
        futures.begin("two")
    await futures.complete("one", failure("no"))
    assert futures.begin("two")
    futures.close()


async def test_results_beyond_the_memory_are_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "KEPT_FETCHED", 3)
    futures = Futures(10, 1000)
    bodies = {f"request {index}": bytes([index]) * 400 for index in range(8)}
    for name, body in bodies.items():
        futures.begin(name)
        await futures.complete(name, FutureResult(body, is_protobuf=bool(body[0] % 2)))
        assert futures.bytes_held <= 1000
    for name, body in bodies.items():
        assert await futures.fetch(name, 0.0) == FutureResult(body, is_protobuf=bool(body[0] % 2))
    assert futures.knows("request 7")
    assert not futures.knows("request 0"), "fetched long ago"
    futures.close()


def test_a_failure_says_whose_fault_it_was() -> None:
    assert orjson.loads(failure("bad").body) == {"error": "bad", "category": "user"}
    assert orjson.loads(failure("lost", "server").body)["category"] == "server"


async def test_a_result_that_is_made_anew_counts_once() -> None:
    futures = Futures(2, 1000)
    for _ in range(3):
        futures.begin("one")
        await futures.complete("one", FutureResult(b"found"))
    assert futures.bytes_held == len(b"found")
    futures.close()


def test_what_is_taken_up_again_is_not_refused() -> None:
    futures = Futures(1, 1000)
    futures.begin("one")
    assert futures.begin("two", is_due=True)
    futures.close()


async def test_results_on_the_disk_are_bounded_and_end_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "SPILLED_SHARE", 2)
    futures = Futures(10, 1000)
    for index in range(8):
        await futures.complete(f"s1:train:0:{index}", FutureResult(bytes(500)))
    assert (futures.bytes_held, futures.bytes_spilled) == (1000, 2000)
    assert [index for index in range(8) if futures.knows(f"s1:train:0:{index}")] == [2, 3, 4, 5, 6, 7]
    futures.forget("s1:")
    assert (futures.bytes_held, futures.bytes_spilled) == (0, 0)
    futures.close()


async def test_a_samplers_client_learns_of_all_its_results_at_once() -> None:
    futures, client, other = Futures(10, 1000), ("s:sample:0", 0), ("s:sample:0", 1)
    await futures.complete("s:sample:0:0", FutureResult(b"found", is_protobuf=True))
    found, cursor = await futures.completions(client, 0, 100.0)
    assert found == [("s:sample:0:0", 5)]
    waiting = asyncio.create_task(futures.completions(client, cursor, 100.0))
    await asyncio.sleep(0)
    await futures.complete(f"s:sample:0:{10**9}", FutureResult(b"the other client's", is_protobuf=True))
    await futures.complete("s:sample:0:1", failure("no"))
    found, newer = await waiting
    assert found == [("s:sample:0:1", None)]
    assert [name for name, _ in (await futures.completions(client, cursor, 0.0))[0]] == ["s:sample:0:1"], (
        "its answer was lost"
    )
    assert (await futures.completions(client, newer, 0.0))[0] == []
    assert [name for name, _ in (await futures.completions(other, 0, 0.0))[0]] == [f"s:sample:0:{10**9}"]
    futures.retrieved(other, ["s:sample:0:1"])
    assert futures.knows("s:sample:0:1"), "it is another client's"
    futures.retrieved(client, ["s:sample:0:1"])
    assert not futures.knows("s:sample:0:1")
    with pytest.raises(KeyError):
        await futures.completions(client, 7, 0.0)
    futures.close()


async def test_a_full_disk_costs_no_result_and_holds_up_further_requests_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    futures = Futures(10, 1000)
    for index in range(4):
        futures.begin(f"request {index}")
    with monkeypatch.context() as patch:
        patch.setattr(futures_module, "_write", full)
        for index in range(4):
            await futures.complete(f"request {index}", FutureResult(bytes([index]) * 400))
        assert futures.bytes_held == 1600, "what was asked for before has its result"
        assert futures.begin("the one that tries again")
        with pytest.raises(TooMany):
            futures.begin("more")
        assert futures.begin("due", is_due=True)
        assert await futures.fetch("request 0", 0.0) == FutureResult(bytes(400))
        assert not futures.knows("request 0"), "what was fetched makes room first"
    await futures.complete("the one that tries again", FutureResult(b"found"))
    assert futures.bytes_held <= 1000
    assert futures.begin("more")
    for index in range(1, 4):
        assert await futures.fetch(f"request {index}", 0.0) == FutureResult(bytes([index]) * 400)
    futures.close()


async def test_results_go_to_the_disk_though_its_temporary_files_were_removed() -> None:
    futures = Futures(10, 1000)
    futures._directory.cleanup()
    for name in ("one", "two", "three"):
        await futures.complete(name, FutureResult(bytes(500)))
    assert (futures.bytes_held, futures.bytes_spilled) == (1000, 500)
    assert await futures.fetch("one", 0.0) == FutureResult(bytes(500))
    futures.close()


async def test_who_polls_while_a_model_is_closed_is_to_poll_again() -> None:
    futures = Futures(2, 1000)
    futures.begin("s1:train:0:1")
    polling = asyncio.create_task(futures.fetch("s1:train:0:1", 100.0))
    await asyncio.sleep(0)
    futures.cancel_all("s1:train:0")
    assert await polling is None
    futures.close()


async def test_clients_that_poll_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "MOST_CLIENTS", 2)
    futures = Futures(2, 1000)
    cursor = 0
    for number in range(5):
        assert await futures.completions(("sampler", number), 0, 0.0) == ([], futures._first)
        _, cursor = await futures.completions(("sampler", 9), cursor, 0.0)
    assert len(futures._logs) == 2
    futures.begin("sampler:9000000001")
    await futures.complete("sampler:9000000001", failure("no"))
    found, _ = await futures.completions(("sampler", 9), cursor, 0.0)
    assert found == [("sampler:9000000001", None)], "who polls is not dropped"
    futures.close()


async def test_a_request_that_gets_another_result_is_named_once() -> None:
    """One that is cancelled gets the result of its task's end, and then that of its cancel."""
    futures, client = Futures(2, 1000), ("s:sample:0", 0)
    _, cursor = await futures.completions(client, 0, 0.0)
    futures.begin("s:sample:0:1")
    for said in ("it was ended", "its client has cancelled it"):
        await futures.complete("s:sample:0:1", failure(said))
    assert (await futures.completions(client, cursor, 0.0))[0] == [("s:sample:0:1", None)]
    futures.close()


async def test_what_is_spilled_does_not_grow_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result looks at those that it spills, and not at thousands that are on the disk."""
    looked: list[str] = []

    class Counting(OrderedDict[str, FutureResult]):
        def __iter__(self) -> Iterator[str]:
            for each in super().__iter__():
                looked.append(each)
                yield each

        def items(self) -> Any:
            for each in self:
                yield each, self[each]

    monkeypatch.setattr(futures_module, "_write", lambda *_: None)
    futures = Futures(10, 1000)
    futures._held, futures._spilled = Counting(), cast(Any, Counting())
    for index in range(200):
        await futures.complete(f"request {index}", FutureResult(bytes(500)))
    assert (len(futures._held), len(futures._spilled)) == (2, 32)
    assert len(looked) <= 3 * 200
    futures._spilled.clear()
    futures.close()
