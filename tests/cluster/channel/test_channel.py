"""A channel over real sockets: threads, event loops, processes that are killed, and peers that send garbage."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq.auth

from counterpoint.cluster.channel import messages
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import ChannelConsumer
from counterpoint.cluster.channel.end import MAX_ASKS
from counterpoint.cluster.channel.exactly_once import CommittedPositions
from counterpoint.cluster.channel.host import STOP_POLL_SECONDS, ChannelHost, HostWorker
from counterpoint.cluster.channel.messages import ChannelError, ChannelTurn, Head, Told, Who, pack, unpack
from counterpoint.cluster.channel.producer import ChannelProducer
from counterpoint.cluster.channel.self_loop import DataChannel
from counterpoint.cluster.member import Member, Stage
from counterpoint.cluster.worker import Context
from counterpoint.transport.files import journal as files_journal
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.process.permanent_errors import DISK_FULL
from counterpoint.transport.rpc.connection import Connection, RpcError
from counterpoint.transport.rpc.stream import connect_unix
from tests.cluster.channel.actors import actor, first_line
from tests.support.polling import DEADLINE_SECONDS, wait_until


def config_of(tmp_path: Path, **fields: object) -> ChannelConfig:
    return ChannelConfig.model_validate({"name": "records", "producers": ("source-0",), "capacity": 16, **fields})


async def ask(connection: Connection, frames: Sequence[Buffer]) -> Told:
    told: Told = unpack(await connection.ask(frames, DEADLINE_SECONDS), Told)[0]
    return told


def test_records_arrive_in_order_with_their_arrays_and_the_stream_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    value: dict[str, Any] = {
        "ids": np.arange(100_000, dtype=np.int32).reshape(2, -1),
        "name": "x",
        "mask": np.zeros(0, bool),
    }
    received = []

    def produce() -> None:
        with ChannelProducer(config, tmp_path, "source-0") as producer:
            for _ in range(40):
                producer.put(value, timeout=DEADLINE_SECONDS)
            producer.end(DEADLINE_SECONDS)

    with (
        ChannelHost(config, tmp_path),
        ThreadPoolExecutor(1) as executor,
        ChannelConsumer(config, tmp_path, "trainer-0", credit=3) as consumer,
    ):
        produced = executor.submit(produce)
        for item in consumer:
            received.append((item.sequence, item.origin, item.position))
            assert np.array_equal(item.value["ids"], value["ids"])
            assert item.value["mask"].dtype == bool
            item.acknowledge()
        produced.result(DEADLINE_SECONDS)
    assert received == [(number, "source-0", number) for number in range(40)]


def test_a_full_channel_holds_its_producer_up(tmp_path: Path) -> None:
    config = config_of(tmp_path, capacity=4)
    with ChannelHost(config, tmp_path), ChannelProducer(config, tmp_path, "source-0", window=8) as producer:
        sent = [producer.send(number, timeout=DEADLINE_SECONDS) for number in range(8)]
        for stored in sent[:4]:
            stored.result(DEADLINE_SECONDS)
        for number in range(4):
            producer.send(number, timeout=DEADLINE_SECONDS)
        with pytest.raises(TimeoutError, match="the channel is full"):
            producer.send(9, timeout=0.05)
        assert not any(stored.done() for stored in sent[4:])
        with ChannelConsumer(config, tmp_path, "trainer-0", credit=2) as consumer:
            for number in range(8):
                item = consumer.get(DEADLINE_SECONDS)
                assert item is not None
                assert item.value == number
                item.acknowledge()
        for stored in sent:
            stored.result(DEADLINE_SECONDS)


def test_a_value_that_cannot_travel_is_refused_where_it_is_put(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_record_bytes=1000)
    with ChannelHost(config, tmp_path), ChannelProducer(config, tmp_path, "source-0") as producer:
        with pytest.raises(TypeError, match="record"):
            producer.put({"a": object()})
        with pytest.raises(ValueError, match="max_record_bytes of channel records is 1000"):
            producer.put(np.zeros(10_000))
        producer.put("fits", timeout=DEADLINE_SECONDS)


def test_a_producer_that_the_channel_does_not_expect_is_told_so(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    producer = ChannelProducer(config, tmp_path, "stranger")
    with ChannelHost(config, tmp_path):
        with pytest.raises(ChannelError, match="not among the channel's producers: source-0"):
            producer.open(DEADLINE_SECONDS)
        producer.close()


def test_an_older_process_of_a_name_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with ChannelHost(config, tmp_path), ChannelConsumer(config, tmp_path, "trainer-0", incarnation=1) as old:
        old._opened.result(DEADLINE_SECONDS)
        with ChannelConsumer(config, tmp_path, "trainer-0", incarnation=2) as new:
            new._opened.result(DEADLINE_SECONDS)
            with pytest.raises(ChannelError, match="later process"):
                old.get(DEADLINE_SECONDS)
            with (
                ChannelConsumer(config, tmp_path, "trainer-0", incarnation=1) as late,
                pytest.raises(ChannelError, match="out of date"),
            ):
                late.get(DEADLINE_SECONDS)
            with ChannelProducer(config, tmp_path, "source-0") as producer:
                producer.put(1, timeout=DEADLINE_SECONDS)
            assert new.get(DEADLINE_SECONDS) is not None


async def test_garbage_is_counted_and_harms_nobody(tmp_path: Path) -> None:
    """Neither its kind, nor what claims to be long, nor a record that nobody can decode."""
    config = config_of(tmp_path, producers=("source-0", "source-1"))
    who = Who(messages.PRODUCER, "source-1", 0, 0)
    garbage = [
        [b"x"],
        [b"\xc1"],
        [b"\xdd\xff\xff\xff\xff"],  # a list of 4 billion, with none of them
        [b"\x81" * 10_000],
        [bytes(2 * messages.MAX_HEADER_BYTES)],
        [msgspec.msgpack.encode(ChannelTurn(who, -1))],
        [msgspec.msgpack.encode(ChannelTurn(who, 0, protocol=9))],  # type: ignore[arg-type]
        [msgspec.msgpack.encode(ChannelTurn(who, 0, [Head(messages.PUT, 0, "source-1", 0, 2)])), b"one frame"],
    ]
    with ChannelHost(config, tmp_path) as host:
        connection = await connect_unix(host.address.removeprefix("ipc://"), "the host", 5.0)
        for frames in garbage:
            with pytest.raises(RpcError) as caught:
                await ask(connection, frames)
            assert caught.value.kind == "garbage"
        assert host.garbage == len(garbage)
        with pytest.raises(RpcError, match="the session is over"):
            await ask(connection, pack(ChannelTurn(who, 7)))
        session = (await ask(connection, pack(ChannelTurn(who, 0)))).session
        head = Head(messages.PUT, 7, "source-1", 0, 1)
        answer = connection.ask(pack(ChannelTurn(who, session, [head]), [b"\xc1 is no msgpack"]), DEADLINE_SECONDS)
        connection.ask(pack(ChannelTurn(who, session)), DEADLINE_SECONDS)  # the host keeps one open
        assert unpack(await answer, Told)[0].confirmed == [7]
        with ChannelProducer(config, tmp_path, "source-0") as producer:
            producer.put("good", timeout=DEADLINE_SECONDS)
            with ChannelConsumer(config, tmp_path, "trainer-0") as consumer:
                item = consumer.get(DEADLINE_SECONDS)
        assert item is not None
        assert (item.sequence, item.value, consumer.poisoned) == (1, "good", 1)
        connection.close()


async def test_a_producer_that_sends_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "RECORDS_AHEAD", 10)
    who = Who(messages.PRODUCER, "source-0", 0, 0)
    with ChannelHost(config_of(tmp_path), tmp_path) as host:
        connection = await connect_unix(host.address.removeprefix("ipc://"), "the host", 5.0, most_asks=MAX_ASKS)
        session = (await ask(connection, pack(ChannelTurn(who, 0)))).session
        turns = [connection.ask(pack(ChannelTurn(who, session)), DEADLINE_SECONDS) for _ in range(40)]
        await asyncio.gather(*turns[: -messages.TURNS])  # else it would be asked no further one
        assert not any(turn.done() for turn in turns[-messages.TURNS :])
        heads = [Head(messages.PUT, number, "source-0", number, 1) for number in range(30)]
        with pytest.raises(RpcError, match="ahead of the answers"):
            await ask(connection, pack(ChannelTurn(who, session, heads), [b""] * 30))
        await ask(connection, pack(ChannelTurn(who, 0)))
        for turn in turns[-messages.TURNS :]:  # not "rejected": it is the same end, which goes on
            with pytest.raises(RpcError, match="the session is over"):
                await turn
        connection.close()


async def test_a_connection_has_one_session_at_a_time(tmp_path: Path) -> None:
    """One end could take the places of all others until the leases end."""

    def turn(name: str, session: int = 0, leaving: messages.Leaving = "") -> list[Buffer]:
        return pack(ChannelTurn(Who(messages.CONSUMER, name, 0, 0), session, leaving=leaving))

    with ChannelHost(config_of(tmp_path), tmp_path) as host:
        connection = await connect_unix(host.address.removeprefix("ipc://"), "the host", 5.0)
        session = (await ask(connection, turn("first"))).session
        with pytest.raises(RpcError, match="its connection has a session of consumer 'first' already") as refused:
            await ask(connection, turn("second"))
        assert refused.value.kind == messages.REJECTED
        await ask(connection, turn("first", session, "ended"))
        assert (await ask(connection, turn("second"))).session != session
        connection.close()


async def test_a_frame_above_the_limit_ends_only_its_own_connection(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_record_bytes=2**20)
    with ChannelHost(config, tmp_path) as host:
        connection = await connect_unix(host.address.removeprefix("ipc://"), "the host", 5.0)
        with ChannelProducer(config, tmp_path, "source-0") as producer:
            with pytest.raises(RpcError):
                await connection.ask([b"", bytes(2**21)], DEADLINE_SECONDS)
            producer.put("good", timeout=DEADLINE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [True, False])
def test_ends_go_on_with_the_next_host_and_see_nothing_twice(tmp_path: Path, is_told: bool) -> None:
    """What that one lends again, since it learns of the acknowledgement later, or never, is not shown."""
    config = config_of(tmp_path, directory=tmp_path / "journal")
    first = ChannelHost(config, tmp_path)
    first.start()
    with (
        ChannelProducer(config, tmp_path, "source-0") as producer,
        ChannelConsumer(config, tmp_path, "trainer-0", credit=1) as consumer,
    ):
        producer.put("before", timeout=DEADLINE_SECONDS)
        held = consumer.get(DEADLINE_SECONDS)
        assert held is not None
        first.close()
        if not is_told:
            with consumer._lock:
                consumer._held.discard(held.sequence)
                consumer._committed.add(config.name, held.generation, held.sequence)
        with ChannelHost(config, tmp_path) as second:
            producer.put("after", timeout=DEADLINE_SECONDS)
            held.acknowledge()
            item = consumer.get(DEADLINE_SECONDS)
            assert item is not None
            assert (item.sequence, item.value) == (1, "after")
            item.acknowledge()
            producer.end(DEADLINE_SECONDS)
            assert second.wait(DEADLINE_SECONDS)
            assert second.status() == "records: ended"
            assert consumer.get(DEADLINE_SECONDS) is None


def test_a_producer_of_a_worker_is_left_open_until_it_has_ended(tmp_path: Path) -> None:
    """Whichever of several in a row does it."""
    config = config_of(tmp_path)
    context = Context("job", "source", 0, 1, "source-0", 1, {}, str(tmp_path), "node")
    channel = DataChannel(config, context)
    with ChannelHost(config, tmp_path):
        for _ in range(2):
            with channel.producer() as producer:
                producer.put("record", timeout=DEADLINE_SECONDS)
            (is_open,) = context.left_open.values()
            assert is_open()
        with channel.producer() as producer:
            producer.end(DEADLINE_SECONDS)
        (is_open,) = context.left_open.values()
        assert not is_open()
    assert [*context.left_open] == ["producer of channel records"]


def _reads(committed: CommittedPositions, channel: str, generation: str) -> bool:
    return committed.as_dict()[channel][0] == generation


def test_an_item_commits_and_acknowledges_nothing_of_the_host_that_follows_its_own(tmp_path: Path) -> None:
    """Without a journal that one gives the same number to another record."""
    config = config_of(tmp_path)
    first = ChannelHost(config, tmp_path)
    first.start()
    committed = CommittedPositions()
    with (
        ChannelProducer(config, tmp_path, "source-0") as producer,
        ChannelConsumer(config, tmp_path, "trainer-0", sticky=True, committed=committed) as consumer,
    ):
        producer.put("before", timeout=DEADLINE_SECONDS)
        producer.flush(DEADLINE_SECONDS)
        held = consumer.get(DEADLINE_SECONDS)
        first.close()
        with ChannelHost(config, tmp_path) as second:
            assert held is not None
            generation = held.generation
            wait_until(lambda: not _reads(committed, config.name, generation), "the new host")
            committed.add(config.name, held.generation, held.sequence)
            producer.put("after", timeout=DEADLINE_SECONDS)
            item = consumer.get(DEADLINE_SECONDS)
            assert item is not None
            assert (item.sequence, item.value) == (held.sequence, "after")
            held.acknowledge()
            assert consumer._held == {item.sequence}
            item.acknowledge()
            producer.end(DEADLINE_SECONDS)
            assert second.wait(DEADLINE_SECONDS)


def test_a_host_that_fails_says_so_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    with ChannelHost(config, tmp_path) as host:
        monkeypatch.setattr(host._queue, "join", None)
        with (
            ChannelConsumer(config, tmp_path, "trainer-0"),
            pytest.raises(ChannelError, match="channel records failed"),
        ):
            host.wait(DEADLINE_SECONDS)


def test_a_producer_without_a_host_gives_up_and_leaves_nothing(tmp_path: Path) -> None:
    producer = ChannelProducer(config_of(tmp_path), tmp_path, "source-0")
    with pytest.raises(TimeoutError, match=r"records.*HostWorker"):
        producer.open(0.01)
    producer.close()


def test_a_role_can_host_channels(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    tables = [config_of(tmp_path, name=name).model_dump(mode="json") for name in names]
    workers = []
    for rank in range(2):
        context = Context("job", "host", rank, 2, f"host-{rank}", 1, {"channels": tables}, str(tmp_path), "node")
        workers.append(HostWorker(context))
    for worker in workers:
        worker.setup()
    assert [worker.status() for worker in workers] == [
        "a: 0 of 16 records, no consumer, c: 0 of 16 records, no consumer",
        "b: 0 of 16 records, no consumer",
    ]
    for name in names:
        with ChannelProducer(config_of(tmp_path, name=name), tmp_path, "source-0") as producer:
            producer.put(1, timeout=DEADLINE_SECONDS)
    for worker in workers:
        worker.context.stop.set()
        worker.start()
        worker.stop()


def test_a_stream_whose_producer_has_left_without_its_end_stops_the_job(tmp_path: Path) -> None:
    """Such as a command that ends with 0, a task whose `config` lacks the channel, or any, where the host has forgotten it."""
    members = [Member("source-0", 1, Stage.FINISH)]
    reasons: list[str] = []

    class Hosted(Context):
        def get_nodes_by_role(self, role: str) -> Sequence[Member]:
            return [member for member in members if member.worker.startswith(f"{role}-")]

        def stop_job(self, reason: str, code: int = 0) -> None:
            assert code == 1
            reasons.append(reason)
            self.stop.set()

    def host(config: ChannelConfig) -> HostWorker:
        table = config.model_dump(mode="json")
        return HostWorker(Hosted("job", "host", 0, 1, "host-0", 1, {"channels": [table]}, str(tmp_path), "node"))

    worker = host(config_of(tmp_path))
    worker.setup()
    worker.start()
    worker.stop()
    assert re.search("channel records never ends: .*source-0", reasons.pop())

    members.append(Member("other-0", 1, Stage.RUNNING))  # which has not ended yet
    worker = host(config_of(tmp_path, producers=("source-0", "other-0")))
    worker.setup()
    config = config_of(tmp_path, producers=("source-0", "other-0"))
    with ChannelProducer(config, tmp_path, "source-0") as producer:
        producer.end(DEADLINE_SECONDS)
    threading.Timer(5 * STOP_POLL_SECONDS, worker.context.stop.set).start()
    worker.start()
    worker.stop()
    assert reasons == []


@pytest.mark.slow
def test_beyond_the_machine_only_authorized_keys_get_in(tmp_path: Path) -> None:
    (tmp_path / "authorized").mkdir()
    for name in ("host", "peer", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    (tmp_path / "peer.key").rename(tmp_path / "authorized" / "peer.key")

    producers = ("source-0", "source-1")

    def config(name: str) -> ChannelConfig:
        keys = {"server_public_key_file": tmp_path / "host.key", "secret_key_file": tmp_path / f"{name}.key_secret"}
        return config_of(tmp_path, producers=producers, authorized_keys_directory=tmp_path / "authorized", **keys)

    with pytest.raises(ValueError, match="needs CURVE keys"):
        config_of(tmp_path, address="tcp://0.0.0.0:5555").endpoint(tmp_path)
    with ChannelHost(config("host"), tmp_path):
        stranger = ChannelProducer(config("stranger"), tmp_path, "source-0")
        with pytest.raises(TimeoutError):
            stranger.open(0.3)
        stranger.close()
        with ChannelProducer(config("peer"), tmp_path, "source-0") as producer:
            producer.put("secret", timeout=DEADLINE_SECONDS)
        replaced = ChannelProducer(config("stranger"), tmp_path, "source-1")
        with pytest.raises(TimeoutError):
            replaced.open(0.3)
        (tmp_path / "peer.key_secret").rename(tmp_path / "stranger.key_secret")  # read again, though the peer lives on
        replaced.put("another", timeout=DEADLINE_SECONDS)
        replaced.close()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "lease"), [(signal.SIGKILL, 600.0), (signal.SIGSTOP, 3.0)])
def test_the_records_of_a_consumer_that_dies_or_is_stopped_are_lent_again(
    tmp_path: Path, how: signal.Signals, lease: float
) -> None:
    config = config_of(tmp_path, lease_seconds=lease)
    with ChannelHost(config, tmp_path), ChannelProducer(config, tmp_path, "source-0") as producer:
        for number in range(3):
            producer.put(number, timeout=DEADLINE_SECONDS)
        with actor("holder", config, tmp_path, "victim") as process:
            assert first_line(process) == "0 1"
            with ChannelConsumer(config, tmp_path, "other") as consumer:
                taken = [consumer.get(DEADLINE_SECONDS)]
                os.kill(process.pid, how)
                taken += [consumer.get(DEADLINE_SECONDS) for _ in range(2)]
        assert [(each.sequence, each.value) for each in taken if each is not None] == [(2, 2), (0, 0), (1, 1)]


@pytest.mark.slow
def test_the_death_of_the_host_loses_nothing_and_its_peers_go_on(tmp_path: Path) -> None:
    config = config_of(tmp_path, directory=tmp_path / "journal")
    received: list[int] = []
    killed = threading.Event()

    def produce(producer: ChannelProducer) -> None:
        with producer:
            for number in range(60):
                if number == 30:
                    killed.wait(DEADLINE_SECONDS)
                producer.send(number, timeout=DEADLINE_SECONDS)
            producer.end(DEADLINE_SECONDS)

    thread = threading.Thread(target=produce, args=[ChannelProducer(config, tmp_path, "source-0")])
    with ChannelConsumer(config, tmp_path, "trainer-0", credit=4) as consumer:
        with actor("host", config, tmp_path) as host:
            first_line(host)
            thread.start()
            for _ in range(20):
                item = consumer.get(DEADLINE_SECONDS)
                assert item is not None
                received.append(item.value)
                item.acknowledge()
            held = [consumer.get(DEADLINE_SECONDS) for _ in range(2)]
        with actor("host", config, tmp_path):
            killed.set()
            for item in held:
                assert item is not None
                received.append(item.value)
                item.acknowledge()
            while (item := consumer.get(DEADLINE_SECONDS)) is not None:
                received.append(item.value)
                item.acknowledge()
            thread.join(DEADLINE_SECONDS)
    assert set(received) == set(range(60))
    assert received[-1] == 59


@pytest.mark.slow
@pytest.mark.parametrize("directory", [None, "journal"])
def test_a_record_whose_consumers_die_is_set_aside_and_the_stream_goes_on(
    tmp_path: Path, directory: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, directory=directory, lease_seconds=600.0)
    with ChannelHost(config, tmp_path) as host:
        with ChannelProducer(config, tmp_path, "source-0") as producer:
            for number in range(3):
                producer.put(number, timeout=DEADLINE_SECONDS)
            for _ in range(config.max_deaths - 1):
                with actor("holder", config, tmp_path, "victim") as process:
                    assert first_line(process) == "0 1"
            with (  # noqa: PT012 - an error that ends a consumer is a death as well
                pytest.raises(ZeroDivisionError),
                ChannelConsumer(config, tmp_path, "victim", credit=2) as consumer,
            ):
                assert consumer.get(DEADLINE_SECONDS)
                raise ZeroDivisionError
            producer.end(DEADLINE_SECONDS)
        with ChannelConsumer(config, tmp_path, "other", credit=1) as consumer:
            for item in consumer:
                assert item.value in (1, 2)
                item.acknowledge()
        assert host.set_aside.keys() == {0}
        assert "position 0 of source-0" in caplog.text
    with ChannelHost(config, tmp_path) as next_host:
        assert next_host.set_aside.keys() == (set() if directory is None else {0})
        assert next_host.ended or directory is None or next_host.wait(DEADLINE_SECONDS)


def test_a_full_disk_ends_the_host_which_is_created_again_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    table = config_of(tmp_path, directory="journal").model_dump(mode="json")
    context = Context("job", "host", 0, 1, "host-0", 1, {"channels": [table]}, str(tmp_path), "node")
    config = ChannelConfig.model_validate(table)
    worker = HostWorker(context)
    worker.setup()
    with ChannelProducer(config, tmp_path, "source-0") as producer:
        producer.put("before", timeout=DEADLINE_SECONDS)
        with monkeypatch.context() as patched:
            patched.setattr(files_journal, "write_buffers", full)
            stored = producer.send("during", timeout=DEADLINE_SECONDS)
            with pytest.raises(SystemExit) as ended:
                worker.start()
        assert ended.value.code == DISK_FULL
        assert "cannot write the journal in journal: No space left on device; free space there" in str(
            ended.value.__context__
        )
        assert not stored.done()
        worker.stop()
        with ChannelHost(config, tmp_path), ChannelConsumer(config, tmp_path, "trainer-0") as consumer:
            stored.result(DEADLINE_SECONDS)
            items = [consumer.get(DEADLINE_SECONDS) for _ in range(2)]
        assert [item.value for item in items if item is not None] == ["before", "during"]
