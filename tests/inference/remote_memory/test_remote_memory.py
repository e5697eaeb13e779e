"""Files read out of another process's memory by real NIXL, over TCP: as they are, or not at all."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path

import pytest

from inference.remote_memory import lending
from inference.remote_memory.lending import Lending, are_in_memory
from inference.remote_memory.reader import PIECE_BYTES
from inference.remote_memory.reading import read_files
from inference.sent_weights import Offer, Readable
from transport.files.shared_memory import SHARED_MEMORY

pytestmark = [pytest.mark.slow]

SILENT_SECONDS = 60.0

CONTENT = {
    "base/model.safetensors": os.urandom(PIECE_BYTES + 12_345),
    "delta.safetensors": os.urandom(4097),
    "model.safetensors": b"",
}
OFFER = Offer(3, None, {name: len(content) for name, content in CONTENT.items()})


@contextmanager
def in_memory(directory: Path) -> Iterator[dict[str, FileIO]]:
    """Yields open files, which are removed already, as the trainer does with old versions."""
    with ExitStack() as stack:
        files = {}
        for name, content in CONTENT.items():
            path = directory / name.replace("/", "-")
            path.write_bytes(content)
            files[name] = stack.enter_context(path.open("rb", buffering=0))
            path.unlink()
        yield files


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between machines, where nothing faster is


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        yield Path(directory)


@pytest.fixture
def files(shared_memory: Path) -> Iterator[dict[str, FileIO]]:
    with in_memory(shared_memory) as opened:
        yield opened


@pytest.fixture
def target(shared_memory: Path) -> Path:
    (shared_memory / "target" / "base").mkdir(parents=True)
    return shared_memory / "target"


def contents(target: Path) -> dict[str, bytes]:
    """Returns what is in the files of `target`, which are removed."""
    found = {}
    for path in sorted(target.rglob("*.safetensors")):
        found[str(path.relative_to(target))] = path.read_bytes()
        path.unlink()
    return found


async def test_files_arrive_as_they_are(files: dict[str, FileIO], target: Path) -> None:
    """Also those that were removed, of more than one piece, and of no bytes; what is left out does not come."""
    less = Offer(4, None, OFFER.files, {"base/model.safetensors": "a"}, frozenset({"base/model.safetensors"}))
    for offer in (OFFER, less):
        with Lending() as source:
            await read_files(source.start(offer, files), target, SILENT_SECONDS)
        assert contents(target) == {name: CONTENT[name] for name in offer.coming}


async def test_a_source_that_is_gone_is_an_error_and_no_wait(files: dict[str, FileIO], target: Path) -> None:
    with Lending() as source:
        lent = source.start(OFFER, files)
    with pytest.raises(ConnectionAbortedError, match=r"the weights could not be read after 0 bytes: .+"):
        await read_files(lent, target, SILENT_SECONDS)


async def test_a_source_that_dies_in_the_middle_is_an_error(shared_memory: Path, target: Path) -> None:
    """Two gigabytes of holes, whose source is killed once some of them have come."""
    nbytes = 1 << 31
    with (shared_memory / "large").open("w+b", buffering=0) as file, Lending() as source:
        file.truncate(nbytes)
        lent = source.start(Offer(3, None, {"model.safetensors": nbytes}), {"model.safetensors": file})
        reading = asyncio.create_task(read_files(lent, target, SILENT_SECONDS))
        while not reading.done() and not has_some(target):  # noqa: ASYNC110 - what a process does to a file
            await asyncio.sleep(0.001)
        source.abort()
        with pytest.raises(ConnectionAbortedError, match=r"the weights could not be read after \d+ bytes: .+"):
            await reading


def has_some(target: Path) -> bool:
    return any(path.stat().st_blocks for path in target.glob("*.safetensors"))


async def test_metadata_of_no_agent_is_an_error(target: Path) -> None:
    lent = Readable(OFFER, b"no agent", dict.fromkeys(OFFER.files, 4096))
    with pytest.raises(ConnectionAbortedError, match="the weights could not be read after 0 bytes: "):
        await read_files(lent, target, SILENT_SECONDS)


async def test_an_address_of_other_memory_is_refused(files: dict[str, FileIO], target: Path) -> None:
    """By NIXL: the source's metadata says which memory there is."""
    with Lending() as source:
        lent = source.start(OFFER, files)
        elsewhere = {**lent.addresses, "delta.safetensors": 4096}
        with pytest.raises(ConnectionAbortedError, match="the weights could not be read"):
            await read_files(Readable(OFFER, lent.agent, elsewhere), target, SILENT_SECONDS)


async def test_silence_ends_the_reading(files: dict[str, FileIO], target: Path) -> None:
    with Lending() as source:
        lent = source.start(OFFER, files)
        with pytest.raises(TimeoutError, match=r"no more of the weights could be read for 0\.001 s, after 0 bytes"):
            await read_files(lent, target, 0.001)


def test_a_source_that_does_not_start_is_an_error(files: dict[str, FileIO], monkeypatch: pytest.MonkeyPatch) -> None:
    with Lending() as source:
        source.abort()
        with pytest.raises(ConnectionAbortedError, match="the source of files in memory ended with exit code -9"):
            source.start(OFFER, files)
    monkeypatch.setattr(lending, "START_SECONDS", 0.001)
    with Lending() as source, pytest.raises(TimeoutError, match=r"did not start within 0\.001 s"):
        source.start(OFFER, files)


def test_only_files_in_memory_are_lent(files: dict[str, FileIO], tmp_path: Path) -> None:
    assert are_in_memory(files)
    (tmp_path / "on disk").touch()
    with (tmp_path / "on disk").open("rb", buffering=0) as file:
        assert not are_in_memory({**files, "model.safetensors": file})
