"""Two runs in one episode, each with its own policy and its own rollouts, over a real socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.seats.seat import Seat
from counterpoint.environments.seats.table import Table
from counterpoint.environments.seats.wire import MAX_MESSAGE_BYTES, SOCKET_NAME, PartnerGone
from counterpoint.inference.base import InferenceError, SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout, merge_turns
from counterpoint.orchestrator.step.finalize import find_fault
from counterpoint.transport.records import Int32Array, Rollout, Turn
from counterpoint.transport.wires.endpoint import socket_path
from tests.orchestrator.toy_model import make_toy_model
from tests.support.polling import until
from tests.support.rollouts import make_turn

DEADLINE = 60.0


class Pool:
    """Says one text, always, or fails."""

    def __init__(self, chat: Chat, text: str, error: Exception | None = None) -> None:
        self._completion = [*chat.encode(text), chat.stop_token_ids[0]]
        self._error = error
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = 0

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        self.calls += 1
        await self.gate.wait()
        if self._error is not None:
            raise self._error
        return make_turn(prompt_ids.tolist(), self._completion, start=routed_experts_start)


class Debate:
    """The policy speaks, then whoever sits opposite, twice. `fault` breaks the host after the first answer."""

    group_scoring = False

    def __init__(self, fault: str = "", partner_seconds: float = DEADLINE, answer_seconds: float = DEADLINE) -> None:
        self.table = Table(partner_seconds=partner_seconds, answer_seconds=answer_seconds)
        self._fault = fault

    async def start(self, context: EnvironmentContext) -> None:
        await self.table.open(context)

    async def close(self) -> None:
        await self.table.close()

    def __len__(self) -> int:
        return 9

    def example(self, index: int) -> Example:
        return Example(index, f"question {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        async with self.table.episode(example.index) as episode:
            turn = await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
            for _ in range(2):
                mine = (await model.parse(turn)).content
                theirs = await episode.ask("other", [{"role": "user", "content": mine}])
                if self._fault == "raises":
                    raise KeyError("the host is broken")
                if self._fault == "cancelled":
                    await asyncio.Event().wait()
                turn = await model.generate(model.chat.extend(turn, [{"role": "user", "content": theirs}]))
            state["said"] = episode.said
            if self._fault != "no reward":
                episode.reward("other", 0.25)

    async def score(self, example: Example, rollout: Rollout) -> float:
        return 0.75

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_toy_model(tmp_path_factory.mktemp("model") / "toy"))


def context_of(tmp_path: Path, run: str, name: str) -> EnvironmentContext:
    return EnvironmentContext(name, tmp_path / f"run_{run}" / "environments" / name, tmp_path, 0)


@asynccontextmanager
async def seated(tmp_path: Path, host: Debate | None, **arguments: Any) -> AsyncIterator[Seat]:
    """The host of run `a` and a seat of run `b`, both started."""
    seat = Seat("a/debate", **({"partner_seconds": DEADLINE, "silence_seconds": DEADLINE} | arguments))
    async with AsyncExitStack() as stack:
        if host is not None:
            await stack.enter_async_context(started(host, context_of(tmp_path, "a", "debate")))
        await stack.enter_async_context(started(seat, context_of(tmp_path, "b", "opposite")))
        yield seat


async def rolled(environment: Any, pool: Pool, chat: Chat, index: int = 0, number: int = 0) -> Rollout:
    """One rollout of a run, as its dispatcher plays it."""
    rollout = Rollout(f"{index}-{number}", index, "toy", index)
    config = EnvironmentConfig(name="toy", kind="made:Here", rollout_timeout_seconds=DEADLINE)
    model = PolicyModel(
        rollout, chat, pool, SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=chat.stop_token_ids)
    )
    await play(LoadedEnvironment(config, environment), rollout, model)
    return rollout


def trained_texts(rollout: Rollout, chat: Chat) -> list[str]:
    """What a run would train on, by sample."""
    merge_turns(rollout)
    return [chat.decode(s.token_ids_T[s.loss_mask_T == 1].tolist()) for s in merge_rollout(rollout)]


async def test_each_run_is_trained_on_its_own_turns_and_only_on_these(tmp_path: Path, chat: Chat) -> None:
    host = Debate()
    async with seated(tmp_path, host) as seat:
        mine, theirs = await asyncio.gather(
            rolled(host, Pool(chat, "ab"), chat, index=3), rolled(seat, Pool(chat, "cd"), chat, index=70)
        )
    assert (mine.error, mine.reward, mine.state["said"]) == (None, 0.75, [{"seat": "other", "text": "cd"}] * 2)
    assert (theirs.error, theirs.reward, theirs.state) == (None, 0.25, {"example": 3, "reward": 0.25})
    assert find_fault(mine) is None
    assert find_fault(theirs) is None
    assert (len(mine.turns), len(theirs.turns)) == (3, 2)
    assert trained_texts(mine, chat) == ["ababab"]
    assert trained_texts(theirs, chat) == ["cdcd"]
    assert "ab" in chat.decode(theirs.turns[0].prompt_ids.tolist())


async def test_groups_meet_groups(tmp_path: Path, chat: Chat) -> None:
    host, size = Debate(), 4
    async with seated(tmp_path, host) as seat:
        hosted = [rolled(host, Pool(chat, "ab"), chat, index, n) for index in (1, 2, 5) for n in range(size)]
        seats = [rolled(seat, Pool(chat, "cd"), chat, key, n) for key in (10, 20, 30) for n in range(size)]
        rollouts = await asyncio.gather(*hosted, *seats)
    assert [rollout.error for rollout in rollouts] == [None] * 6 * size
    met: dict[int, set[int]] = {}
    for rollout in rollouts[3 * size :]:
        met.setdefault(rollout.example_index, set()).add(rollout.state["example"])
    assert sorted(example for examples in met.values() for example in examples) == [1, 2, 5]


async def test_without_a_partner_both_runs_go_on(tmp_path: Path, chat: Chat) -> None:
    host = Debate(partner_seconds=0.05)
    async with seated(tmp_path, host, partner_seconds=0.05) as seat:
        alone = await rolled(host, Pool(chat, "ab"), chat)
        waiting = await rolled(seat, Pool(chat, "cd"), chat)
    async with seated(tmp_path, None, partner_seconds=0.05) as seat:
        nobody = await rolled(seat, Pool(chat, "cd"), chat)
    assert "no partner in seat 'other' within partner_seconds = 0.05" in (alone.error or "")
    assert "no partner: a/debate" in (waiting.error or "")
    assert "no partner: a/debate does not listen at" in (nobody.error or "")
    assert all(rollout.inference_failed for rollout in (alone, waiting, nobody))


@pytest.mark.parametrize(
    ("fault", "said", "excused"),
    [
        ("raises", "the episode failed at its host: KeyError", False),
        ("no reward", "the host gave this seat no reward", None),
    ],
)
async def test_a_host_that_fails_is_not_the_seats_failure(
    tmp_path: Path, chat: Chat, fault: str, said: str, excused: bool | None
) -> None:
    host = Debate(fault)
    async with seated(tmp_path, host) as seat:
        mine, theirs = await asyncio.gather(rolled(host, Pool(chat, "ab"), chat), rolled(seat, Pool(chat, "cd"), chat))
    assert said in (theirs.error or "")
    assert theirs.inference_failed
    assert (mine.error is None) == (excused is None)
    assert not mine.inference_failed, "its own failure is its own"


async def test_a_cancelled_host_ends_the_episode_for_both(tmp_path: Path, chat: Chat) -> None:
    host, pool = Debate("cancelled"), Pool(chat, "cd")
    async with seated(tmp_path, host) as seat:
        mine = asyncio.create_task(rolled(host, Pool(chat, "ab"), chat))
        theirs = asyncio.create_task(rolled(seat, pool, chat))
        await until(lambda: pool.calls == 1, "the seat's call")
        mine.cancel()
        rollout = await theirs
    assert "the episode was broken off" in (rollout.error or "")
    assert rollout.inference_failed
    assert mine.cancelled()


async def test_a_seat_whose_inference_fails_tells_its_host(tmp_path: Path, chat: Chat) -> None:
    host = Debate()
    async with seated(tmp_path, host) as seat:
        mine, theirs = await asyncio.gather(
            rolled(host, Pool(chat, "ab"), chat), rolled(seat, Pool(chat, "cd", InferenceError("no server")), chat)
        )
    assert "left: InferenceError: no server" in (mine.error or "")
    assert mine.inference_failed
    assert theirs.inference_failed


async def test_a_cancelled_seat_and_a_silent_one(tmp_path: Path, chat: Chat) -> None:
    host, pool = Debate(answer_seconds=0.05), Pool(chat, "cd")
    pool.gate.clear()
    async with seated(tmp_path, host) as seat:
        silent = asyncio.create_task(rolled(seat, pool, chat))
        mine = await rolled(host, Pool(chat, "ab"), chat)
        assert "did not answer within answer_seconds = 0.05" in (mine.error or "")
        await until(lambda: pool.calls == 1, "the seat's call, which may be late, too")
        silent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await silent
        host.table.answer_seconds = DEADLINE
        again, other = (
            asyncio.create_task(rolled(seat, pool, chat)),
            asyncio.create_task(rolled(host, Pool(chat, "ab"), chat)),
        )
        await until(lambda: pool.calls == 2, "the seat's second call")
        again.cancel()
        mine = await other
    assert "the partner in seat 'other' left: CancelledError" in (mine.error or "")
    assert mine.inference_failed


async def test_a_late_answer_is_not_one_to_the_next_question(tmp_path: Path, chat: Chat) -> None:
    host, pool = Debate(answer_seconds=0.05), Pool(chat, "cd")
    pool.gate.clear()
    async with seated(tmp_path, host) as seat:
        late = asyncio.create_task(rolled(seat, pool, chat))
        async with host.table.episode(0) as episode:
            with pytest.raises(PartnerGone, match="did not answer within"):
                await episode.ask("other", [{"role": "user", "content": "first"}])
            host.table.answer_seconds = DEADLINE
            pool.gate.set()
            with pytest.raises(PartnerGone):
                await episode.ask("other", [{"role": "user", "content": "second"}])
        assert (await late).error is not None
    assert episode.said == []


async def test_an_answer_to_an_episode_that_is_broken_off_changes_nothing_of_its_end(
    tmp_path: Path, chat: Chat
) -> None:
    host, pool = Debate(), Pool(chat, "cd")
    pool.gate.clear()

    async def broken_off() -> None:
        async with host.table.episode(0) as episode:
            asking = asyncio.create_task(episode.ask("other", [{"role": "user", "content": "first"}]))
            await until(lambda: pool.calls == 1, "the seat's call")
            asking.cancel()
            await asyncio.wait([asking])
            pool.gate.set()
            await until(lambda: not episode.seats["other"].owes, "the late answer")
            raise KeyError("the host is broken")

    async with seated(tmp_path, host) as seat:
        late = asyncio.create_task(rolled(seat, pool, chat))
        with pytest.raises(KeyError):
            await broken_off()
        rollout = await late
    assert "the episode failed at its host: KeyError" in (rollout.error or "")
    assert rollout.inference_failed


async def test_a_table_that_closes_ends_what_waits(tmp_path: Path, chat: Chat) -> None:
    host = Debate()
    async with seated(tmp_path, host) as seat:
        waiting = asyncio.create_task(rolled(seat, Pool(chat, "cd"), chat))
        await until(lambda: bool(host.table._waiting_seats), "the seat to wait")
        await host.table.close()
        rollout = await waiting
    assert "no partner: the host's table was closed" in (rollout.error or "")


async def test_two_hosts_at_one_table_are_refused(tmp_path: Path) -> None:
    async with seated(tmp_path, Debate()):
        second = Debate()
        with pytest.raises(ValueError, match="another process hosts this environment"):
            async with started(second, context_of(tmp_path, "a", "debate")):
                pass


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", MAX_MESSAGE_BYTES + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x05",
        struct.pack(">I", 9) + b"cut",
        *(
            struct.pack(">I", len(body)) + body
            for body in (
                msgpack.packb({"kind": "sit", "protocol": 1, "seat": "elsewhere", "key": 1}),
                msgpack.packb({"kind": "sit", "protocol": 2, "seat": "other", "key": 1}),
                msgpack.packb({"kind": "sit", "protocol": 1, "seat": "other", "key": "x"}),
                msgpack.packb({"kind": "answer", "text": "x"}),
            )
        ),
    ],
)
async def test_what_is_no_seat_is_sent_away(tmp_path: Path, chat: Chat, sent: bytes) -> None:
    host = Debate()
    async with seated(tmp_path, host) as seat:
        path = socket_path(context_of(tmp_path, "a", "debate").directory, SOCKET_NAME)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(DEADLINE):
            await reader.read()
        writer.close()
        await writer.wait_closed()
        mine, theirs = await asyncio.gather(rolled(host, Pool(chat, "ab"), chat), rolled(seat, Pool(chat, "cd"), chat))
    assert (mine.error, theirs.error) == (None, None)


async def test_an_answer_that_nobody_asked_for_ends_the_seat(tmp_path: Path) -> None:
    host = Debate()
    async with seated(tmp_path, host):
        path = socket_path(context_of(tmp_path, "a", "debate").directory, SOCKET_NAME)
        reader, writer = await asyncio.open_unix_connection(path)
        for message in ({"kind": "sit", "protocol": 1, "seat": "other", "key": 1}, {"kind": "answer", "text": "x"}):
            body = msgpack.packb(message)
            writer.write(struct.pack(">I", len(body)) + body)
        async with asyncio.timeout(DEADLINE):
            answer = await reader.read()
        assert b"unasked" in answer
        assert not host.table._waiting_seats
        writer.close()
        await writer.wait_closed()


def framed(**message: Any) -> bytes:
    body: bytes = msgpack.packb(message)
    return struct.pack(">I", len(body)) + body


async def test_a_partner_that_is_killed_ends_the_episode(tmp_path: Path, chat: Chat) -> None:
    host, pool = Debate(), Pool(chat, "ab")
    async with started(host, context_of(tmp_path, "a", "debate")):
        path = socket_path(context_of(tmp_path, "a", "debate").directory, SOCKET_NAME)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(framed(kind="sit", protocol=1, seat="other", key=1))
        async with asyncio.TaskGroup() as tasks:
            mine = tasks.create_task(rolled(host, pool, chat))
            async with asyncio.timeout(DEADLINE):
                await reader.readuntil(b"messages")
            writer.transport.abort()
        rollout = mine.result()
    assert "a seat ended the connection" in (rollout.error or "")
    assert rollout.inference_failed


async def test_a_host_that_is_killed_ends_the_episode(tmp_path: Path, chat: Chat) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"sit")
        writer.write(
            framed(kind="seated", example=3) + framed(kind="ask", messages=[{"role": "user", "content": "ab"}])
        )
        await reader.readuntil(b"answer")
        writer.transport.abort()

    directory = context_of(tmp_path, "a", "debate").directory
    directory.mkdir(parents=True)
    async with seated(tmp_path, None) as seat:
        server = await asyncio.start_unix_server(die, socket_path(directory, SOCKET_NAME))
        async with server:
            rollout = await rolled(seat, Pool(chat, "cd"), chat)
    assert "a/debate ended the connection" in (rollout.error or "")
    assert (rollout.inference_failed, len(rollout.turns)) == (True, 1)


async def test_a_seat_is_asked_one_thing_after_the_other(tmp_path: Path, chat: Chat) -> None:
    class Hasty(Debate):
        async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
            async with self.table.episode(example.index) as episode:
                question = [{"role": "user", "content": "ab"}]
                await asyncio.gather(episode.ask("other", question), episode.ask("other", question))

    host = Hasty()
    async with seated(tmp_path, host) as seat:
        mine, theirs = await asyncio.gather(rolled(host, Pool(chat, "ab"), chat), rolled(seat, Pool(chat, "cd"), chat))
    assert "has not answered yet" in (mine.error or "")
    assert theirs.inference_failed


@pytest.mark.parametrize("host", ["", "a", "a/", "/debate", "a/b/c", "../debate", "a/.."])
def test_a_host_is_a_run_and_an_environment(host: str) -> None:
    with pytest.raises(ValueError, match="expected RUN/ENVIRONMENT"):
        Seat(host)
