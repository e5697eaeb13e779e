"""The sender over a link that the test plays: credit, acknowledgement, resending, pruning, and the ends of a run."""

from __future__ import annotations

import asyncio
import logging
import signal
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.step.delivery import ConflictError, EvictedError, MissingBatchError, RejectedError
from counterpoint.orchestrator.step.sender import NoTrainerError, Sender
from counterpoint.run.batch_files import KeptBatches
from counterpoint.transport import codec
from counterpoint.transport.config import TransportConfig
from counterpoint.transport.messages import (
    PROTOCOL_VERSION,
    Acknowledged,
    Ask,
    Bye,
    Commit,
    Evicted,
    Hello,
    HelloRefused,
    Offer,
    Published,
    Ready,
    Rejected,
    ToOrchestrator,
    Waiting,
)
from counterpoint.transport.outages import OpenOutage, OutageKind
from counterpoint.transport.records import Batch, Turn
from counterpoint.transport.wires.link import TrainerLink
from counterpoint.transport.wires.open import open_link
from tests.support.polling import DEADLINE_SECONDS, until
from tests.support.rollouts import make_rollout
from tests.transport.ends import trainer_process

LIMIT = 1 << 30


class PlayedLink(TrainerLink):
    """One whose other end is the test."""

    outage: OpenOutage | None = None

    def __init__(self) -> None:
        self.sent: list[Batch] = []
        self.commits: list[int] = []
        self.sessions: list[int] = []
        """The session of everything sent."""
        self.hello: Hello | None = None
        self.durable = 0
        self.incoming: asyncio.Queue[ToOrchestrator] = asyncio.Queue()
        self._taken = False
        """Whether a message was received, and the sender has not asked for the next one."""

    async def start(self, hello: Hello) -> None:
        self.hello = hello

    def durable_up_to(self, step: int) -> None:
        self.durable = step

    async def send(self, message: Offer | Ask | Commit) -> None:
        assert not isinstance(message, Ask)
        await asyncio.sleep(0)
        self.sessions.append(message.session)
        if isinstance(message, Offer):
            self.sent.append(message.batch)
        else:
            self.commits.append(message.step)

    async def receive(self) -> ToOrchestrator:
        if self._taken:
            self.incoming.task_done()
        message = await self.incoming.get()
        self._taken = True
        return message

    async def close(self) -> None:
        pass

    async def say(self, message: ToOrchestrator) -> None:
        """Until the sender has taken it in and done what follows."""
        self.incoming.put_nowait(message)
        await self.incoming.join()
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def steps(self) -> list[int]:
        return [batch.step for batch in self.sent]


def make_batch(step: int) -> Batch:
    return assemble_batch("one", step, merge_rollout(make_rollout(step)))


async def submit(sender: Sender, batch: Batch) -> None:
    sender.offer(batch, batch.nbytes)
    sender.commit(batch.step)
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    run_dir: Path,
    newest_step: int = 0,
    on_waiting: Callable[[str], None] = lambda reason: None,
    link: PlayedLink | None = None,
    kept: KeptBatches | None = None,
) -> AsyncIterator[tuple[Sender, PlayedLink]]:
    link = link or PlayedLink()
    sender = Sender(link, run_dir, "one", newest_step, LIMIT, on_waiting, kept=kept)
    task = asyncio.create_task(sender.run())
    try:
        yield sender, link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_sent(link: PlayedLink, steps: list[int]) -> None:
    """Until the link has sent the batches of `steps`, which are read from files by a thread."""
    await until(lambda: link.steps == steps, f"the batches of steps {steps}")


def record(run_dir: Path, step: int) -> Path:
    directory = run_dir / "rollouts" / f"step_{step}"
    directory.mkdir(parents=True)
    codec.write_file(directory / "batch.bin", make_batch(step))
    (directory / "STABLE").touch()
    return directory / "batch.bin"


async def test_nothing_is_sent_before_ready_and_never_more_than_the_credit(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        for step in (1, 2, 3):
            await submit(sender, make_batch(step))
        assert link.sent == []
        await link.say(Ready(1, credit=2, session=1))
        assert link.steps == [1, 2]
        assert sender.unacknowledged == 3
        await link.say(Acknowledged(1, durable=0))
        assert link.steps == [1, 2, 3]
        assert sender.unacknowledged == 2


async def test_after_a_reconnect_everything_unacknowledged_goes_again_from_memory(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=1))
        for step in (1, 2, 3):
            await submit(sender, make_batch(step))
        await link.say(Acknowledged(1, durable=0))
        await link.say(Bye("restarting"))
        await submit(sender, make_batch(4))
        assert link.steps == [1, 2, 3]
        await link.say(Ready(2, credit=4, session=1))
        assert link.steps == [1, 2, 3, 2, 3, 4]


async def test_what_is_not_in_memory_is_read_from_the_record(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record(tmp_path, step)
    async with running(tmp_path, newest_step=3) as (_, link):
        await link.say(Ready(2, credit=4, session=1))
        await until_sent(link, [2, 3])
        np.testing.assert_array_equal(link.sent[0].token_ids_T, make_batch(2).token_ids_T)


async def test_records_go_once_durable(tmp_path: Path) -> None:
    paths = [record(tmp_path, step) for step in (1, 2, 3)]
    async with running(tmp_path, newest_step=3) as (sender, link):
        await link.say(Ready(1, credit=4, session=1))
        await until_sent(link, [1, 2, 3])
        await link.say(Acknowledged(3, durable=2))
        await asyncio.wait_for(sender.wait_durable(2), 60)
        assert [path.exists() for path in paths] == [False, False, True]
        assert link.durable == 2


def is_told(sender: Sender, version: int) -> bool:
    return sender.published == version


async def test_the_newest_published_version_is_the_one_named_last(tmp_path: Path) -> None:
    """By a READY, too: its trainer may have gone back."""
    async with running(tmp_path, newest_step=9) as (sender, link):
        seen: list[int] = []
        sender.on_published = lambda: seen.append(sender.published)
        assert sender.published == -1
        for message, version in ((Ready(10, 4, 1), 9), (Published(10), 10), (Published(11), 11), (Ready(10, 4, 2), 9)):
            await link.say(message)
            await until(partial(is_told, sender, version), f"version {version}")
        assert seen == [9, 10, 11, 9]


@pytest.mark.parametrize(("kept", "durable"), [((1, 2, 3), 0), ((2, 3), 1), ((1, 3), 2), ((), 3)])
async def test_a_hello_says_up_to_where_nothing_can_be_sent_again(
    tmp_path: Path, kept: tuple[int, ...], durable: int
) -> None:
    for step in kept:
        record(tmp_path, step)
    async with running(tmp_path, newest_step=3) as (_, link):
        await until(lambda: link.hello is not None, "the HELLO")
        assert link.hello is not None
        assert link.hello.durable == durable


async def test_a_resume_counts_batches_that_are_kept_as_durable(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record(tmp_path, step)
    async with running(tmp_path, newest_step=3, kept=KeptBatches(9)) as (sender, link):
        await link.say(Ready(4, credit=4, session=1))
        await link.say(Acknowledged(3, durable=2))
        await asyncio.wait_for(sender.wait_durable(2), 60)
    async with running(tmp_path, newest_step=3, kept=KeptBatches(9)) as (_, link):
        await until(lambda: link.hello is not None, "HELLO")
        assert link.hello is not None
        assert link.hello.durable == 2


async def test_a_size_is_forgotten_once_its_step_is_durable(tmp_path: Path) -> None:
    """A run of months has millions of steps."""
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=1))
        for step in (1, 2, 3):
            await submit(sender, make_batch(step))
        await until_sent(link, [1, 2, 3])
        assert sender._delivery.sizes.keys() == {1, 2, 3}
        await link.say(Acknowledged(3, durable=2))
        await asyncio.wait_for(sender.wait_durable(2), 60)
        assert sender._delivery.sizes.keys() == {3}


@pytest.mark.parametrize(
    ("message", "error", "said"),
    [
        (Rejected(2, "NaN in sample 3"), RejectedError, "step 2: NaN in sample 3"),
        (
            HelloRefused(None, "this trainer has 99"),
            ConfigurationError,
            f"protocol {PROTOCOL_VERSION}: this trainer has 99",
        ),
        (Evicted("over budget"), EvictedError, "over budget"),
        (Ready(5, credit=1, session=1), ConflictError, "trained up to step 4"),
        (Ready(1, credit=1, session=1), MissingBatchError, "batch.bin is gone"),
    ],
)
async def test_what_ends_the_run(tmp_path: Path, message: ToOrchestrator, error: type[Exception], said: str) -> None:
    link = PlayedLink()
    task = asyncio.create_task(Sender(link, tmp_path, "one", 2, LIMIT).run())
    link.incoming.put_nowait(message)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(task, 60)
    (found,) = raised.value.exceptions
    assert isinstance(found, error)
    assert said in str(found)


@pytest.mark.slow
async def test_a_run_that_has_to_wait_is_patient_for_as_long_as_the_trainer_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The patience counts from its last word: many words, each within it, last longer than it."""
    heard: list[str] = []
    async with running(tmp_path, on_waiting=heard.append) as (sender, link):
        ready = asyncio.create_task(sender.wait_ready(3.0))
        with caplog.at_level(logging.INFO):
            began = sender.last_message_at
            while sender.last_message_at - began < 3.5:
                await link.say(Waiting("all places are taken"))
                await asyncio.sleep(0.01)
                assert not ready.done()
        assert sum("all places are taken" in record.message for record in caplog.records) == 1
        assert len(heard) > 1
        await link.say(Ready(1, credit=2, session=1))
        assert (await asyncio.wait_for(ready, 60)).credit == 2


async def test_a_run_that_is_sent_to_wait_keeps_its_batches(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=1))
        await link.say(Waiting("its place was given away"))
        await submit(sender, make_batch(1))
        assert link.steps == []
        await link.say(Ready(1, credit=4, session=1))
        assert link.steps == [1]


async def test_a_batch_travels_before_its_step_is_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=5))
        sender.offer(make_batch(1), 100)
        await until_sent(link, [1])
        assert (link.commits, sender.newest_step) == ([0], 0)
        sender.commit(1)
        await until(lambda: link.commits == [0, 1], "the commit of step 1")
        await link.say(Ready(1, credit=4, session=6))
        sender.offer(make_batch(2), 100)
        await until_sent(link, [1, 1, 2])
        assert link.commits == [0, 1, 1]
        assert link.sessions == [5, 5, 5, 6, 6, 6]


async def test_a_batch_that_either_end_refuses_is_not_taken(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        with pytest.raises(ConfigurationError, match=rf"step 1 takes {LIMIT + 1} bytes, .* {LIMIT}"):
            sender.offer(make_batch(1), LIMIT + 1)
        await link.say(Ready(1, 4, 1, max_batch_bytes=1000))
        with pytest.raises(ConfigurationError, match=r"the trainer takes at most 1000 \(transport\.max_batch_bytes"):
            sender.offer(make_batch(1), 1001)
        await link.say(Bye("it restarts"))
        with pytest.raises(ConfigurationError, match="the trainer takes at most 1000"):
            sender.offer(make_batch(1), 1001)
        await link.say(Ready(1, 4, 2, max_batch_bytes=1000))
        await submit(sender, make_batch(1))
        assert link.steps == [1]


async def test_no_more_bytes_are_on_their_way_than_the_trainer_holds_but_for_one_batch(tmp_path: Path) -> None:
    """A record that was on disk before counts as well."""
    size = record(tmp_path, 1).stat().st_size
    (tmp_path / "rollouts/step_1/STABLE").touch()
    async with running(tmp_path, newest_step=1) as (sender, link):
        await link.say(Ready(1, 4, 1, credit_bytes=size + 1000))
        await until_sent(link, [1])
        for step, nbytes in ((2, 900), (3, 101), (4, size + 2000)):
            sender.offer(make_batch(step), nbytes)
            sender.commit(step)
        await until_sent(link, [1, 2])
        await link.say(Acknowledged(1, durable=0))
        assert link.steps == [1, 2, 3]
        await link.say(Acknowledged(2, durable=0))
        assert link.steps == [1, 2, 3], "beside another, it is too large"
        await link.say(Acknowledged(3, durable=0))
        assert link.steps == [1, 2, 3, 4]


async def test_what_is_committed_is_said_before_the_farewell(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=5))
        sender.offer(make_batch(1), 100)
        await until_sent(link, [1])
    sender.commit(1)
    await sender.close()
    assert link.commits == [0, 1]


async def test_a_batch_is_forgotten_once_the_trainer_has_it_whatever_words_were_lost(tmp_path: Path) -> None:
    """An acknowledgement stands for those before it, and a READY for what it does not ask for."""
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=1))
        held = []
        for step in range(1, 31):
            batch = make_batch(step)
            held.append(weakref.ref(batch.token_ids_T))
            await submit(sender, batch)
            del batch
            if step % 4 == 2:
                await link.say(Acknowledged(step, durable=0))  # that of the step before was lost
            elif step % 4 == 0:
                await link.say(Ready(step + 1, credit=4, session=step))  # and here two were
            link.sent.clear()
        assert sum(batch() is not None for batch in held) == 0


async def test_a_rejection_of_an_earlier_session_does_not_end_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        await link.say(Ready(1, credit=4, session=1))
        await link.say(Ready(1, credit=4, session=2))
        await link.say(Rejected(7, "step 7: this trainer trains step 1 next and holds 4 batches", session=1))
        await submit(sender, make_batch(1))
        assert link.steps == [1]


async def test_a_record_that_is_not_wanted_any_more_may_be_gone(tmp_path: Path) -> None:
    """The trainer was at the very step when it said READY, and has finished it before the record was read."""
    async with running(tmp_path, newest_step=1) as (sender, link):
        for message in (Ready(1, credit=1, session=1), Acknowledged(1, durable=1)):
            link.incoming.put_nowait(message)
        await asyncio.wait_for(sender.wait_durable(1), 60)
        await submit(sender, make_batch(2))
        assert link.steps == [2]


async def test_a_silent_trainer_is_not_waited_for_beyond_the_patience(tmp_path: Path) -> None:
    async with running(tmp_path) as (sender, link):
        link.outage = OpenOutage(OutageKind.TRAINER, "the trainer at x", "is not connected", 0.0, "its key is unknown")
        with pytest.raises(NoTrainerError, match=r"trainer_timeout_seconds = 0\.05: .* its key is unknown"):
            await asyncio.wait_for(sender.wait_ready(0.05), 60)


async def test_a_trainer_with_another_batch_of_a_known_step_ends_the_process(tmp_path: Path) -> None:
    """The step is in memory, or sent and forgotten, or recorded by an earlier process."""
    record(tmp_path, 1)
    async with running(tmp_path, newest_step=1) as (sender, link):
        await link.say(Ready(2, credit=4, session=1, batch=codec.digest_of(make_batch(1))))
        await submit(sender, make_batch(2))
        await link.say(Acknowledged(2, durable=0))
        await link.say(Ready(3, credit=4, session=2, batch=codec.digest_of(make_batch(2))))
        assert sender.unacknowledged == 0
    link = PlayedLink()
    task = asyncio.create_task(Sender(link, tmp_path, "one", 1, LIMIT).run())
    link.incoming.put_nowait(Ready(2, credit=4, session=1, batch=codec.digest_of(make_batch(2))))
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(task, 60)
    (found,) = raised.value.exceptions
    assert isinstance(found, ConflictError)
    assert "step_1" in str(found)
    assert link.commits == [], "nothing is sent in this session"


async def test_a_trainer_beyond_what_was_ever_sent_ends_the_process(tmp_path: Path) -> None:
    """What was committed while the trainer was away is not there because it has a step of that number."""
    link = PlayedLink()
    sender = Sender(link, tmp_path, "one", 0, LIMIT)
    task = asyncio.create_task(sender.run())
    await link.say(Ready(1, credit=4, session=1))
    await submit(sender, make_batch(1))
    await link.say(Bye())
    await submit(sender, make_batch(2))
    link.incoming.put_nowait(Ready(3, credit=4, session=2))
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(task, 60)
    (found,) = raised.value.exceptions
    assert isinstance(found, ConflictError)
    assert "up to step 1 only" in str(found)


async def test_the_epoch_grows_with_each_process_that_a_trainer_has_accepted(tmp_path: Path) -> None:
    proposed: list[tuple[int, str]] = []
    for accepted in (True, False, True, True):
        async with running(tmp_path) as (_, link):
            await until(lambda link=link: link.hello is not None, "the HELLO")  # type: ignore[misc]
            assert link.hello is not None
            proposed.append((link.hello.epoch, link.hello.holder))
            if accepted:
                await link.say(Ready(1, credit=4, session=1))
    assert [epoch for epoch, _ in proposed] == [1, 2, 2, 3]
    assert len({holder for _, holder in proposed}) == 4


@pytest.mark.slow
async def test_a_trainer_that_reads_nothing_does_not_hold_the_loop(tmp_path: Path) -> None:
    """A real one, stopped in the middle of a batch that no buffer between the two can hold."""
    tokens = 8_000_000
    turn = Turn(np.zeros(1, np.int32), np.ones(tokens, np.int32), np.zeros(tokens, np.float32), 0, "stop")
    batch = assemble_batch("one", 1, merge_rollout(make_rollout(1, turns=[turn])))
    assert batch.nbytes > 64 * 2**20
    config = TransportConfig(kind="zmq", heartbeat_seconds=3600.0)  # a stopped trainer is not lost meanwhile
    sender = Sender(open_link(config, tmp_path), tmp_path, "one", 0, LIMIT)
    with trainer_process(config, tmp_path) as trainer:
        task = asyncio.create_task(sender.run())
        await sender.wait_ready(DEADLINE_SECONDS)
        trainer.send_signal(signal.SIGSTOP)
        await submit(sender, batch)
        for _ in range(100):  # the loop goes on, and the batch is still on its way
            await asyncio.sleep(0.001)
        assert sender.unacknowledged == 1
        trainer.send_signal(signal.SIGCONT)
        await until(lambda: sender.unacknowledged == 0, "the acknowledgement")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sender.close()


async def test_a_link_that_takes_nothing_does_not_hold_whoever_offers(tmp_path: Path) -> None:
    link, free = PlayedLink(), asyncio.Event()
    send = link.send

    async def send_when_free(message: Offer | Ask | Commit) -> None:
        await free.wait()
        await send(message)

    link.send = send_when_free  # type: ignore[method-assign]
    async with running(tmp_path, link=link) as (sender, _):
        await link.say(Ready(1, credit=4, session=1))
        for step in (1, 2):
            await submit(sender, make_batch(step))
        assert link.steps == []
        assert (sender.newest_step, sender.unacknowledged) == (2, 2)
        free.set()
        await until_sent(link, [1, 2])
