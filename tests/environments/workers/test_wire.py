"""How many messages one iteration of the loop handles, and what their arrival shows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.pool import WorkerPool
from counterpoint.environments.workers.protocol import BEAT, DONE, GENERATE, MAX_BATCH, Message
from counterpoint.environments.workers.session import RemoteSession
from counterpoint.environments.workers.supply import WorkerPlace
from counterpoint.environments.workers.wire import BatchingWire

CALL: Message = [GENERATE, 1, 1, "", -1, None, b""]
END: Message = [DONE, 1, None, [1.0], [], False, None]
SIGN: Message = [BEAT, 0.0]


async def handled_by_iteration(directory: Path, messages: list[Message]) -> list[list[Message]]:
    """Returns the messages that each iteration of the loop handled, without the iterations that handled none."""
    portions: list[list[Message]] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as ours, context.socket(zmq.DEALER) as theirs:
        ours.bind(f"ipc://{directory}/wire")
        theirs.connect(f"ipc://{directory}/wire")
        sender = BatchingWire(theirs, lambda peer, message: None, lambda peer, error: None)
        for message in messages:
            sender.send(b"", message)
        sender.flush()
        assert ours.poll(10_000)
        receiver = BatchingWire(ours, lambda peer, message: portions[-1].append(message), lambda peer, error: None)
        while sum(map(len, portions)) < len(messages):
            portions.append([])
            await asyncio.sleep(0)
        receiver.close()
        sender.close()
    return [portion for portion in portions if portion]


async def test_an_iteration_resumes_one_rollout(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        portions = await handled_by_iteration(tmp_path, [CALL, SIGN, CALL, END, SIGN, SIGN])
    assert portions == [[CALL], [SIGN, CALL], [END], [SIGN, SIGN]]


async def test_messages_that_resume_no_rollout_are_handled_together(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        portions = await handled_by_iteration(tmp_path, [SIGN] * MAX_BATCH + [CALL])
    assert portions == [[SIGN] * MAX_BATCH, [CALL]]


async def test_a_worker_whose_beats_are_queued_behind_its_calls_is_not_silent() -> None:
    pool = WorkerPool(EnvironmentConfig(name="mine", kind="reverse-text", workers=1), 1, False)
    worker = WorkerPlace(0, silent_ticks=8, blamed=True)
    worker.sessions[1] = RemoteSession(1, None, 60.0, lambda message, nbytes: None)
    pool._handle(worker, CALL)
    assert (worker.silent_ticks, worker.blamed) == (0, False)
