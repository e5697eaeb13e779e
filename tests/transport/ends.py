"""Both ends of a wire for the tests: raw strangers, a trainer in another process, and waits that have a deadline and a name."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import zmq

from counterpoint.transport.codec import encode_message
from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.messages import PROTOCOL_VERSION, Acknowledged, Bye, Commit, Hello, Ready, ToOrchestrator
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.endpoint import resolve_address
from counterpoint.transport.wires.link import TrainerLink
from counterpoint.transport.wires.open import open_receiver
from tests.support.polling import DEADLINE_SECONDS, wait_until

SESSION = 7
"""That every READY of these tests opens."""

Message = TypeVar("Message", Hello, Batch, Commit, Bye)


def take(receiver: BatchReceiver, kind: type[Message]) -> tuple[str, Message]:
    """The receiver's next message, which must be of `kind`."""
    received = receiver.receive(DEADLINE_SECONDS)
    assert received is not None, f"no {kind.__name__} came in {DEADLINE_SECONDS} s"
    run_id, message = received
    assert isinstance(message, kind), message
    return run_id, message


def refuse(receiver: BatchReceiver, total: int) -> None:
    """Lets the receiver read until it has refused `total` messages; it must accept none."""

    def refused() -> bool:
        assert receiver.receive(0.01) is None
        return receiver.rejected >= total

    wait_until(refused, f"refusal number {total}")


async def hear(link: TrainerLink) -> ToOrchestrator:
    """The link's next message."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await link.receive()


async def handshake(link: TrainerLink, receiver: BatchReceiver, next_step: int = 1) -> Hello:
    """Waits for the link's Hello and answers Ready, both in order."""
    _, hello = await asyncio.to_thread(take, receiver, Hello)
    receiver.send(hello.run_id, Ready(next_step, 4, SESSION))
    assert await hear(link) == Ready(next_step, 4, SESSION)
    return hello


class Stranger:
    """Writes whatever frames it is given to the trainer of a job, without the link's good manners."""

    def __init__(self, config: TransportConfig, output_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = int(DEADLINE_SECONDS * 1000)
        self._socket.connect(resolve_address(config, output_dir))

    def write(self, frames: list[Buffer]) -> None:
        """Sends one message of any frames. Raises `zmq.Again` once ZMQ has given up a connection that the trainer refused."""
        self._socket.send_multipart([as_bytes_view(frame) for frame in frames])

    def read(self) -> list[Buffer]:
        """The trainer's next answer."""
        assert self._socket.poll(int(DEADLINE_SECONDS * 1000)), "no answer to the stranger"
        return list(self._socket.recv_multipart())

    def close(self) -> None:
        """Leaves without a word."""
        self._socket.close()
        self._context.term()


@contextmanager
def trainer_process(config: TransportConfig, output_dir: Path, next_step: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer's end in another process (`serve_forever`), killed with SIGKILL at the end if it still runs."""
    command = [sys.executable, "-m", "tests.transport.ends", config.model_dump_json(), str(output_dir), str(next_step)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        yield process
    finally:
        process.kill()
        process.send_signal(signal.SIGCONT)
        process.wait(DEADLINE_SECONDS)


def serve_forever(config: TransportConfig, output_dir: Path, next_step: int) -> None:
    """Answers every Hello with Ready and every batch with an acknowledgement."""
    receiver = open_receiver(config, output_dir)
    while True:
        match receiver.receive(1.0):
            case (run_id, Hello()):
                receiver.send(run_id, Ready(next_step, 4, SESSION))
            case (run_id, Batch() as batch):
                receiver.send(run_id, Acknowledged(batch.step, 0))
            case _:
                continue


def hello_frames(run_id: str = "default", protocol: int = PROTOCOL_VERSION) -> list[Buffer]:
    """A Hello as frames."""
    return encode_message(Hello(run_id, 0, protocol=protocol))


if __name__ == "__main__":
    serve_forever(TransportConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
