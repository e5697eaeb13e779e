"""What every store must do, and that one which does not is refused."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from counterpoint.sweep.open_store import open_proven, open_store, prove
from counterpoint.sweep.status import sweep_status
from counterpoint.sweep.store import (
    LARGEST_OBJECT_BYTES,
    Conflict,
    StoreBusy,
    Stored,
    StoreError,
    StoreUnavailable,
    UnsafeStoreError,
)
from counterpoint.sweep.stores.gs import GoogleStore
from counterpoint.sweep.stores.local import GUARDS, MARK_BYTES, LocalStore
from counterpoint.sweep.stores.s3 import S3Store
from perf.chaos.s3_server import Application, s3_application, serving
from tests.support.polling import DEADLINE_SECONDS
from tests.sweep.gcs_server import Bucket, google_server

pytestmark = pytest.mark.slow  # the servers' imports


def test_a_write_happens_only_on_its_condition(root: str) -> None:
    store = open_store(root)
    assert store.read("a") is None
    first = store.write("a", b"one", None)
    assert store.read("a") == Stored(b"one", first)
    with pytest.raises(Conflict):
        store.write("a", b"two", None)
    second = store.write("a", b"two", first)
    with pytest.raises(Conflict):
        store.write("a", b"three", first)
    assert store.read("a") == Stored(b"two", second)
    with pytest.raises(Conflict):
        store.write("absent", b"one", second)


def test_keys_are_those_of_the_root_alone(root: str) -> None:
    store, deeper, beside = open_store(root), open_store(f"{root}/deeper"), open_store(f"{root}-beside")
    assert store.keys() == []
    for each, key in ((store, "b"), (store, "a.1"), (deeper, "c"), (beside, "d")):
        each.write(key, b"data", None)
    assert sorted(store.keys()) == ["a.1", "b"]
    store.discard("b")
    assert store.keys() == ["a.1"]


@pytest.mark.parametrize("root", ["local", "s3", "gs"], indirect=True)
def test_what_is_far_too_large_is_not_read_whole(root: str) -> None:
    store = open_store(root)
    store.write("a", b"x" * (2 * LARGEST_OBJECT_BYTES), None)
    stored = store.read("a")
    assert stored is not None
    assert len(stored.data) == LARGEST_OBJECT_BYTES + 1


def test_one_of_many_writers_wins(root: str) -> None:
    """Each adds to a number as often as it must try: what is confirmed is what is there."""
    store, additions, threads = open_store(root), 10, 4
    store.write("sum", b"0 start", None)

    def add(name: int) -> None:
        done = 0
        while done < additions:
            stored = store.read("sum")
            assert stored is not None
            number = int(stored.data.split()[0]) + 1
            try:
                store.write("sum", f"{number} {name} {done}".encode(), stored.version)
            except Conflict:
                continue
            done += 1

    workers = [threading.Thread(target=add, args=(name,)) for name in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stored = store.read("sum")
    assert stored is not None
    assert int(stored.data.split()[0]) == additions * threads


def test_a_store_that_keeps_its_conditions_is_accepted_and_left_clean(root: str) -> None:
    store = open_store(root)
    prove(store)
    assert store.keys() == []


@pytest.fixture
def slow_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that takes a name's next write a twentieth of a second after the last; Google's takes it after a second."""
    bucket = Bucket()
    bucket.interval = 0.05
    monkeypatch.setattr(GoogleStore, "write_interval", 0.05)
    with google_server(bucket) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield bucket


def test_a_google_storage_is_proven_at_the_pace_that_it_allows(slow_bucket: Bucket) -> None:
    prove(GoogleStore("bucket", "sweep"))
    assert slow_bucket.refused_for_pace == 0
    assert slow_bucket.objects == {}


def test_proving_tries_again_where_a_storage_asks_for_patience(
    slow_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GoogleStore, "write_interval", 0.01)
    slow_bucket.interval, slow_bucket.busy = 0.0, 3
    prove(GoogleStore("bucket", "sweep"))
    assert slow_bucket.refused_for_pace == 3
    slow_bucket.busy = 1000
    with pytest.raises(StoreBusy, match="429"):
        prove(GoogleStore("bucket", "sweep"))


@pytest.fixture(params=["s3", "gs"])
def flaky(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Callable[[int], None]]]:
    """A root, and what makes its next requests fail with a 503."""
    monkeypatch.setattr("counterpoint.sweep.store.FIRST_PAUSE_SECONDS", 0.01)
    if request.param == "gs":
        bucket = Bucket()
        monkeypatch.setattr(GoogleStore, "write_interval", 0.0)
        with google_server(bucket) as address:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
            yield "gs://bucket/flaky", lambda count: setattr(bucket, "unavailable", count)
        return
    request.getfixturevalue("s3_bucket")
    application, left = s3_application(), [0]

    def answer(environment: dict[str, Any], start_response: Any) -> Any:
        if left[0] == 0:
            return application(environment, start_response)
        left[0] -= 1
        start_response("503 Slow Down", [("Content-Length", "0")])
        return [b""]

    with serving(answer) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        boto3.client("s3").create_bucket(Bucket="flaky")
        yield "s3://flaky/sweep", lambda count: left.__setitem__(0, count)


def test_a_storage_that_is_unavailable_for_a_moment_costs_neither_a_worker_nor_a_table(
    flaky: tuple[str, Callable[[int], None]],
) -> None:
    root, fail = flaky
    fail(3)
    open_proven(root)
    open_store(root).write("a", b"no record", None)
    fail(3)
    assert [(each.target_id, each.state) for each in sweep_status(root, ["b"])] == [
        ("a", "UNREADABLE"),
        ("b", "PENDING"),
    ]
    fail(1000)
    for use in (lambda: prove(open_store(root)), lambda: sweep_status(root)):
        with pytest.raises(StoreUnavailable, match=r"503|Slow Down"):
            use()


def forgetful(application: Application) -> Application:
    """S3 as some stores have it: conditions are taken and ignored."""

    def forget(environment: dict[str, Any], start_response: Any) -> Any:
        for header in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
            environment.pop(header, None)
        return application(environment, start_response)

    return forget


def test_an_s3_that_ignores_conditions_is_refused(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(forgetful(s3_application())) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        boto3.client("s3").create_bucket(Bucket="forgetful")
        with pytest.raises(UnsafeStoreError, match="only if there is none, it wrote"):
            prove(S3Store("forgetful", "sweep"))


def test_a_google_storage_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket()
    bucket.ignores_conditions = True
    monkeypatch.setattr(GoogleStore, "write_interval", 0.0)
    with google_server(bucket) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        with pytest.raises(UnsafeStoreError, match="two workers would win one target"):
            prove(GoogleStore("bucket", "sweep"))
    assert bucket.objects == {}


def test_a_store_that_cannot_be_reached_says_where(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.sweep.store.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"s3://bucket/sweep/\.probe-\w+ cannot be written: .*127\.0\.0\.1:9"):
        prove(S3Store("bucket", "sweep"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"gs://bucket/sweep/\.probe-\w+ cannot be written"):
        prove(GoogleStore("bucket", "sweep"))


@contextlib.contextmanager
def hanging_up() -> Iterator[str]:
    """A server that ends each connection before it answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the listener's end
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("is_there", [False, True], ids=["refuses", "hangs_up"])
def test_a_lost_connection_passes(scheme: str, is_there: bool, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection counts as a 503 does: the request is sent again."""
    with hanging_up() if is_there else contextlib.nullcontext("http://127.0.0.1:9") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        store = open_store(f"{scheme}://bucket/sweep")
        for use in (lambda: store.read("a"), lambda: store.write("a", b"", None), store.keys):
            with pytest.raises(StoreUnavailable, match=f"{scheme}://bucket/sweep"):
                use()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_a_network_file_system_that_does_not_answer_for_a_moment_passes(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(os, "open", fails)
    for use in (store.keys, lambda: store.read("a")):
        with pytest.raises(StoreError, match=os.strerror(code)) as raised:
            use()
        assert isinstance(raised.value, StoreUnavailable) == (code != errno.EACCES)


def test_a_google_storage_that_cannot_be_reached_leaves_no_thread_that_goes_on_trying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    before = set(threading.enumerate())
    store = GoogleStore("bucket", "sweep")
    read, write = functools.partial(store.read, "a"), functools.partial(store.write, "a", b"", None)
    uses: list[Callable[[], object]] = [store.keys, read, write, functools.partial(store.discard, "a")]
    for use in uses:
        with pytest.raises(StoreError, match="gs://bucket/sweep/"):
            use()
    assert set(threading.enumerate()) <= before


def test_a_bucket_that_does_not_exist_is_an_error_and_not_an_empty_sweep(s3_bucket: str) -> None:
    store = open_store("s3://no-such-bucket/sweep")
    for use in (store.keys, lambda: store.read("a"), lambda: prove(store)):
        with pytest.raises(StoreError, match="NoSuchBucket"):
            use()


@pytest.mark.parametrize(
    ("root", "error", "message"),
    [
        ("http://host/x", UnsafeStoreError, "none is known for http://; there are a local path, file://, memory://"),
        ("", ValueError, "root is empty"),
        ("file://", ValueError, "write file:///absolute/path"),
        ("file://host/x", ValueError, "write file:///absolute/path"),
        ("s3://", ValueError, "s3://bucket/prefix"),
        ("gs:///x", ValueError, "gs://bucket/prefix"),
        ("gs:/bucket/x", ValueError, "gs://bucket/x"),
        (str(Path("s3://bucket/x")), ValueError, "s3://bucket/x"),
    ],
)
def test_a_root_that_is_none_is_refused_with_a_reason(root: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_store(root)


@pytest.mark.parametrize(
    ("root", "variable", "value"),
    [
        ("gs://private/sweep", "GOOGLE_APPLICATION_CREDENTIALS", "/no-such-file.json"),
        ("s3://private/sweep", "AWS_PROFILE", "nobody"),
    ],
)
def test_credentials_that_cannot_be_had_are_an_error_of_the_store(
    root: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreError, match=f"{root} cannot be opened: .*{value}"):
        open_store(root)


def test_a_root_is_all_that_is_written_and_not_a_part_of_it(s3_bucket: str, tmp_path: Path) -> None:
    """As a URL would be, whose end behind `#` or `?` is not part of its path."""
    for root in (s3_bucket, tmp_path.as_uri()):
        first, second = open_store(f"{root}/a#1"), open_store(f"{root}/a#2?x")
        first.write("target", b"of the first", None)
        assert second.read("target") is None
    assert (tmp_path / "a#1" / "target.json").exists()


def test_one_of_many_creators_wins(root: str) -> None:
    store, creators = open_store(root), 8
    together, won = threading.Barrier(creators), []

    def create(name: int) -> None:
        together.wait()
        with contextlib.suppress(Conflict):
            store.write("new", f"by {name}".encode(), None)
            won.append(name)

    workers = [threading.Thread(target=create, args=(name,)) for name in range(creators)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    (winner,) = won
    stored = store.read("new")
    assert stored is not None
    assert stored.data == f"by {winner}".encode()


# --- the local disk ---


class Client(LocalStore):
    """A machine's view of a directory on NFS, as its cache can make it: a name that was looked up is not looked up again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.cached: dict[str, Stored | None] = {}

    def read(self, key: str) -> Stored | None:
        """From the cache."""
        if key not in self.cached:
            self.cached[key] = super().read(key)
        return self.cached[key]


def test_a_cached_lookup_that_found_nothing_does_not_let_a_second_worker_create(tmp_path: Path) -> None:
    stale, peer = Client(tmp_path), LocalStore(tmp_path)
    assert stale.read("a") is None
    peer.write("a", b"the peer's", None)
    with pytest.raises(Conflict):
        stale.write("a", b"mine", None)
    assert peer.read("a") == Stored(b"the peer's", hashlib.sha256(b"the peer's").hexdigest())


def test_a_cached_lookup_of_what_was_replaced_does_not_let_a_second_worker_replace_it(tmp_path: Path) -> None:
    stale, peer = Client(tmp_path), LocalStore(tmp_path)
    version = peer.write("a", b"free", None)
    stale.read("a")
    taken = peer.write("a", b"the peer's", version)
    with pytest.raises(Conflict):
        stale.write("a", b"mine", version)
    assert peer.read("a") == Stored(b"the peer's", taken)


def test_a_guard_lists_what_was_replaced_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.sweep.stores.local.MARKS", 8)
    stale, peer = Client(tmp_path), LocalStore(tmp_path)
    versions = [peer.write("a", b"0", None)]
    for number in range(1, 21):
        versions.append(peer.write("a", b"%d" % number, versions[-1]))
    for version in versions[-9:-1]:
        stale.cached["a"] = Stored(b"as it was", version)
        with pytest.raises(Conflict):
            stale.write("a", b"mine", version)
    (guard,) = (tmp_path / ".guards").iterdir()
    assert guard.stat().st_size == 8 * MARK_BYTES


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UnsafeStoreError, match="its file system has no hard links"):
        prove(LocalStore(tmp_path))


def test_a_process_forked_in_the_middle_of_a_write_does_not_keep_its_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.sweep.stores.local.GUARD_SECONDS", 1.0)
    store = LocalStore(tmp_path)
    real_read, children = LocalStore.read, []

    def read_and_fork(store: LocalStore, key: str) -> Stored | None:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
        return real_read(store, key)

    try:
        version = store.write("a", b"one", None)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "read", read_and_fork)  # as called under the guard
            version = store.write("a", b"two", version)
        store.write("a", b"three", version)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(children) == 1


def test_a_torn_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    version = store.write("a", b"whole", None)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[: len(data) // 2]))
    with pytest.raises(StoreError, match=r"took 3 of 7 bytes: is the disk full\?"):
        store.write("a", b"renewed", version)
    assert store.read("a") == Stored(b"whole", version)
    assert list((tmp_path / ".partial").iterdir()) == []


real_write = os.write


def test_the_half_written_file_of_a_killed_process_is_no_object_and_goes_in_time(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    prove(store)
    abandoned, recent = tmp_path / ".partial" / "a.1", tmp_path / ".partial" / "a.2"
    for partial in (abandoned, recent):
        partial.write_text('{"form')
    os.utime(abandoned, (0, 0))
    assert store.read("a") is None
    assert store.keys() == []
    prove(store)
    assert not abandoned.exists()
    assert recent.exists()


def test_a_guard_is_never_unlinked_and_one_that_is_held_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.sweep.stores.local.GUARD_SECONDS", 0.05)
    store = LocalStore(tmp_path)
    version = store.write("a", b"zero", None)
    version = store.write("a", b"one", version)
    guards = {guard.name: guard.stat().st_ino for guard in (tmp_path / ".guards").iterdir()}
    (name,) = guards
    holder = subprocess.Popen(
        ["flock", str(tmp_path / ".guards" / name), sys.executable, "-c", "print('held', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(StoreError, match=r"\.guards/\d\d has been locked for 0.05 s"):
        store.write("a", b"two", version)
    with holder.stdin, holder.stdout:
        holder.stdin.write(b"\n")
    assert holder.wait(DEADLINE_SECONDS) == 0
    for index in range(GUARDS + 8):
        store.write(f"key-{index}", b"two", store.write(f"key-{index}", b"one", None))
        store.discard(f"key-{index}")
    after = {guard.name: guard.stat().st_ino for guard in (tmp_path / ".guards").iterdir()}
    assert after[name] == guards[name]
    assert len(after) <= GUARDS


def test_sweep_imports_only_the_standard_library() -> None:
    script = """
import json, sys
before = set(sys.modules)
from counterpoint.sweep import claim, lock, status
from counterpoint.sweep.stores import gs, local, memory, s3
loaded = {name for name in sys.modules.keys() - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(json.dumps(sorted({".".join(name.split(".")[:2]) for name in loaded})))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == ["counterpoint", "counterpoint.public_names", "counterpoint.sweep"]
