"""Files and directories appear whole or not at all, even when the writer is killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.transport.files.atomic import (
    STABLE,
    as_bytes_view,
    flush_directory,
    publish_directory,
    published_steps,
    remove_directory,
    write_atomically,
    write_buffers,
)
from tests.support.polling import DEADLINE_SECONDS
from tests.support.silly_rename import PREFIX, keep_removed_files


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, b"tw", np.frombuffer(b"o!", np.uint8))
    assert path.read_bytes() == b"two!"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_replaces_none_and_is_private_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_atomically(path, b"one", mode=0o600, new=True)
    with pytest.raises(FileExistsError):
        write_atomically(path, b"two", mode=0o600, new=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_many_buffers_arrive_in_order(tmp_path: Path) -> None:
    buffers = [bytes([i % 256]) * (i % 7) for i in range(3000)]
    write_atomically(tmp_path / "a", *buffers)
    assert (tmp_path / "a").read_bytes() == b"".join(buffers)


def test_a_view_has_the_bytes_of_any_buffer_and_copies_none() -> None:
    arrays = [
        np.arange(6).astype(dtype).reshape(2, 3) for dtype in (np.uint8, np.int64, np.float16, np.float32, np.bool_)
    ]
    for array in [*arrays, np.array(7.0), np.zeros((0, 3))]:
        assert bytes(as_bytes_view(array)) == array.tobytes()
    (view := as_bytes_view(arrays[0]))[0] = 9
    assert (arrays[0][0, 0], view.format) == (9, "B")
    assert bytes(as_bytes_view(memoryview(b"abcd").cast("H"))) == b"abcd"
    for crooked in (arrays[1].T, arrays[3][:, ::2]):
        with pytest.raises(ValueError, match="is not C-contiguous"):
            as_bytes_view(crooked)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"good")

    def full(descriptor: int, buffers: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"bad")
    assert path.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_with_its_place(tmp_path: Path) -> None:
    """Python names no file where a write fails, nor where it is flushed at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large") as failed, publish_directory(tmp_path / "step_1") as directory:
            (directory / "a").write_bytes(bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed.value.filename == str(tmp_path / ".step_1.partial")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="refused") as failed, publish_directory(tmp_path / "step_1"):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert failed.value.filename is None, "it is no error of the disk"
    with pytest.raises(OSError, match="No space") as failed, publish_directory(tmp_path / "step_1"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(tmp_path / ".step_1.partial"))


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: real(fd, [views[0][: max(1, len(views[0]) // 2)]]))
    write_atomically(tmp_path / "a", b"abcdefgh", b"", b"ijk")
    assert (tmp_path / "a").read_bytes() == b"abcdefghijk"


def test_a_directory_appears_with_its_marker(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step_1"
    with publish_directory(path) as partial:
        (partial / "nested").mkdir()
        (partial / "nested" / "a").write_text("x")
        assert not path.exists()
    assert (path / STABLE).exists()
    assert (path / "nested" / "a").read_text() == "x"
    assert published_steps(tmp_path / "run") == [1]
    with pytest.raises(FileExistsError, match="already published"), publish_directory(path):
        pass


def test_a_failed_block_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), publish_directory(tmp_path / "step_1") as partial:
        (partial / "a").rename(partial / "b")
    assert list(tmp_path.iterdir()) == []


def test_only_published_steps_count(tmp_path: Path) -> None:
    for name in ("step_10", "step_2", "step_x", "other"):
        with publish_directory(tmp_path / name):
            pass
    (tmp_path / "step_3").mkdir()
    assert published_steps(tmp_path) == [2, 10]
    assert published_steps(tmp_path / "missing") == []
    remove_directory(tmp_path / "step_2")
    remove_directory(tmp_path / "step_2")
    assert published_steps(tmp_path) == [10]


def test_where_no_directory_can_be_listed_no_step_is_published(tmp_path: Path) -> None:
    """A run's directory is its orchestrator's, and the trainer looks for the steps of all runs."""
    loop, file = tmp_path / "loop", tmp_path / "file"
    loop.symlink_to(loop)
    file.touch()
    assert [published_steps(each) for each in (loop, file, tmp_path / "missing")] == [[], [], []]


def test_what_was_half_removed_is_published_again(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "old").write_text("x")
    with publish_directory(tmp_path / "step_1") as partial:
        (partial / "new").write_text("x")
    assert sorted(entry.name for entry in (tmp_path / "step_1").iterdir()) == [STABLE, "new"]


def test_a_directory_in_which_files_are_open_or_mapped_on_nfs_is_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_removed_files(monkeypatch)
    with publish_directory(tmp_path / "step_1") as partial:
        (partial / "below").mkdir()
        for name in ("open", "below/mapped", "below/other"):
            (partial / name).write_bytes(b"x" * 100)
    mapped: np.memmap[Any, Any] = np.memmap(tmp_path / "step_1" / "below" / "mapped", mode="r")
    with (tmp_path / "step_1" / "open").open("rb") as file:
        remove_directory(tmp_path / "step_1")
        assert published_steps(tmp_path) == []
        with publish_directory(tmp_path / "step_1") as partial:
            (partial / "new").write_text("x")
        assert published_steps(tmp_path) == [1]
        assert (file.read(), bytes(mapped)) == (b"x" * 100, b"x" * 100)
        left = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "step_1"]
        assert len(left) == 2
        assert all(path.name.startswith(PREFIX) for path in left)
    del mapped
    remove_directory(tmp_path / "step_9")
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"], "what was kept has gone with a later removal"


def test_another_may_move_a_directory_aside_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_removed_files(monkeypatch)
    with publish_directory(tmp_path / "step_1") as partial:
        (partial / "open").write_bytes(b"x")
    plain = Path.rename

    def after_another(path: Path, target: Path) -> Path:
        plain(path, path.with_name("moved"))
        return plain(path, target)

    with (tmp_path / "step_1" / "open").open("rb"):
        monkeypatch.setattr(Path, "rename", after_another)
        remove_directory(tmp_path / "step_1")
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_removal_takes_nothing_of_others_along(tmp_path: Path) -> None:
    for name in ("step_1", ".config.kept", ".step_2.0123abcd.kept"):
        (tmp_path / name).mkdir()
    remove_directory(tmp_path / "step_1")
    assert [path.name for path in tmp_path.iterdir()] == [".config.kept"]


@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_two_may_remove_a_directory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with publish_directory(tmp_path / "step_1") as partial:
        for name in "ab":
            (partial / name).touch()
    plain = getattr(os, call)

    def after_another(path: Any, *given: Any, **named: Any) -> None:
        """Removes what another one has just removed."""
        plain(path, *given, **named)
        if call == "rmdir" or path != tmp_path / "step_1" / STABLE:
            plain(path, *given, **named)

    monkeypatch.setattr(os, call, after_another)
    remove_directory(tmp_path / "step_1")
    monkeypatch.undo()
    assert not (tmp_path / "step_1").exists()


def test_a_directory_that_may_not_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_1").mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError):
        remove_directory(tmp_path / "step_1")


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_that_counts(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from counterpoint.transport.files.atomic import publish_directory\n"
        "with publish_directory(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'a').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "step_1")], timeout=DEADLINE_SECONDS, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert published_steps(tmp_path) == []
    with publish_directory(tmp_path / "step_1"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]


def test_a_directory_is_on_disk_before_it_appears_and_the_disk_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four things to flush, and none is flushed before all are asked for."""
    path, all_asked_for = tmp_path / "step_1", threading.Barrier(4)
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name != str(tmp_path):
            all_asked_for.wait(timeout=60)
        synced.append((name, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with publish_directory(path) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a").write_bytes(b"a")
    inside = {str(partial), *(str(partial / name) for name in ("inner", "inner/a", STABLE))}
    assert {name for name, _ in synced[:4]} == inside
    assert [appeared for _, appeared in synced] == [False] * 4 + [True]
    assert synced[4][0] == str(tmp_path)


def test_what_a_guest_puts_among_its_files_holds_up_no_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "step_1"
    with publish_directory(directory, durable=False) as partial:
        (partial / "weights").write_bytes(b"weights")
    os.mkfifo(directory / "fifo")
    (directory / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(directory)  # a socket's path has at most 107 bytes
        bound.bind("socket")
        flush_directory(directory)


def test_a_disk_that_hangs_holds_up_no_other_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, awake = threading.Event(), threading.Event()
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if "hung" in os.readlink(f"/proc/self/fd/{descriptor}"):
            hangs.set()
            assert awake.wait(timeout=60)
        sync(descriptor)

    def write(name: str) -> None:
        with publish_directory(tmp_path / name / "step_1") as partial:
            for number in range(20):
                (partial / str(number)).write_bytes(b"a")

    monkeypatch.setattr(os, "fsync", fsync)
    held = threading.Thread(target=write, args=["hung"])
    held.start()
    assert hangs.wait(timeout=60)
    write("well")
    assert (published_steps(tmp_path / "well"), published_steps(tmp_path / "hung")) == ([1], [])
    awake.set()
    held.join(timeout=60)
    assert published_steps(tmp_path / "hung") == [1]


def test_a_forked_process_publishes_as_its_parent_did(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from counterpoint.transport.files.atomic import publish_directory\n"
        "directory = Path(sys.argv[1])\n"
        "with publish_directory(directory / 'step_1'): pass\n"
        "child = os.fork()\n"
        "with publish_directory(directory / ('step_2' if child else 'step_3')): pass\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=DEADLINE_SECONDS, check=True)
    assert published_steps(tmp_path) == [1, 2, 3]


def test_a_full_disk_is_reported_with_the_files_name() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write_buffers(descriptor, [b"abc"])
    finally:
        os.close(descriptor)
