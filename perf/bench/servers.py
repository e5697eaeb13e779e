"""An inference server without a model, as a process of its own: the other end of the benchmarks of receiving and scheduling.

It serves our binary route, a stock server's JSON route, and `RAW_PATH`/N, answered by N bytes and nothing else, on one loop
with a bare protocol, so that the client is measured. Every answer is encoded once. The process ends when its standard input
closes, so it cannot outlive the benchmark.

    python -m perf.bench.servers DELAY_SECONDS LAYERS TOP_K
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from subprocess import PIPE
from typing import cast

import numpy as np
import orjson
import uvloop

from counterpoint.inference import identity, wire
from counterpoint.inference.base import REQUEST_ID_BYTES, Completion
from counterpoint.inference.call_frames import CALL, CALLS_PATH, FrameSender, FrameSplitter, taken
from counterpoint.inference.loads import Origin
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.priority import compute_nice

RAW_PATH = "/raw"
COMPLETIONS_PATH = "/v1/completions"

INSTANCE = "benchmark"

START_SECONDS = 60.0

MOST_CALL_BYTES = 1 << 20

PLACE_OF_ECHO = b"\xa5" * REQUEST_ID_BYTES


@contextmanager
def load_server(delay_seconds: float = 0.0, layers: int = 0, top_k: int = 0) -> Iterator[str]:
    """Yields the URL of a server that runs as long as the block.

    It answers after `delay_seconds`, each completion with as many tokens as were asked for and, if `layers`, with routing of
    `layers` x `top_k` uint8 a row.
    """
    with served_by(__name__, str(delay_seconds), str(layers), str(top_k)) as url:
        yield url


@contextmanager
def served_by(module: str, *words: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields the URL of a module that calls `serve`, a process of its own as long as the block, as nice as a job's server."""
    command = [sys.executable, "-P", "-m", module, *words]
    with Child(module, command, stdin=PIPE, stdout=PIPE, environment=environment, nice=compute_nice()) as process:
        yield f"http://127.0.0.1:{int(process.line(START_SECONDS))}"


class Answers:
    """Whole HTTP responses, each encoded once."""

    def __init__(self, layers: int, top_k: int) -> None:
        self._layers, self._top_k = layers, top_k
        self.are_small = not layers
        """Whether they fit into a connection of many calls."""
        status = {"instance": INSTANCE, "draining": False, "weights": {"load": 0}, "adapters": {}}
        self._status = response(orjson.dumps(status))
        self._raw = b""

    def to(self, path: str, body: bytes) -> Sequence[bytes]:
        """Returns the pieces of the response to a request; 404 for a path that is not served."""
        if path == wire.GENERATE_PATH:
            asked = wire.decode_request(body)
            routed = len(asked.prompt_ids) - asked.routed_experts_start if self._layers else 0
            before, after = self._generated(routed, asked.sampling.max_tokens)
            return before, asked.echo, after
        return (self._other(path, body),)

    def _other(self, path: str, body: bytes) -> bytes:
        if path == COMPLETIONS_PATH:
            return self._completed(orjson.loads(body)["max_tokens"])
        if path == identity.STATUS_PATH:
            return self._status
        if path.startswith(RAW_PATH):
            length = int(path.removeprefix(RAW_PATH + "/"))
            self._raw = self._raw if len(self._raw) == length else bytes(length)
            return self._raw
        return response(b"", "404 Not Found")

    @cache  # noqa: B019 - one instance, which lives as long as the process
    def _generated(self, routed_of_prompt: int, tokens: int) -> tuple[bytes, bytes]:
        """Returns what comes before and after the echo of the request, which differs each time."""
        rows = routed_of_prompt + tokens - 1
        routing = np.random.default_rng(0).integers(0, 128, (rows, self._layers, self._top_k), dtype=np.uint8)
        completion = Completion(
            token_ids=np.arange(100, 100 + tokens, dtype=np.int32),
            log_probabilities=np.full(tokens, -0.5, dtype=np.float32),
            finish_reason="length",
            routed_experts=routing if self._layers else None,
            origin=Origin(INSTANCE, None, 0, 0, "those of the benchmark"),
            echo=PLACE_OF_ECHO,
        )
        before, _, after = response(wire.encode_completion(completion)).partition(PLACE_OF_ECHO)
        return before, after

    @cache  # noqa: B019 - as above
    def _completed(self, tokens: int) -> bytes:
        """Returns what a stock vLLM answers to `logprobs = 0`, `return_token_ids` and `return_tokens_as_token_ids`."""
        ids = list(range(100, 100 + tokens))
        names = [f"token_id:{token}" for token in ids]
        choice = {
            "index": 0, "text": "word " * tokens, "finish_reason": "length", "stop_reason": None, "token_ids": ids,
            "logprobs": {
                "tokens": names, "token_logprobs": [-0.5] * tokens, "text_offset": [5 * place for place in range(tokens)],
                "top_logprobs": [{name: -0.5} for name in names],
            },
        }  # fmt: skip
        usage = {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens}
        content = {
            "id": "cmpl-0", "object": "text_completion", "created": 0, "model": "model", "choices": [choice], "usage": usage,
        }  # fmt: skip
        return response(orjson.dumps(content))


def response(body: bytes, status: str = "200 OK") -> bytes:
    """Returns a whole HTTP response."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time, or with many calls (`inference.call_frames`)."""

    def __init__(self, answers: Answers, delay_seconds: float) -> None:
        self._answers, self._delay_seconds = answers, delay_seconds
        self._received = bytearray()
        self._splitter: FrameSplitter | None = None
        self._path = ""
        """The path of model calls, once the connection carries many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)
        self._sender = FrameSender(self._transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._splitter is not None:
            for number, kind, body in self._splitter.split(data):
                if kind == CALL:
                    self.respond(self._path, body, number)
            return
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found or len(rest) < _content_length(head):
            return
        self._received.clear()
        path = head.split(b" ", 2)[1].decode()
        if not (path.endswith(CALLS_PATH) and self._answers.are_small):
            self.respond(path, bytes(rest), None)
            return
        self._splitter, self._path = FrameSplitter(MOST_CALL_BYTES), path.removesuffix(CALLS_PATH) + wire.GENERATE_PATH
        self._transport.write(taken(MOST_CALL_BYTES))

    def respond(self, path: str, body: bytes, number: int | None) -> None:
        """Answers a request, or the call of a number, after the server's delay."""
        self.send_later(self._delay_seconds, self._answers.to(path, body), number)

    def send_later(self, seconds: float, answer: Sequence[bytes], number: int | None) -> None:
        """Sends a whole HTTP response, or what it says as that of a call."""
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._send, answer, number)
        else:
            self._send(answer, number)

    def _send(self, answer: Sequence[bytes], number: int | None) -> None:
        if self._transport.is_closing():
            return
        if number is None:
            self._transport.writelines(answer)
        else:
            head, _, body = b"".join(answer).partition(b"\r\n\r\n")
            self._sender.send(number, int(head[9:12]), body)


def _content_length(head: bytes | bytearray) -> int:
    _, found, after = head.lower().partition(b"\r\ncontent-length:")
    return int(after.partition(b"\r\n")[0]) if found else 0


async def serve(connection: Callable[[], Connection]) -> None:
    """Serves on a free port, which is printed, until the standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(connection, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    delay, routed_layers, routed_top_k = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    uvloop.run(serve(partial(Connection, Answers(routed_layers, routed_top_k), delay)))
