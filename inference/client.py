"""One server, as the pool speaks to it: the interface, and the client of our own plugin's routes.

`openai_client` is the other implementation, for a stock server.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import orjson

from inference import wire
from inference.base import Completion, GenerateRequest, ServerFailure, WeightUpdate
from inference.connection import Connections, call
from transport.records import Float32Array


class ServerClient(Protocol):
    """One server. Every method raises `RequestRefused`, `ServerFailure` or `ServerUnreachable`, and leaves deadlines to the
    caller; cancelling a call ends it at the server too."""

    url: str

    async def identify(self) -> str:
        """Returns if the server is healthy, with a name of the running instance: it changes with a restart, where one can
        tell."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """One model call, its answer checked against the request."""

    async def load(self, update: WeightUpdate) -> None:
        """Loads weights, keeping the requests in flight."""

    async def probe(self, model: str, token_ids: list[int]) -> Float32Array:
        """Log-probability of each token after the first under `model`, at temperature 1."""


class BinaryClient:
    """The client of `plugin.routes`."""

    def __init__(self, url: str, connections: Connections) -> None:
        self.url = url
        self._connections = connections
        self._channel = connections.channel(url)

    async def identify(self) -> str:
        """See `ServerClient`."""
        status = await self._administer(wire.STATUS_PATH, None)
        return str(status.get("instance"))

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `ServerClient`."""
        body = wire.encode_request(request)
        answer = await self._channel.post(wire.GENERATE_PATH, body, "application/msgpack")
        completion = wire.decode_completion(answer)
        completion.check(request)
        return completion

    async def load(self, update: WeightUpdate) -> None:
        """See `ServerClient`. One transaction at the server: it goes through even if this call is cancelled."""
        fields = {"version": update.version, "directory": str(update.directory.absolute()), "adapter": update.adapter}
        await self._administer(wire.UPDATE_PATH, fields)

    async def probe(self, model: str, token_ids: list[int]) -> Float32Array:
        """See `ServerClient`."""
        answer = await self._administer(wire.PROBE_PATH, {"model": model, "token_ids": token_ids})
        return as_log_probabilities(answer.get("log_probabilities"), self.url)

    async def _administer(self, path: str, fields: dict[str, Any] | None) -> dict[str, Any]:
        body = None if fields is None else orjson.dumps(fields)
        return as_object(await call(self._connections.admin, self.url + path, body), self.url + path)


def as_object(body: bytes | memoryview, url: str) -> dict[str, Any]:
    """A JSON object. Raises `ServerFailure` for anything else."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ServerFailure(f"{url} answered something that is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ServerFailure(f"{url} answered a JSON {type(content).__name__}, an object is expected")
    return content


def as_log_probabilities(values: object, url: str) -> Float32Array:
    """A list of numbers as an array. Raises `ServerFailure` for anything else."""
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise ServerFailure(f"{url} answered log-probabilities that are not a list of numbers")
    return np.asarray(values, dtype=np.float32)
