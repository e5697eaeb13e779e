"""Files read out of another process's memory by real NIXL, over TCP: as they are, or not at all."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
import tempfile
import time
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
from tests.support.fake_inference import CLAIM
from tests.support.polling import until
from transport.files.shared_memory import SHARED_MEMORY
from transport.process.launch import live_processes

pytestmark = pytest.mark.slow

SILENT_SECONDS = 60.0

CONTENT = {
    "base/model.safetensors": os.urandom(40 * PIECE_BYTES + 12_345),
    "delta.safetensors": os.urandom(4097),
    "model.safetensors": b"",
}
OFFER = Offer(3, None, CLAIM, {name: len(content) for name, content in CONTENT.items()})


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
    less = Offer(4, None, CLAIM, OFFER.files, {"base/model.safetensors": "a"}, frozenset({"base/model.safetensors"}))
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
        lent = source.start(Offer(3, None, CLAIM, {"model.safetensors": nbytes}), {"model.safetensors": file})
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
    """By the reader's library, which knows what was registered. Over TCP a peer of its own making could read it all."""
    with Lending() as source:
        lent = source.start(OFFER, files)
        elsewhere = {**lent.addresses, "delta.safetensors": 4096}
        with pytest.raises(ConnectionAbortedError, match="the weights could not be read"):
            await read_files(Readable(OFFER, lent.agent, elsewhere), target, SILENT_SECONDS)


async def test_a_slow_network_is_no_silence(
    files: dict[str, FileIO], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader says how far it is while memory is allocated and while bytes come, not only at the end."""
    said: list[str] = []
    readline = asyncio.StreamReader.readline

    async def listened(stream: asyncio.StreamReader) -> bytes:
        said.append((line := await readline(stream)).decode().strip())
        return line

    monkeypatch.setattr(asyncio.StreamReader, "readline", listened)
    with Lending() as source:
        await read_files(source.start(OFFER, files), target, SILENT_SECONDS)
    *progress, end = said
    assert end == "done"
    assert [int(each) for each in progress] == sorted(int(each) for each in progress)
    assert progress[0] == "0"
    assert progress[-1] == str(OFFER.nbytes)
    assert len({each for each in progress if 0 < int(each) < OFFER.nbytes}) > 1


async def test_memory_that_is_full_is_an_error(files: dict[str, FileIO], target: Path) -> None:
    """It is allocated before anything is read into it: a page that is missing later would kill the reader.

    A limit on the length of its files stands for the lack.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Lending() as source:
        lent = source.start(OFFER, files)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(ConnectionAbortedError, match=r"could not be read after 0 bytes: .*File too large"):
                await read_files(lent, target, SILENT_SECONDS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_reader_that_cannot_begin_is_an_error(
    files: dict[str, FileIO], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lending() as source:
        lent = source.start(OFFER, files)
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(ConnectionAbortedError, match="the reader ended with exit code 1"):
            await read_files(lent, target, SILENT_SECONDS)


def test_a_source_sees_no_secret_of_the_job_and_does_not_spin(
    files: dict[str, FileIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with Lending() as source:
        source.start(OFFER, files)
        assert source._process is not None
        process = Path(f"/proc/{source._process.pid}")
        assert b"UCX_TLS=tcp" in (environment := (process / "environ").read_bytes())
        assert b"secret" not in environment
        before, began = cpu_seconds(process), time.monotonic()
        time.sleep(1.0)
        assert cpu_seconds(process) - before < 0.5 * (time.monotonic() - began)


PARENT = """
import os, signal, sys
from inference.remote_memory.lending import Lending
from inference.sent_weights import Offer
from tests.support.fake_inference import CLAIM
with open(sys.argv[1], "rb", buffering=0) as file, Lending() as source:
    source.start(Offer(1, None, CLAIM, {"model.safetensors": 1}), {"model.safetensors": file})
    os.kill(source._process.pid, signal.SIGSTOP)
    print(source._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_source_that_hangs_does_not_outlive_a_killed_parent(shared_memory: Path) -> None:
    (shared_memory / "file").write_bytes(b"w")
    command = [sys.executable, "-c", PARENT, str(shared_memory / "file")]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await parent.communicate()
    await until(lambda: int(printed) not in {pid for pid, *_ in live_processes()}, "the source to end")


def cpu_seconds(process: Path) -> float:
    """Returns those of all threads, from proc_pid_stat(5)."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "said", ["no JSON", "{}", '{"agent": "", "addresses": []}', '{"agent": 1, "addresses": [1, 2, 3]}']
)
def test_a_source_that_says_something_else_is_an_error(
    files: dict[str, FileIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho '{said}'\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with Lending() as source, pytest.raises(ConnectionAbortedError, match="the source of files in memory said"):
        source.start(OFFER, files)


async def test_silence_ends_the_reading(files: dict[str, FileIO], target: Path) -> None:
    with Lending() as source:
        lent = source.start(OFFER, files)
        with pytest.raises(TimeoutError, match=r"for 0\.001 s, after 0 bytes"):
            await read_files(lent, target, 0.001)


def test_a_source_that_does_not_start_is_an_error(files: dict[str, FileIO], monkeypatch: pytest.MonkeyPatch) -> None:
    with Lending() as source:
        source.abort()
        with pytest.raises(ConnectionAbortedError, match="the source of files in memory ended with exit code -9"):
            source.start(OFFER, files)
    monkeypatch.setattr(lending, "START_SECONDS", 0.001)
    with Lending() as source, pytest.raises(ConnectionAbortedError, match=r"no line within 0\.001 s"):
        source.start(OFFER, files)


def test_only_files_in_memory_are_lent(files: dict[str, FileIO], tmp_path: Path) -> None:
    assert are_in_memory(files)
    (tmp_path / "on disk").touch()
    with (tmp_path / "on disk").open("rb", buffering=0) as file:
        assert not are_in_memory({**files, "model.safetensors": file})
