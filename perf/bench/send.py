"""Measures sending: the sender's own thread and wire, to another process that reads every byte, beside a bare ZMQ loop.

    python -m perf.bench.send [--quick | --full]

The bare loop sends the same frames with `copy=False` to a socket in another process, which reads every byte and answers once a
message; nothing is encoded or checked there.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

from counterpoint.job.replay.consumer import bare_consumer, consumer
from counterpoint.job.replay.lag_trace import LagTrace
from counterpoint.job.replay.replay import on_daemons_loop, rows_of
from counterpoint.orchestrator.step.sender import Sender
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport import codec
from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Batch, SampleInfo
from counterpoint.transport.wires.open import open_link
from perf.bench.command import Size, show
from perf.figures import Case, Figure
from perf.stalls import recorded_stalls

RUN_ID = "bench"
SAMPLES, CHUNKS, LAYERS, TOP_K = 128, 24, 48, 8
SAMPLE_BYTES = 9_400_000
"""1.2 GB in all."""
IDLE_SECONDS = 5.0
WARM_UP_ROUNDS = 6
"""Rounds until the receiving processes keep the memory that they go on to use. Before, the C library returns much of it
to the kernel after a batch, and receiving the next one takes 170,000 page faults (0.7 s on two cores)."""


def measure(size: Size) -> list[Case]:
    """Measures the case `send`."""
    batch = make_batch(SAMPLES // size.pick(8, 1, 1))
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory, recorded_stalls() as stalls:
        trace, bare = on_daemons_loop(lambda: _send(Path(directory), batch, size.pick(3, 5, 5)))
    case, unstalled = (_case(batch, each, bare) for each in (trace, trace.less(stalls.within)))
    return [case.beside(unstalled, stalls)]


async def _send(directory: Path, batch: Batch, rounds: int) -> tuple[LagTrace, list[float]]:
    """Returns the trace of our sender, and the seconds of each round of the bare loop."""
    transport = TransportConfig()
    bare = []
    address = f"ipc://{directory}/bare.sock"
    with consumer(transport, directory), bare_consumer(address):
        sender = Sender(open_link(transport, directory), directory, RUN_ID, 0, transport.largest_batch)
        serving = asyncio.create_task(sender.run())
        await sender.wait_ready(60.0)
        async with LagTrace() as trace:
            with trace.span("idle"):
                await asyncio.sleep(IDLE_SECONDS)
            for step in range(1, WARM_UP_ROUNDS + rounds + 1):
                with trace.span("warm-up" if step <= WARM_UP_ROUNDS else "send"):
                    sender.offer(_of_step(batch, step), batch.nbytes)
                    sender.commit(step)
                    await sender.wait_durable(step)
                bare.append(await in_thread(_bare_seconds, address, batch))
        serving.cancel()
        await asyncio.wait([serving])
        await sender.close()
    return trace, bare[WARM_UP_ROUNDS:]


def _case(batch: Batch, trace: LagTrace, bare: Sequence[float]) -> Case:
    rows = {row.phase: row for row in rows_of(trace)}
    idle, sending = rows["idle"], rows["send"]
    bare_seconds = statistics.median(bare)
    return Case(
        f"sender, {len(batch.samples)} samples",
        [
            Figure("bytes", batch.nbytes / 1e6, "MB"),
            Figure("idle: lag max", 1e3 * idle.lag.max, "ms"),
            Figure("sending: lag p99", 1e3 * sending.lag.p99, "ms"),
            Figure("sending: lag max over idle's", 1e3 * (sending.lag.max - idle.lag.max), "ms", 5.0),
            Figure("sending: lag max over the wall", sending.lag.max / sending.seconds, "x", 0.25),
            Figure("bare ZMQ", batch.nbytes / bare_seconds / 1e6, "MB/s"),
            Figure("sender", batch.nbytes / sending.seconds / 1e6, "MB/s"),
            Figure("sender over bare ZMQ", bare_seconds / sending.seconds, "x", 0.6, "at least"),
        ],
    )


def make_batch(samples: int) -> Batch:
    """Returns `samples` of `SAMPLE_BYTES` each, nearly all of it routing in `CHUNKS` chunks."""
    rows = SAMPLE_BYTES // (CHUNKS * LAYERS * TOP_K)
    tokens = rows * CHUNKS + 1
    generator = np.random.default_rng(0)
    chunks = [
        tuple(generator.integers(0, 128, (rows, LAYERS, TOP_K), dtype=np.uint8) for _ in range(CHUNKS))
        for _ in range(samples)
    ]
    return Batch(
        run_id=RUN_ID,
        step=1,
        samples=tuple(SampleInfo(f"0-{index}", "synthetic", 0, 1.0, 1.0) for index in range(samples)),
        columns={
            "token_ids_T": np.zeros(samples * tokens, dtype=np.int32),
            "loss_mask_T": np.ones(samples * tokens, dtype=np.uint8),
            "log_probabilities_T": np.zeros(samples * tokens, dtype=np.float32),
            "advantages_T": np.ones(samples * tokens, dtype=np.float32),
            "sample_offsets": np.arange(0, (samples + 1) * tokens, tokens, dtype=np.int64),
        },
        routed_experts=tuple(chunks),
    )


def _of_step(batch: Batch, step: int) -> Batch:
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    return Batch(**{**fields, "step": step})


def _bare_seconds(address: str, batch: Batch) -> float:
    """Returns the seconds from the first of the batch's frames until the answer."""
    frames = [as_bytes_view(frame) for frame in codec.encode(batch)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(address)
    try:
        socket.send(b"")
        socket.recv()
        began = time.perf_counter()
        socket.send_multipart(frames, copy=False)
        socket.recv()
        return time.perf_counter() - began
    finally:
        socket.close(linger=0)
        context.term()


if __name__ == "__main__":
    show(measure)
