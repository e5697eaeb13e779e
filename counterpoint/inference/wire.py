"""The binary encoding of a model call, shared by the client and the plugin.

What differs from turn to turn (token ids, log-probabilities, numbers, ids) is at fixed places as raw little-endian bytes, and
the client reads arrays as views. What turns have in common, the sampling parameters of a request, the weights and the finish
reason of a response, is msgpack, which either end encodes and reads once for all turns that have the same. Both ends validate
what they receive before they use it.

    request:  magic, tokens, routed_experts_start, bytes of the model's name, request id | prompt | model | sampling parameters
    response: magic, tokens, cached tokens or -1, bytes of what follows the arrays, echo | token ids | log-probabilities
              | [finish reason, weights] | from the next multiple of 8, if there is more, a frame of `transport.arrays`

A request for scores is msgpack, and its response such a frame.
"""

from __future__ import annotations

import reprlib
import struct
from functools import lru_cache
from typing import Annotated, Any

import msgpack
import msgspec
import numpy as np
from msgspec import Meta
from pydantic import ValidationError

from counterpoint.inference.base import (
    MOST_STOP_TOKENS,
    OPTIONAL_PARAMETERS,
    REQUEST_ID_BYTES,
    Completion,
    GenerateRequest,
    SamplingParameters,
    ScoreRequest,
    Scores,
    ServerFailure,
)
from counterpoint.inference.loads import Origin
from counterpoint.transport.arrays import CodecError, pack_arrays, unpack_arrays
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Alternatives, RoutingArray
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import unpacked

GENERATE_PATH = "/counterpoint/v1/generate"
SCORE_PATH = "/counterpoint/v1/score"
PROBE_PATH = "/counterpoint/v1/probe"
UPDATE_PATH = "/counterpoint/v1/update"
PARSE_PATH = "/counterpoint/v1/parse"
UNLOAD_PATH = "/counterpoint/v1/unload"
DRAIN_PATH = "/counterpoint/v1/drain"
CUT_PATH = "/counterpoint/v1/cut"

NONCE_HEADER = "X-Counterpoint-Nonce"
"""What a server is to prove its identity by, in its status."""

REQUEST_OVERHEAD_BYTES = 1 << 16
"""Most bytes of a request besides its prompt."""

MAX_RESPONSE_BYTES = 1 << 30
"""A longer response is refused before it is read: 2**30 bytes is the routing of two million tokens of 48 layers, top-8, in
uint8."""

MAX_MODEL_NAME = 4096

MAX_DESCRIPTION_BYTES = 1 << 15
"""Longest description of a response: it is kept after the response is gone. It names an adapter and an owner."""

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")

_REQUEST = struct.Struct(f"<4sIII{REQUEST_ID_BYTES}s")
_REQUEST_MAGIC = b"CPR1"
_RESPONSE = struct.Struct(f"<4sIiI{REQUEST_ID_BYTES}s")
_RESPONSE_MAGIC = b"CPC1"
_TOKEN_BYTES = _INT32.itemsize + _FLOAT32.itemsize
_ALIGNMENT = 8
_UNKNOWN = -1
"""The cached tokens of a response that does not say how many they are."""


def max_request_bytes(max_model_len: int) -> int:
    """Returns the longest request body that a server with a context of `max_model_len` tokens accepts."""
    return _INT32.itemsize * max_model_len + REQUEST_OVERHEAD_BYTES


def encode_request(request: GenerateRequest) -> bytes:
    """Returns the body of a request."""
    prompt, model = request.prompt_ids.astype(_INT32, copy=False), request.model.encode()
    start, request_id = request.routed_experts_start, request.request_id
    head = _REQUEST.pack(_REQUEST_MAGIC, len(prompt), start, len(model), request_id)
    return b"".join((head, prompt.tobytes(), model, request.sampling.packed))


def decode_request(body: bytes) -> GenerateRequest:
    """Reads a request, whose size the caller has bounded. Requests with the same sampling parameters share them.

    Raises `ValueError`, naming the field, for anything malformed.
    """
    if len(body) < _REQUEST.size or not body.startswith(_REQUEST_MAGIC):
        raise CodecError(
            "the body is no model call of this version; does the client run another version of Counterpoint?"
        )
    _, tokens, start, named, request_id = _REQUEST.unpack_from(body)
    model_at = _REQUEST.size + tokens * _INT32.itemsize
    if not tokens or model_at > len(body):
        raise CodecError(
            f"prompt_ids: {tokens} tokens in a body of {len(body)} bytes; expected one or more, all of them there"
        )
    if start > tokens:
        raise CodecError(f"routed_experts_start = {start}: it must be from 0 to the prompt's {tokens} tokens")
    try:
        model = body[model_at : model_at + named].decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"model: {error}") from error
    if not 0 < len(model) <= MAX_MODEL_NAME:
        raise CodecError(f"model: a name of {len(model)} characters; 1 to {MAX_MODEL_NAME} are allowed")
    prompt_ids = np.frombuffer(body, _INT32, tokens, _REQUEST.size)
    return GenerateRequest(model, prompt_ids, _sampling(body[model_at + named :]), start, request_id)


@lru_cache(maxsize=64)
def _sampling(packed: bytes) -> SamplingParameters:
    """Reads the sampling parameters: those and no others, so that one which a client of another version has is not ignored."""
    given = _fields(packed, "the map of sampling parameters")
    for name in SamplingParameters.model_fields:
        if name not in given and name not in OPTIONAL_PARAMETERS:
            raise ValueError(f"{name}: the request has no such field, which this server expects")
    try:
        return SamplingParameters.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place} = {reprlib.repr(first['input'])}: {first['msg']}") from None


def encode_score_request(request: ScoreRequest) -> bytes:
    """Returns the body of a request for the log-probabilities of given tokens."""
    token_ids = request.token_ids.astype(_INT32, copy=False).tobytes()
    body: bytes = msgpack.packb(
        {"model": request.model, "token_ids": token_ids, "start": request.start, "request_id": request.request_id}
    )
    return body


def decode_score_request(body: bytes) -> ScoreRequest:
    """Does as `decode_request`, of `encode_score_request`."""
    found = typed(_fields(body, "the body"), _ScoreFields, "the request", CodecError)
    if len(found.token_ids) % _INT32.itemsize:
        raise CodecError(f"token_ids: {len(found.token_ids)} bytes are not one or more int32")
    token_ids = np.frombuffer(found.token_ids, _INT32)
    if found.start >= len(token_ids):
        raise CodecError(f"start = {found.start}: it must be from 1 to the last of the {len(token_ids)} tokens")
    return ScoreRequest(found.model, token_ids, found.start, found.request_id)


class _ScoreFields(msgspec.Struct):
    """The fields of `encode_score_request`."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_NAME)]
    token_ids: Annotated[bytes, Meta(min_length=_INT32.itemsize)]
    start: Annotated[int, Meta(ge=1)]
    request_id: Annotated[bytes, Meta(min_length=REQUEST_ID_BYTES, max_length=REQUEST_ID_BYTES)]


def encode_scores(scores: Scores) -> bytes:
    """Returns the body of a response to `encode_score_request`."""
    header = _provenance_header(scores)
    buffers = pack_arrays(header, {"log_probabilities": scores.log_probabilities})
    return b"".join(as_bytes_view(buffer) for buffer in buffers)


def decode_scores(body: bytes | memoryview) -> Scores:
    """Reads a response, as a view of `body`. Raises `ServerFailure` for anything malformed."""
    try:
        header, arrays = unpack_arrays(body)
    except CodecError as error:
        raise ServerFailure(f"the response is malformed: {error}") from error
    scores = arrays.get("log_probabilities")
    if scores is None or scores.dtype != np.float32 or scores.ndim != 1:
        raise ServerFailure("the response is malformed: log_probabilities is not a row of float32")
    return Scores(scores, *_provenance(header))


def _provenance_header(answer: Completion | Scores) -> dict[str, Any]:
    """Returns what every answer says of its weights and of its request."""
    return {"weights": _weights(answer), "echo": answer.echo}


def _weights(answer: Completion | Scores) -> list[Any] | None:
    return None if answer.origin is None else answer.origin.encode()


def _origin(weights: object) -> Origin:
    """Reads `_weights`. Raises `ServerFailure` for anything else."""
    try:
        return Origin.decode(weights)
    except ValueError as error:
        raise ServerFailure(f"the response is malformed: {error}") from error


def _provenance(header: dict[str, Any]) -> tuple[Origin, bytes]:
    """Reads `_provenance_header`. Raises `ServerFailure` if anything is missing."""
    origin, echo = _origin(header.get("weights")), header.get("echo")
    if type(echo) is not bytes or len(echo) != REQUEST_ID_BYTES:
        raise ServerFailure("the response is malformed: it does not say which request it answers")
    return origin, echo


def _fields(packed: bytes, what: str) -> dict[Any, Any]:
    fields = unpacked(packed, what, CodecError, max_array_len=MOST_STOP_TOKENS, max_map_len=64, max_ext_len=0)
    if not isinstance(fields, dict):
        raise ValueError(f"{what} is a msgpack {type(fields).__name__}, a map is expected")
    return fields


def encode_completion(completion: Completion) -> bytes:
    """Returns the body of a response.

    Raises `ValueError` for a completion without the echo of its request, or without a log-probability for each token.
    """
    if completion.echo is None:
        raise ValueError("a completion has no echo; expected that of its request")
    if len(completion.log_probabilities) != len(completion.token_ids):
        raise ValueError(
            f"{len(completion.token_ids)} tokens with {len(completion.log_probabilities)} log-probabilities; expected one each"
        )
    tokens, cached = len(completion.token_ids), completion.cached_tokens
    described: bytes = msgpack.packb([completion.finish_reason, _weights(completion)])
    cached = _UNKNOWN if cached is None else max(0, cached)
    parts: list[bytes | memoryview] = [
        _RESPONSE.pack(_RESPONSE_MAGIC, tokens, cached, len(described), completion.echo),
        completion.token_ids.astype(_INT32, copy=False).tobytes(),
        completion.log_probabilities.astype(_FLOAT32, copy=False).tobytes(),
        described,
    ]
    arrays: dict[str, Any] = {}
    if completion.routed_experts is not None:
        arrays["routed_experts"] = completion.routed_experts
    if (alternatives := completion.alternatives) is not None:
        arrays["alternative_ids"] = alternatives.token_ids_TK
        arrays["alternative_log_probabilities"] = alternatives.log_probabilities_TK
    if arrays:
        parts += [bytes(-len(described) % _ALIGNMENT), *map(as_bytes_view, pack_arrays({}, arrays))]
    return b"".join(parts)


def decode_completion(body: bytes | memoryview) -> Completion:
    """Reads a response; its arrays are views of `body`. Raises `ServerFailure` for anything malformed."""
    size = len(body)
    if size < _RESPONSE.size or body[: len(_RESPONSE_MAGIC)] != _RESPONSE_MAGIC:
        raise ServerFailure(
            "the response is malformed: it is no completion; does the server run another version of Counterpoint?"
        )
    _, tokens, cached, length, echo = _RESPONSE.unpack_from(body)
    scores_at = _RESPONSE.size + tokens * _INT32.itemsize
    described_at = _RESPONSE.size + tokens * _TOKEN_BYTES
    end = described_at + length
    if end > size:
        raise ServerFailure(f"the response is malformed: it claims {tokens} tokens and has {size} bytes")
    if length > MAX_DESCRIPTION_BYTES:
        raise ServerFailure(
            f"the response is malformed: its description has {length} bytes; at most {MAX_DESCRIPTION_BYTES} are read"
        )
    finish_reason, origin = _described(bytes(body[described_at:end]))
    experts = alternatives = None
    if end < size:
        experts, alternatives = _further_arrays(body[end + -length % _ALIGNMENT :])
    return Completion(
        np.frombuffer(body, _INT32, tokens, _RESPONSE.size),
        np.frombuffer(body, _FLOAT32, tokens, scores_at),
        finish_reason,
        experts,
        None if cached == _UNKNOWN else cached,
        origin,
        echo,
        alternatives,
    )


@lru_cache(maxsize=64)
def _described(packed: bytes) -> tuple[str, Origin]:
    """Reads finish reason and weights: all answers between two loads that end alike say the same. Raises `ServerFailure`."""
    try:
        found = unpacked(
            packed, "the description of the response", CodecError, max_array_len=8, max_map_len=0, max_ext_len=0
        )
    except CodecError as error:
        raise ServerFailure(f"the response is malformed: {error}") from error
    if type(found) is not list or len(found) != 2 or type(found[0]) is not str:
        raise ServerFailure("the response is malformed: its description is not [finish reason, weights]")
    return found[0], _origin(found[1])


def _further_arrays(frame: bytes | memoryview) -> tuple[RoutingArray | None, Alternatives | None]:
    """Reads routing and alternatives, as views of `frame`. Raises `ServerFailure`."""
    try:
        _, arrays = unpack_arrays(frame)
    except CodecError as error:
        raise ServerFailure(f"the response is malformed: {error}") from error
    experts = arrays.get("routed_experts")
    if experts is not None and experts.dtype not in (np.uint8, np.uint16):
        raise ServerFailure(
            f"the response is malformed: routed_experts is {experts.dtype}, uint8 or uint16 is expected"
        )
    if "alternative_ids" not in arrays:
        return experts, None
    ids_TK, values_TK = arrays["alternative_ids"], arrays.get("alternative_log_probabilities")
    if values_TK is None or ids_TK.dtype != np.int32 or values_TK.dtype != np.float32 or ids_TK.ndim != 2:
        raise ServerFailure("the response is malformed: its alternatives are not rows of int32 and float32")
    return experts, Alternatives(ids_TK, values_TK)
