"""The interface of one server's client, and the client of our own plugin's routes.

`openai_client` is the other implementation, for a stock server.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import orjson

from counterpoint.inference import identity, wire
from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    HeldWeights,
    ParsedText,
    ScoreRequest,
    Scores,
    ServerFailure,
    WeightUpdate,
)
from counterpoint.inference.call_frames import has_small_answer
from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.clients.http_sessions import HttpSessions, call
from counterpoint.inference.clients.load_report import read_load
from counterpoint.inference.loads import LoadClaim, Origin, Stated
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.records import Float32Array


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """A server's answer to a health check."""

    instance: str
    """The id of the running instance: it changes with a restart, if the server reports one."""
    draining: bool = False
    """Whether an operator set the server to get no new requests."""
    weights: int | None = None
    """The number of the load of its full weights (`inference.loads`); None if the server tells none, as a stock one."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """The same of each adapter that it has."""
    reasons: bool = False
    """Whether it has a parser of reasoning."""
    said: Mapping[str | None, Any] = field(default_factory=dict)
    """All that it says of the weights of each name, as received; None: the full weights. Empty for a stock server."""

    def stated(self, name: str | None) -> Stated | None:
        """Returns what it says of the weights of a name; None if that is nothing, or cannot be read.

        Nobody asks for most of them, and a health check of many names is not to read them all.
        """
        return Stated.decode(self.said.get(name))

    @classmethod
    def of_status(cls, status: Mapping[str, Any], url: str) -> ServerIdentity:
        """Reads a server's status. Raises `ServerFailure` for anything else."""
        match status:
            case {
                "instance": str(instance),
                "draining": bool(draining),
                "weights": {"load": int(load)},
                "adapters": dict(adapters),
            } if all(type(each) is dict and type(each.get("load")) is int for each in adapters.values()):
                loads = {name: each["load"] for name, each in adapters.items()}
                said = {None: status["weights"], **adapters}
                return cls(instance, draining, load, loads, status.get("reasons") is True, said)
        raise ServerFailure(
            f"{url} does not say in its status which weights it holds: it runs another version of Counterpoint"
        )


class ServerClient(Protocol):
    """The client of one server.

    Every method raises `RequestRefused`, `ServerFailure` or `ServerUnreachable`, and leaves deadlines to the caller;
    cancelling a call ends it at the server too.
    """

    url: str
    reasons: bool
    """Whether the server says that it parses reasoning."""

    async def identify(self) -> ServerIdentity:
        """Returns the instance if the server is healthy. The same object as before if the server says the same."""

    async def observe(self) -> Observation | None:
        """Returns the server's load, or None if it does not report any."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Makes one model call. The caller checks the answer."""

    async def cut(self, request_id: bytes) -> None:
        """Has a model call answered with what was sampled so far, whose finish reason is then `abort`, if it is there."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Returns the log-probability of each token from `start` on, at temperature 1, of the whole distribution.

        The caller checks them.
        """

    async def detokenize(self, token_ids: list[int]) -> str:
        """Returns the text of token ids, special tokens included."""

    async def load(
        self, update: WeightUpdate, claim: LoadClaim, on_begun: Callable[[], None] | None = None
    ) -> HeldWeights | None:
        """Loads weights for the owner that `claim` names, keeping the requests in flight.

        Returns the weights that the server then holds, or None if it cannot report them. `on_begun` may be called before, once
        no request that comes from then on is computed with older weights.
        """

    async def probe(self, model: str, token_ids: list[int]) -> Scores:
        """Returns the log-probability of each token after the first under `model`, at temperature 1."""

    async def parse(
        self, token_ids: list[int], tools: list[Any], template_kwargs: dict[str, Any], *, cut: bool
    ) -> ParsedText:
        """Returns what a completion says. `tools` are definitions in OpenAI's form.

        `cut`: the model did not end the completion itself. It then has the calls that are whole, and no others.
        """

    async def unload(self, adapter: str | None, claim: LoadClaim) -> None:
        """Ends the server's requests under `adapter`, and removes its weights. None: gives up the full weights, which stay."""

    def close(self) -> None:
        """Cuts this server's connections."""


class BinaryClient:
    """The client of `plugin.routes`."""

    def __init__(self, url: str, connections: HttpSessions, *, proves: bool = True) -> None:
        """`proves`: the server must have the identity of the configuration, if there is one. An operator may add others."""
        self.url = url
        self.reasons = False
        self._connections = connections
        self._http = connections.binary_client(url)
        self._calls = connections.many_calls(self._http)
        self._admin = connections.binary_client(url, administers=True)
        self._sender = connections.weight_sender(url)
        self._secret = connections.secret if proves else None
        self._proven = ""
        """The instance of the server's process, which has proven that it is the job's."""
        self._status: dict[str, Any] = {}
        """The last status, without the proof that differs each time."""
        self._identity: ServerIdentity | None = None
        """The identity of that status."""

    async def identify(self) -> ServerIdentity:
        """See `ServerClient`."""
        if self._secret is None:
            found = self._read(await self._administer(identity.STATUS_PATH, None))
            self.reasons = found.reasons
            return found
        nonce = secrets.token_hex(identity.NONCE_BYTES)
        status = await self._administer(identity.STATUS_PATH, None, {wire.NONCE_HEADER: nonce})
        proof = status.pop("proof", None)
        found = self._read(status)
        if not identity.is_proof(proof, self._secret, found.instance, nonce):
            raise ServerFailure(
                f"{self.url} is not this job's server: it does not prove the identity in {self._connections.identity_file}"
            )
        self._proven, self.reasons = found.instance, found.reasons
        return found

    def _read(self, status: dict[str, Any]) -> ServerIdentity:
        """Returns the identity of a status: the same object as the last one if the server says the same."""
        if self._identity is None or status != self._status:
            self._status, self._identity = status, ServerIdentity.of_status(status, self.url)
        return self._identity

    async def observe(self) -> Observation | None:
        """See `ServerClient`."""
        return await read_metrics(self._connections, self.url)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `ServerClient`."""
        body = wire.encode_request(request)
        http = self._calls if has_small_answer(request) else self._http
        return wire.decode_completion(await http.post(wire.GENERATE_PATH, body, "application/octet-stream"))

    async def cut(self, request_id: bytes) -> None:
        """See `ServerClient`."""
        await self._administer(wire.CUT_PATH, {"request_id": request_id.hex()})

    async def score(self, request: ScoreRequest) -> Scores:
        """See `ServerClient`."""
        body = wire.encode_score_request(request)
        return wire.decode_scores(await self._http.post(wire.SCORE_PATH, body, "application/msgpack"))

    async def detokenize(self, token_ids: list[int]) -> str:
        """See `ServerClient`."""
        return await detokenize(self._connections, self.url, token_ids)

    async def load(
        self, update: WeightUpdate, claim: LoadClaim, on_begun: Callable[[], None] | None = None
    ) -> HeldWeights:
        """See `ServerClient`. One transaction at the server: once it loads, it completes even if this call is cancelled."""
        claim = self._proving(claim)
        if self._sender is not None:
            answer = as_object(await self._sender.send(update, claim), self.url)
        else:
            directory = str(update.directory.absolute())
            fields = {
                "version": update.version,
                "directory": directory,
                "adapter": update.adapter,
                "claim": claim.encode(),
            }
            # An answer that may begin before its body is known has no length, whoever asks.
            begun = (on_begun or _ignore) if update.adapter is None else None
            answer = await self._administer(wire.UPDATE_PATH, fields, on_accepted=begun)
        match answer.get("held"):
            case {"dtype": str(dtype), "layers": dict(layers), "load": int(load)} if all(
                type(value) is str for value in layers.values()
            ):
                return HeldWeights(dtype, layers, load)
        raise ServerFailure(
            f"{self.url} did not report which weights it loaded: it runs another version of Counterpoint"
        )

    async def probe(self, model: str, token_ids: list[int]) -> Scores:
        """See `ServerClient`."""
        answer = await self._administer(wire.PROBE_PATH, {"model": model, "token_ids": token_ids})
        try:
            origin = Origin.decode(answer.get("weights"))
        except ValueError as error:
            raise ServerFailure(f"{self.url} answered a probe, and {error}") from error
        return Scores(as_log_probabilities(answer.get("log_probabilities"), self.url), origin)

    async def parse(
        self, token_ids: list[int], tools: list[Any], template_kwargs: dict[str, Any], *, cut: bool
    ) -> ParsedText:
        """See `ServerClient`."""
        fields = {"token_ids": token_ids, "tools": tools, "template_kwargs": template_kwargs, "cut": cut}
        return ParsedText.from_answer(await self._administer(wire.PARSE_PATH, fields), self.url)

    async def unload(self, adapter: str | None, claim: LoadClaim) -> None:
        """See `ServerClient`."""
        await self._administer(wire.UNLOAD_PATH, {"adapter": adapter, "claim": self._proving(claim).encode()})

    def _proving(self, claim: LoadClaim) -> LoadClaim:
        """Returns the claim with a proof that it is made by the job that the server belongs to."""
        secret = self._secret
        return claim if secret is None else replace(claim, proof=identity.proof(secret, self._proven, claim.key))

    def close(self) -> None:
        """See `ServerClient`."""
        self._connections.forget(self._calls)
        self._connections.forget(self._http)
        self._connections.forget(self._admin)

    async def _administer(
        self,
        path: str,
        fields: dict[str, Any] | None,
        headers: Mapping[str, str] | None = None,
        on_accepted: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        url = self.url + path
        if fields is None:
            return as_object(await self._admin.get(path, headers or {}), url)
        body = dumps(fields)
        if on_accepted is None:
            return as_object(await self._admin.post(path, body, "application/json"), url)
        return as_object(await call(self._connections.admin, url, body, headers, on_accepted), url)


def _ignore() -> None:
    """Does nothing, where nobody waits for the beginning of a load."""


async def read_metrics(connections: HttpSessions, url: str) -> Observation | None:
    """Returns the load that vLLM reports under `/metrics`; None if the answer is not vLLM's."""
    return read_load(await call(connections.admin, f"{url}/metrics", None))


async def detokenize(connections: HttpSessions, url: str, token_ids: list[int]) -> str:
    """Returns the text of token ids by vLLM's own route. Raises `ServerFailure` for an answer that is not vLLM's."""
    answer = as_object(await call(connections.admin, f"{url}/detokenize", orjson.dumps({"tokens": token_ids})), url)
    if not isinstance(text := answer.get("prompt"), str):
        raise ServerFailure(f"{url} answered /detokenize without a prompt; a vLLM from 0.30 on is expected")
    return text


async def served_models(connections: HttpSessions, url: str) -> list[str]:
    """Returns the names of the models that a server has, adapters included. Raises `ServerFailure` for another answer."""
    answer = as_object(await call(connections.admin, f"{url}/v1/models", None), url)
    match answer.get("data"):
        case list(models) if all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in models):
            return [each["id"] for each in models]
    raise ServerFailure(f"{url} answered /v1/models without the names of models")


def as_object(body: bytes | memoryview, url: str) -> dict[str, Any]:
    """Parses a JSON object. Raises `ServerFailure` for anything else."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ServerFailure(f"{url} answered something that is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ServerFailure(f"{url} answered a JSON {type(content).__name__}, an object is expected")
    return content


def as_log_probabilities(values: object, url: str) -> Float32Array:
    """Returns a list of numbers as an array. Raises `ServerFailure` for anything else."""
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise ServerFailure(f"{url} answered log-probabilities that are not a list of numbers")
    return np.asarray(values, dtype=np.float32)
