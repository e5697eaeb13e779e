"""What `transport.wires.base` promises."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from counterpoint.transport import codec
from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.messages import (
    PROTOCOL_VERSION,
    Acknowledged,
    Bye,
    Commit,
    Evicted,
    Hello,
    HelloRefused,
    Offer,
    Ready,
    Rejected,
    ToOrchestrator,
    Waiting,
)
from counterpoint.transport.process.priority import NICENESS
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.link import TrainerLink
from counterpoint.transport.wires.open import open_connection, open_link, open_receiver
from counterpoint.transport.wires.zmq_wire import ZmqConnection
from tests.support.batches import assert_equal, make_batch, with_changes
from tests.support.niceness import niceness_of, own_niceness
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.transport.ends import (
    SESSION,
    Stranger,
    handshake,
    hear,
    hello_frames,
    refuse,
    take,
    trainer_process,
)


@pytest.fixture
def config() -> TransportConfig:
    return TransportConfig(max_batch_bytes=2**24)


@pytest.fixture
def impatient(config: TransportConfig) -> TransportConfig:
    """Notices a loss soon; a pause of the machine would look like one to the other tests."""
    return config.model_copy(update={"heartbeat_seconds": 0.4})


@contextmanager
def opened(config: TransportConfig, directory: Path) -> Iterator[BatchReceiver]:
    receiver = open_receiver(config, directory)
    try:
        yield receiver
    finally:
        receiver.close()


@pytest.fixture
def receiver(config: TransportConfig, tmp_path: Path) -> Iterator[BatchReceiver]:
    with opened(config, tmp_path) as receiver:
        yield receiver


async def connect(config: TransportConfig, directory: Path, run_id: str = "default") -> TrainerLink:
    link = open_link(config, directory)
    await link.start(Hello(run_id, 0))
    return link


async def assert_works(link: TrainerLink, receiver: BatchReceiver, step: int = 1, run_id: str = "default") -> None:
    """A batch goes one way, an acknowledgement the other."""
    batch = make_batch(run_id, step)
    await link.send(Offer(batch, SESSION))
    sender, received = await asyncio.to_thread(take, receiver, Batch)
    assert sender == run_id
    assert_equal(received, batch)
    receiver.send(run_id, Acknowledged(step, step - 1))
    assert await hear(link) == Acknowledged(step, step - 1)


@pytest.mark.parametrize("dtype", [None, np.uint8, np.uint16])
async def test_batches_arrive_as_they_were(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path, dtype: Any
) -> None:
    link = await connect(config, tmp_path)
    hello = await handshake(link, receiver)
    assert hello == Hello("default", 0)
    for step, lengths in enumerate([(5, 3), (1,), (), (3000, 2)], start=1):
        batch = make_batch(step=step, lengths=lengths, dtype=dtype, layers=8)
        await link.send(Offer(batch, SESSION))
        run_id, received = await asyncio.to_thread(take, receiver, Batch)
        assert run_id == "default"
        assert_equal(received, batch)
    await link.close()
    assert (await asyncio.to_thread(take, receiver, Bye))[0] == "default"
    assert receiver.rejected == 0


async def test_the_thread_of_a_link_leaves_a_core_to_the_loop(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    link = await connect(config, tmp_path, "nice")
    await handshake(link, receiver)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "link-nice"]
    assert niceness_of(thread) == min(19, own_niceness() + NICENESS)
    await link.close()


async def test_received_arrays_can_be_written(config: TransportConfig, receiver: BatchReceiver, tmp_path: Path) -> None:
    """torch warns of arrays that it could not write to."""
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    await link.send(Offer(make_batch(lengths=(9000,)), SESSION))
    _, received = await asyncio.to_thread(take, receiver, Batch)
    assert received.token_ids_T.flags.writeable
    assert received.routed_experts[0][0].flags.writeable
    await link.close()


async def test_a_link_that_is_replaced_now_and_then_comes_back_each_time(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    """A HELLO of its own that is read late replaces it. Several in a row are another matter."""
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    for step in range(1, 7):
        await assert_works(link, receiver, step)
        late = await connect(config, tmp_path)
        await asyncio.to_thread(take, receiver, Hello)
        await link.send(Offer(make_batch(step=step + 1), SESSION))
        await handshake(link, receiver, step + 1)  # the batch is refused first
        await late.close()
    await link.close()


async def test_every_message_reaches_the_orchestrator(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    messages: list[ToOrchestrator] = [
        Acknowledged(3, 2),
        Rejected(None, "why", SESSION),
        Rejected(2, "", SESSION),
        Waiting("all places are taken"),
        Ready(4, 1, SESSION),
        Evicted("full"),
    ]
    for message in messages:
        receiver.send("default", message)
    assert [await hear(link) for _ in messages] == messages
    await link.send(Offer(make_batch(), SESSION))  # evicted: it would have to say HELLO first
    await link.close()
    await asyncio.to_thread(refuse, receiver, 1)  # its BYE, and nothing else


async def test_what_belongs_to_an_earlier_session_is_dropped_without_a_word(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    """At either end: what was handed to the link for one READY when the next had come, and what was on its way by then."""
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    await link.send(Offer(make_batch(step=8), SESSION))
    await link.send(Commit(8, SESSION))
    receiver.send("default", Ready(1, 4, SESSION + 1))
    assert await hear(link) == Ready(1, 4, SESSION + 1)
    await link.send(Offer(make_batch(step=9), SESSION))
    await link.send(Commit(9, SESSION))
    await link.send(Commit(1, SESSION + 1))
    await link.send(Offer(make_batch(step=1), SESSION + 1))
    assert await asyncio.to_thread(take, receiver, Commit) == ("default", Commit(1, SESSION + 1))
    assert (await asyncio.to_thread(take, receiver, Batch))[1].step == 1
    receiver.send("default", Waiting("its place was given away"))
    assert isinstance(await hear(link), Waiting)
    await link.send(Commit(2, SESSION + 1))
    await link.close()
    await asyncio.to_thread(take, receiver, Bye)
    assert receiver.rejected == 0


async def test_a_trainer_may_come_late(config: TransportConfig, tmp_path: Path) -> None:
    link = await connect(config, tmp_path / "job")
    await link.send(Offer(make_batch(), SESSION))  # nobody is ready for it: dropped, its owner sends it again
    with opened(config, tmp_path / "job") as receiver:
        await handshake(link, receiver)
        await assert_works(link, receiver)
        await link.close()


async def test_a_link_that_never_connects_closes(config: TransportConfig, tmp_path: Path) -> None:
    link = await connect(config, tmp_path)
    await link.close()
    await link.close()
    with pytest.raises(ConnectionError, match="closed"):
        await link.send(Offer(make_batch(), SESSION))
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await link.receive()


async def test_a_link_never_started_closes(config: TransportConfig, tmp_path: Path) -> None:
    await open_link(config, tmp_path).close()


async def test_closing_ends_a_pending_receive(config: TransportConfig, receiver: BatchReceiver, tmp_path: Path) -> None:
    link = await connect(config, tmp_path)
    pending = asyncio.create_task(link.receive())
    await handshake_elsewhere(receiver)
    assert await pending == Ready(1, 4, SESSION)
    pending = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    await link.close()
    with pytest.raises(ConnectionError):
        await pending


async def handshake_elsewhere(receiver: BatchReceiver) -> None:
    run_id, _ = await asyncio.to_thread(take, receiver, Hello)
    receiver.send(run_id, Ready(1, 4, SESSION))


@pytest.mark.slow
async def test_a_restarted_trainer_is_greeted_anew(config: TransportConfig, tmp_path: Path) -> None:
    with opened(config, tmp_path) as receiver:
        link = await connect(config, tmp_path)
        await handshake(link, receiver)
        await assert_works(link, receiver)
        link.durable_up_to(1)
    assert isinstance(await hear(link), Bye)
    with opened(config, tmp_path) as receiver:
        hello = await handshake(link, receiver, next_step=2)
        assert hello.durable == 1
        await assert_works(link, receiver, step=2)
        await link.close()


@pytest.mark.slow
async def test_a_reconnecting_run_replaces_its_old_self(config: TransportConfig, tmp_path: Path) -> None:
    """Which takes its place back, as the trainer may have read a greeting late, but not for ever."""
    often = config.model_copy(update={"heartbeat_seconds": 2.5})  # it comes back with the next one
    with opened(often, tmp_path) as receiver:
        await replace_and_refuse(often, receiver, tmp_path)


async def replace_and_refuse(config: TransportConfig, receiver: BatchReceiver, tmp_path: Path) -> None:
    old = await connect(config, tmp_path)
    await handshake(old, receiver)
    for times in range(1, 4):
        new = await connect(config, tmp_path)
        await handshake(new, receiver)
        await old.send(Offer(make_batch(step=1), SESSION))
        await handshake(old, receiver)
        await new.close()
        await asyncio.to_thread(refuse, receiver, 2 * times)  # with its BYE
    new = await connect(config, tmp_path)
    await handshake(new, receiver)
    await old.send(Offer(make_batch(step=1), SESSION))
    await asyncio.to_thread(refuse, receiver, 7)
    rejected = await hear(old)
    assert isinstance(rejected, Rejected)
    assert "HELLO" in rejected.reason
    await assert_works(new, receiver, step=2)
    await old.close()
    await new.close()


async def test_two_runs_do_not_mix(config: TransportConfig, receiver: BatchReceiver, tmp_path: Path) -> None:
    links = {run_id: await connect(config, tmp_path, run_id) for run_id in ("a", "b")}
    for _ in links:
        await handshake_elsewhere(receiver)
    for link in links.values():
        assert await hear(link) == Ready(1, 4, SESSION)
    for run_id, link in links.items():
        await assert_works(link, receiver, run_id=run_id)
    for link in links.values():  # not before: one's BYE may overtake the other's batch
        await link.close()


async def test_one_connection_serves_many_runs(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    """What one of them sends, hears and ends in is nothing to the others."""
    shared = open_connection(config, tmp_path)
    links = {run_id: shared.link() for run_id in ("a", "b", "c")}
    for run_id, link in links.items():
        await link.start(Hello(run_id, 0))
        await handshake(link, receiver)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("link-")] == ["link-a"]
    with pytest.raises(ValueError, match="run a"):
        await shared.link().start(Hello("a", 0))
    with pytest.raises(ValueError, match=r"\.\./a"):
        await shared.link().start(Hello("../a", 0))
    with pytest.raises(ValueError, match=r"run b .*IndexError"):
        await links["b"].send(Offer(with_changes(make_batch("b", lengths=(5, 3)), routed_experts=((),)), SESSION))
    await links["b"].send(Offer(with_changes(make_batch("b", 5), log_probabilities_T=NAN), SESSION))
    await asyncio.to_thread(refuse, receiver, 1)
    rejected = await hear(links["b"])
    assert isinstance(rejected, Rejected)
    assert (rejected.step, rejected.session) == (5, SESSION)
    assert list(receiver.take_invalid_batches()) == ["b"]
    receiver.send("b", Evicted("it sends nonsense"))
    assert await hear(links["b"]) == Evicted("it sends nonsense")
    await links["b"].close()
    await asyncio.to_thread(refuse, receiver, 2)  # its BYE
    for run_id in ("c", "a"):
        await assert_works(links[run_id], receiver, run_id=run_id)
    again = shared.link()
    await again.start(Hello("b", 0))
    await handshake(again, receiver)
    await assert_works(again, receiver, run_id="b")
    for link in (links["a"], links["c"], again):
        await link.close()
        await asyncio.to_thread(take, receiver, Bye)
    with pytest.raises(ConnectionError):
        await links["a"].receive()
    link = shared.link()  # all were closed: a new connection
    await link.start(Hello("a", 0))
    await handshake(link, receiver)
    await assert_works(link, receiver, run_id="a")
    await link.close()


async def test_a_run_of_many_that_is_replaced_comes_back_by_its_connection(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    shared = open_connection(config, tmp_path)
    links = {run_id: shared.link() for run_id in ("a", "b")}
    for run_id, link in links.items():
        await link.start(Hello(run_id, 0))
        await handshake(link, receiver)
    other = await connect(config, tmp_path, "a")
    await handshake(other, receiver)
    for step in (1, 2):  # the second is refused after the new greeting, and is nothing to it
        await links["a"].send(Offer(make_batch("a", step), SESSION))
    await handshake(links["a"], receiver)
    assert receiver.rejected == 2
    await assert_works(links["b"], receiver, run_id="b")
    await assert_works(links["a"], receiver, run_id="a")
    for link in (other, *links.values()):
        await link.close()


async def test_a_run_that_starts_again_is_not_ended_by_what_was_said_to_its_earlier_self(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    shared = open_connection(config, tmp_path)
    links = {run_id: shared.link() for run_id in ("a", "b")}
    for run_id, link in links.items():
        await link.start(Hello(run_id, 0))
        await handshake(link, receiver)
    await links["b"].close()
    again = shared.link()
    await again.start(Hello("b", 0))
    await asyncio.to_thread(wait_until, lambda: again.outage is not None, "its greeting")
    receiver.send("b", Evicted("its directory was deleted"))  # before it has read the BYE
    await asyncio.to_thread(take, receiver, Hello)
    await handshake(again, receiver)  # by another HELLO, since it cannot know whom the verdict means
    await assert_works(again, receiver, run_id="b")
    receiver.send("b", Evicted("it sends nonsense"))
    assert await hear(again) == Evicted("it sends nonsense")
    for link in (links["a"], again):
        await link.close()


async def test_all_runs_of_a_connection_hear_that_the_trainer_is_of_another_version(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    shared = open_connection(config, tmp_path)
    links = [shared.link() for _ in range(3)]
    for number, link in enumerate(links):
        await link.start(Hello(f"run-{number}", 0))
    await asyncio.to_thread(refuse, receiver, 3)
    for link in links:
        assert isinstance(await hear(link), HelloRefused)
        await link.close()


def flip(frames: list[Buffer], index: int, value: bytes) -> list[Buffer]:
    return [*frames[:index], value, *frames[index + 1 :]]


def other_hello(**fields: object) -> list[Buffer]:
    """A HELLO as another version may send it."""
    return [b"HELLO", msgpack.packb(fields)]


OTHER_VERSION = f"protocol 99, and this trainer has {PROTOCOL_VERSION}; install one version at both ends"
GOOD = codec.encode_offer(Offer(make_batch("stranger", 5), SESSION))
NAN = np.full(8, np.nan, np.float32)
REFUSED: dict[str, tuple[Callable[[], list[Buffer]], str, int | None]] = {
    "unknown kind": (lambda: [b"PICKLE", b"x"], "PICKLE", None),
    "one empty frame": (lambda: [b""], "no message we know", None),
    "noise": (lambda: [b"HELLO", b"\xc1" * 9], "not msgpack", None),
    "trainer's own message": (
        lambda: codec.encode_message(Ready(1, 1, SESSION), "stranger"),
        "not for the trainer",
        None,
    ),
    "bad run id": (lambda: hello_frames("../../etc"), "run id", None),
    "wrong protocol": (lambda: hello_frames(protocol=99), OTHER_VERSION, None),
    "protocol of fewer fields": (lambda: other_hello(run_id="one", protocol=99), OTHER_VERSION, None),
    "protocol of more fields": (
        lambda: other_hello(protocol=99, **{key: [1, {}] for key in "abcdefghij"}),
        OTHER_VERSION,
        None,
    ),
    "no protocol": (lambda: other_hello(run_id="one"), f"protocol None, and this trainer has {PROTOCOL_VERSION}", None),
    "truncated array": (lambda: flip(GOOD, 5, bytes(as_bytes_view(GOOD[5])[:-1])), "sidecar 1", 5),
    "missing arrays": (lambda: GOOD[:-1], "arrays", 5),
    "lying header": (lambda: flip(GOOD, 3, b"\x95\xa8stranger\x05\xce\xff\xff\xff\xff\x09\xc3"), "sample 0", 5),
    "another run's batch": (
        lambda: flip(codec.encode_offer(Offer(make_batch("other", 5), SESSION)), 1, b"stranger"),
        "'other'",
        5,
    ),
    "a batch in the name of another's run": (
        lambda: codec.encode_offer(Offer(make_batch("default", 5), SESSION)),
        "has not sent HELLO",
        None,
    ),
    "a BYE in the name of another's run": (lambda: codec.encode_message(Bye(), "default"), "not for the trainer", None),
    "a run that is no id": (lambda: flip(GOOD, 1, b"../stranger"), "has not sent HELLO", None),
    "NaN": (
        lambda: codec.encode_offer(Offer(with_changes(make_batch("stranger", 5), log_probabilities_T=NAN), SESSION)),
        "log_probabilities_T is nan",
        5,
    ),
    "lengths that disagree": (
        lambda: codec.encode_offer(Offer(with_changes(make_batch("stranger", 5), advantages_T=NAN[:3]), SESSION)),
        "advantages_T: 3",
        5,
    ),
    "too many bytes": (lambda: [*GOOD, bytes(2**23), bytes(2**23)], "max_batch_bytes", None),
    "too many frames": (lambda: [*GOOD[:4], *[b""] * (codec.MAX_FRAMES + 1)], "frames", None),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_is_counted_logged_and_told_and_harms_nobody(
    config: TransportConfig,
    receiver: BatchReceiver,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(codec, "MAX_FRAMES", 100)
    make, reason, step = REFUSED[name]
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    stranger = Stranger(config, tmp_path)
    try:
        stranger.write(GOOD)  # without a HELLO
        await asyncio.to_thread(refuse, receiver, 1)
        first = codec.decode_message(stranger.read())
        assert isinstance(first, Rejected)
        assert "has not sent HELLO" in first.reason
        stranger.write(hello_frames("stranger"))
        await asyncio.to_thread(take, receiver, Hello)
        receiver.send("stranger", Ready(1, 4, SESSION))
        assert codec.decode_message(stranger.read()) == Ready(1, 4, SESSION)
        stranger.write(make())
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(refuse, receiver, 2)
        frames = stranger.read()
        answer = codec.decode_message(frames)
        assert isinstance(answer, Rejected)
        assert reason in answer.reason
        assert answer.step == step
        names_own = codec.run_of(make()) == "stranger"
        assert codec.run_of(frames) == codec.run_of(make()), "who is told"
        assert ("refused a message from run stranger" if names_own else "from an unknown sender") in caplog.text
        await assert_works(link, receiver)
    finally:
        stranger.close()
        await link.close()


async def test_the_link_finds_that_its_hello_was_refused(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a session: a trainer may be back with another version."""
    link = await connect(config, tmp_path)
    await asyncio.to_thread(take, receiver, Hello)
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    other = await connect(config, tmp_path, "other")
    await asyncio.to_thread(refuse, receiver, 1)
    refused = await hear(other)
    assert isinstance(refused, HelloRefused)
    assert f"protocol {PROTOCOL_VERSION}, and this trainer has {PROTOCOL_VERSION + 1}" in refused.reason
    await link.close()
    await other.close()


@pytest.mark.parametrize("name", ["NaN", "lengths that disagree"])
async def test_the_link_hears_why_its_own_batch_was_refused(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path, name: str
) -> None:
    fields: dict[str, Any] = {"NaN": {"log_probabilities_T": NAN}, "lengths that disagree": {"advantages_T": NAN[:3]}}[
        name
    ]
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    await link.send(Offer(with_changes(make_batch(step=5), **fields), SESSION))
    await asyncio.to_thread(refuse, receiver, 1)
    rejected = await hear(link)
    assert isinstance(rejected, Rejected)
    assert rejected.step == 5
    assert list(receiver.take_invalid_batches()) == ["default"]
    assert receiver.take_invalid_batches() == {}
    assert "log_probabilities_T is nan" in rejected.reason or "advantages_T: 3 values" in rejected.reason
    await assert_works(link, receiver, step=6)
    await link.close()


async def test_what_cannot_travel_is_told_to_who_sends_it(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    with pytest.raises(ValueError, match="<f8 does not travel"):
        await link.send(Offer(with_changes(make_batch(), advantages_T=np.zeros(8)), SESSION))
    await assert_works(link, receiver)
    await link.close()


async def test_a_thread_that_fails_ends_the_send_that_it_was_at(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await connect(config, tmp_path)
    await handshake(link, receiver)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(ZmqConnection, "write", fail)
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(ConnectionError, match="no descriptor is left"):
            await link.send(Offer(make_batch(), SESSION))
        with pytest.raises(ConnectionError, match="no descriptor is left"):
            await link.receive()
    await link.close()


async def test_what_is_refused_does_not_hide_what_comes_after_it(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    """A trainer between two rows has no time to wait, and must still see a batch behind other peers' garbage."""
    link = await connect(config, tmp_path)
    await handshake(link, receiver)
    stranger = Stranger(config, tmp_path)
    try:
        for _ in range(40):
            stranger.write([b"?", b"?"])
        stranger.write(hello_frames("stranger"))
        await asyncio.to_thread(take, receiver, Hello)
        assert receiver.rejected == 40
        assert receiver.take_invalid_batches() == {}
        stranger.write([b"?", b"?"])
        stranger.write(hello_frames("stranger"))
        received = None
        async with asyncio.timeout(60):
            while received is None:
                received = receiver.receive(0.0)
                await asyncio.sleep(0)
        assert isinstance(received[1], Hello)
    finally:
        stranger.close()
        await link.close()


@pytest.mark.slow
async def test_a_flood_of_refused_messages_logs_little(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Stranger(config, tmp_path)
    try:
        for _ in range(30):
            stranger.write([b"?", b"?"])
        await asyncio.to_thread(refuse, receiver, 30)
        assert sum("refused a message" in record.message for record in caplog.records) <= 20
    finally:
        stranger.close()


def test_a_second_trainer_is_told_that_the_place_is_taken(
    config: TransportConfig, receiver: BatchReceiver, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="another trainer does"):
        open_receiver(config, tmp_path)


def test_a_receiver_without_peers_waits_no_longer_than_told_and_closes_twice(
    config: TransportConfig, receiver: BatchReceiver
) -> None:
    assert receiver.receive(0.0) is None
    receiver.send("nobody", Ready(1, 1, SESSION))
    receiver.close()
    receiver.close()


def _losses(caplog: pytest.LogCaptureFixture, count: int) -> Callable[[], bool]:
    return lambda: caplog.text.count(" is not connected: ") >= count


@pytest.mark.slow
async def test_a_killed_trainer_is_found_again(
    impatient: TransportConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = await connect(impatient, tmp_path)
    for life in (1, 2):
        with trainer_process(impatient, tmp_path, next_step=life) as process:
            assert await hear(link) == Ready(life, 4, SESSION)
            await link.send(Offer(make_batch(step=life), SESSION))
            assert await hear(link) == Acknowledged(life, 0)
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(wait_until, _losses(caplog, life), "the loss")
            await link.send(Commit(life, SESSION))  # the session is over: dropped
    await link.close()


@pytest.mark.slow
async def test_a_stopped_trainer_is_lost_and_found(
    impatient: TransportConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By every run of the connection."""
    shared = open_connection(impatient, tmp_path)
    links = {run_id: shared.link() for run_id in ("a", "b", "c")}
    for run_id, link in links.items():
        await link.start(Hello(run_id, 0))
    with trainer_process(impatient, tmp_path) as process:
        for link in links.values():
            assert await hear(link) == Ready(1, 4, SESSION)
        process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(wait_until, _losses(caplog, 1), "the loss")
        process.send_signal(signal.SIGCONT)
        for run_id, link in links.items():
            assert await hear(link) == Ready(1, 4, SESSION)
            await link.send(Offer(make_batch(run_id, step=1), SESSION))
            assert await hear(link) == Acknowledged(1, 0)
        for link in links.values():
            await link.close()
