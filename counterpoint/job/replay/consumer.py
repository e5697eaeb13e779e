"""The trainer's end of the wire for replays and benchmarks, in a process of its own.

It receives every batch with the real receiver and its checks, reads every byte, and acknowledges the batch once its step is
committed. It does not train.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import numpy as np
import zmq

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.messages import Acknowledged, Bye, Commit, Hello, Ready
from counterpoint.transport.process.child import Child
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.open import open_receiver

_POLL_SECONDS = 0.5
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


@contextmanager
def consumer(config: TransportConfig, output_dir: Path, next_step: int = 1) -> Iterator[int]:
    """Runs the process during the block; yields its id. It requests batches from `next_step` on, and dies with this process.

    Raises `ChildError` if it cannot start.
    """
    with _running("batches", config.model_dump_json(), str(output_dir), str(next_step)) as pid:
        yield pid


@contextmanager
def bare_consumer(address: str) -> Iterator[int]:
    """Does as `consumer`, but receives any messages at the ZMQ `address` of a REP socket, and sends empty answers."""
    with _running("messages", address) as pid:
        yield pid


@contextmanager
def _running(*arguments: str) -> Iterator[int]:
    command = [sys.executable, "-P", "-m", "counterpoint.job.replay.consumer", *arguments]
    with Child("the process of the consumer", command, stdout=PIPE) as process:
        _, pid = process.ready(_START_SECONDS).split()
        try:
            yield int(pid)
        finally:
            process.stop(_STOP_SECONDS)


def take_batches(config: TransportConfig, output_dir: Path, next_step: int) -> None:
    """Receives and acknowledges batches until the process is killed."""
    receiver = open_receiver(config, output_dir)
    print("ready", os.getpid(), flush=True)
    read = committed = acknowledged = next_step - 1
    while True:
        run_id, message = receiver.receive(_POLL_SECONDS) or ("", None)
        match message:
            case Hello():
                read = acknowledged
                receiver.send(run_id, Ready(acknowledged + 1, config.credit, session=secrets.randbits(62)))
            case Batch():
                read_every_byte(message)
                read = message.step
            case Commit(step):
                committed = step
            case Bye() | None:
                pass
        if min(read, committed) > acknowledged:
            acknowledged = min(read, committed)
            receiver.send(run_id, Acknowledged(acknowledged, acknowledged))


def take_messages(address: str) -> None:
    """Receives and answers messages until the process is killed."""
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    print("ready", os.getpid(), flush=True)
    while True:
        for frame in socket.recv_multipart(copy=False):
            exclusive_or(frame.buffer)
        socket.send(b"")


def read_every_byte(batch: Batch) -> int:
    """Returns the exclusive or of all the batch's bytes, as 64-bit words. The cost is that of reading them."""
    combined = 0
    for array in batch.arrays:
        combined ^= exclusive_or(array)
    return combined


def exclusive_or(buffer: Buffer) -> int:
    """Returns the exclusive or of the buffer's bytes, as 64-bit words."""
    view = as_bytes_view(buffer)
    whole = view.nbytes // 8 * 8
    words = np.frombuffer(view[:whole], dtype=np.uint64)
    return int(np.bitwise_xor.reduce(words)) ^ int.from_bytes(view[whole:], "little")


if __name__ == "__main__":
    if sys.argv[1] == "batches":
        take_batches(TransportConfig.model_validate_json(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        take_messages(sys.argv[2])
