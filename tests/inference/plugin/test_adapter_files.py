"""Private copies of adapters: the path of one always leads to its newest, and nothing outlives the server for long."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from counterpoint.inference.checkpoint import ADAPTER_FILES
from counterpoint.inference.plugin.adapter_files import PREFIX, AdapterFiles

HOLDER = """
import sys, time
from counterpoint.inference.plugin.adapter_files import AdapterFiles
copies = AdapterFiles()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made."""
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def broadcast(path: Path, content: str) -> Path:
    path.mkdir()
    for name in ADAPTER_FILES:
        (path / name).write_text(content)
    (path / "STABLE").touch()
    return path


def test_the_path_of_an_adapter_leads_to_its_newest_copy(tmp_path: Path, temporary_directory: Path) -> None:
    copies = AdapterFiles()
    first = copies.copy(broadcast(tmp_path / "one", "one"), 7, 1)
    path = copies.adopt(first, 7)
    other = copies.adopt(copies.copy(tmp_path / "one", 77, 2), 77)
    second = copies.copy(broadcast(tmp_path / "two", "two"), 7, 3)
    assert (path / ADAPTER_FILES[1]).read_text() == "one", "until the new one is adopted"
    assert copies.adopt(second, 7) == path
    assert (path / ADAPTER_FILES[1]).read_text() == "two"
    assert not first.exists()
    copies.discard(copies.copy(tmp_path / "one", 7, 4))
    copies.remove(7)
    assert not path.exists()
    assert (other / ADAPTER_FILES[1]).read_text() == "one"
    (own,) = temporary_directory.iterdir()
    assert sorted(entry.name for entry in own.iterdir()) == ["77", "77.2"]


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, temporary_directory: Path) -> None:
    source = broadcast(tmp_path / "one", "one")
    (source / ADAPTER_FILES[1]).unlink()
    copies = AdapterFiles()
    with pytest.raises(FileNotFoundError):
        copies.copy(source, 7, 1)
    (own,) = temporary_directory.iterdir()
    assert list(own.iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_server_left_goes_and_what_a_live_one_has_stays(temporary_directory: Path) -> None:
    environment = {"TMPDIR": str(temporary_directory)}
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=environment) for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"ready\n"
            holder.stdout.close()
        assert len(list(temporary_directory.glob(f"{PREFIX}*"))) == 2
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        copies = AdapterFiles()
        assert len(list(temporary_directory.glob(f"{PREFIX}*"))) == 2, "the live one's, and ours"
        assert copies.copy(broadcast(temporary_directory / "one", "one"), 1, 1).is_dir()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
