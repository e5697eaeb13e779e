"""Weights that come in a body: whole, or nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from counterpoint.inference.plugin import receiving
from counterpoint.inference.plugin.receiving import WeightReceiver
from counterpoint.inference.sent_weights import WeightOffer
from counterpoint.transport.files.atomic import STABLE
from counterpoint.transport.files.own_directory import OwnDirectory
from tests.support.fake_inference import CLAIM

FILES = {
    "base/model-1.safetensors": os.urandom(70_000),
    "base/model-2.safetensors": b"",
    "delta.safetensors": b"changed",
}
OFFER = WeightOffer(4, None, CLAIM, {name: len(content) for name, content in FILES.items()})
BODY = OFFER.preamble() + b"".join(FILES.values())


@pytest.fixture
def receiver(tmp_path: Path) -> WeightReceiver:
    (tmp_path / "model").mkdir()
    save_file({"a": np.zeros((10, 10), np.float32)}, tmp_path / "model" / "model.safetensors")
    return WeightReceiver(tmp_path / "model")


def left_in(memory: Path) -> list[Path]:
    return list(memory.iterdir())


async def in_pieces(body: bytes, nbytes: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), nbytes):
        yield body[start : start + nbytes]
    yield b""


@pytest.mark.parametrize("nbytes", [1000, 65_536, len(BODY)])
async def test_files_are_written_as_they_were_sent(
    memory: Path, receiver: WeightReceiver, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "_BYTES_A_WRITE", 30_000)
    offer, received = await receiver.receive(in_pieces(BODY, nbytes))
    assert offer == OFFER
    assert received.path.parent == memory
    assert received.path.stat().st_mode & 0o777 == 0o700
    assert (received.path / STABLE).exists()
    assert {name: (received.path / name).read_bytes() for name in FILES} == FILES
    received.remove()
    assert left_in(memory) == []


async def until_killed(body: bytes) -> AsyncIterator[bytes]:
    yield body
    raise ConnectionResetError("the client is gone")


async def test_what_comes_incomplete_leaves_nothing(
    memory: Path, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off anywhere, by a client that ends the body, is killed or falls silent; or too long."""

    async def until_silent(body: bytes) -> AsyncIterator[bytes]:
        yield body
        await asyncio.Event().wait()

    monkeypatch.setattr(receiving, "SILENT_SECONDS", 0.01)
    for end in (2, 40, len(OFFER.preamble()) + 100, len(BODY) - 1):
        with pytest.raises(ConnectionAbortedError, match=r"the body ends \d+ bytes"):
            await receiver.receive(in_pieces(BODY[:end], 65_536))
        with pytest.raises(ConnectionResetError):
            await receiver.receive(until_killed(BODY[:end]))
        with pytest.raises(TimeoutError, match=r"the client sent nothing for 0\.01 s"):
            await receiver.receive(until_silent(BODY[:end]))
    with pytest.raises(ValueError, match="more bytes come than were offered"):
        await receiver.receive(in_pieces(BODY + b"!", 65_536))
    with pytest.raises(ValueError, match=r"4294967295 bytes .*1048576"):
        await receiver.receive(in_pieces(b"\xff" * 4, 4))
    assert left_in(memory) == []


async def test_more_than_the_model_can_need_is_refused_before_it_is_taken(
    memory: Path, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "LEAST_LIMIT", 0)
    assert receiver.check(WeightOffer(1, None, CLAIM, {"model.safetensors": 800}), 0) == memory
    large = WeightOffer(1, None, CLAIM, {"model.safetensors": 801})
    refusal = "801 bytes are offered; for the model being served 800 are taken at most"
    with pytest.raises(ValueError, match=refusal):
        receiver.check(large, 0)
    with pytest.raises(ValueError, match=refusal):
        await receiver.receive(in_pieces(large.preamble(), 65_536))
    assert left_in(memory) == []


async def test_several_at_once_are_counted_together(
    memory: Path, receiver: WeightReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit memory beside what is coming goes to the disk; what fits neither is refused."""
    room = OFFER.nbytes
    monkeypatch.setattr(receiving, "lack_of_room", lambda nbytes, *_: f"{nbytes} are needed" if nbytes > room else "")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield BODY[:1000]
        arrived.set()
        await go_on.wait()
        yield BODY[1000:]

    first = asyncio.create_task(receiver.receive(slow()))
    await arrived.wait()
    _, second = await receiver.receive(in_pieces(BODY, 65_536))
    assert second.path.parent == tmp_path

    class Full:
        f_bavail, f_frsize = 1, 1

    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: Full)
        with pytest.raises(OSError, match=r"no room .*: \d+ are needed; 1 bytes "):
            await receiver.receive(in_pieces(BODY, 65_536))
    go_on.set()
    assert (await first)[1].path.parent == memory
    assert receiver.check(OFFER, 0) == memory


def test_a_temporary_directory_that_is_memory_has_room_as_memory_has(
    memory: Path, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "lack_of_room", lambda *_: "memory is scarce")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: directory)
        with pytest.raises(OSError, match=r"no room .*: memory is scarce; memory is scarce"):
            receiver.check(OFFER, 0)


async def test_a_base_comes_once_and_goes_with_the_next(memory: Path, receiver: WeightReceiver) -> None:
    """Also when the version that brought it was refused. A base that is not held any more is asked for again."""
    model, changes = b"weights of version 0", [b"first", b"second change"]

    def offer_of(identity: str, change: bytes) -> WeightOffer:
        files = {"base/model.safetensors": len(model), "delta.safetensors": len(change)}
        return WeightOffer(1, None, CLAIM, files, {"base/model.safetensors": identity})

    first, second = offer_of("a", changes[0]), offer_of("a", changes[1])
    assert await receiver.consider(first) == frozenset()
    _, received = await receiver.receive(in_pieces(first.preamble() + model + changes[0], 7))
    received.remove()
    held = await receiver.consider(second)
    assert held == {"base/model.safetensors"}
    assert await receiver.consider(offer_of("b", changes[1])) == frozenset()
    less = replace(second, left_out=held)
    for _ in range(2):
        _, received = await receiver.receive(in_pieces(less.preamble() + changes[1], 7))
        assert (received.path / "base" / "model.safetensors").read_bytes() == model
        assert (received.path / "delta.safetensors").read_bytes() == changes[1]
        received.remove()
    assert len(left_in(memory)) == 1
    whole = WeightOffer(2, None, CLAIM, {"model.safetensors": 1})
    _, received = await receiver.receive(in_pieces(whole.preamble() + b"w", 7))
    received.remove()
    assert left_in(memory) == [], "the next changes are not of that base"
    with pytest.raises(OSError, match=r"base/model\.safetensors does not come"):
        await receiver.receive(in_pieces(less.preamble() + changes[1], 7))
    assert left_in(memory) == []


async def test_changes_go_where_their_base_is(
    memory: Path, receiver: WeightReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that was too large for memory is on the disk. What changed fits memory, where the base could not be linked."""
    model, change = b"weights of version 0", b"change"
    files = {"base/model.safetensors": len(model), "delta.safetensors": len(change)}
    whole = WeightOffer(1, None, CLAIM, files, {"base/model.safetensors": "a"})
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(receiving, "lack_of_room", lambda nbytes, *_: f"{nbytes} are needed" if nbytes > 10 else "")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(disk))
    _, received = await receiver.receive(in_pieces(whole.preamble() + model + change, 7))
    assert received.path.parent == disk
    received.remove()
    less = replace(whole, left_out=await receiver.consider(whole))
    _, received = await receiver.receive(in_pieces(less.preamble() + change, 7))
    assert (received.path.parent, left_in(memory)) == (disk, [])
    assert (received.path / "base" / "model.safetensors").stat().st_nlink == 2
    received.remove()


async def test_two_that_come_at_once_are_counted_with_each_other(
    memory: Path, receiver: WeightReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = OFFER.nbytes
    monkeypatch.setattr(receiving, "lack_of_room", lambda nbytes, *_: f"{nbytes} are needed" if nbytes > room else "")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    both = await asyncio.gather(*(receiver.receive(in_pieces(BODY, 1000)) for _ in range(2)))
    assert sorted(received.path.parent for _, received in both) == sorted([memory, tmp_path])


def test_what_a_killed_server_held_goes_when_the_next_one_starts(memory: Path, tmp_path: Path) -> None:
    """Also if that one is sent nothing. What a live one holds stays."""
    live = OwnDirectory(memory, receiving.PREFIX)
    left = memory / f"{receiving.PREFIX}left"
    (left / "base").mkdir(parents=True)
    WeightReceiver(tmp_path)
    assert left_in(memory) == [live.path]
