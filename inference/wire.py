"""The binary encoding of a model call, shared by the client and the plugin.

A request is msgpack with the prompt as raw little-endian int32 bytes; a response is one frame of `transport.arrays`, whose
arrays the client reads as views. Both ends validate what they receive before they use it.
"""

from __future__ import annotations

import reprlib
from typing import Any

import msgpack
import numpy as np
from pydantic import ValidationError

from inference.base import (
    MOST_STOP_TOKENS,
    REQUEST_ID_BYTES,
    Completion,
    GenerateRequest,
    SamplingParameters,
    ScoreRequest,
    Scores,
    ServerFailure,
)
from inference.loads import Origin
from transport.arrays import CodecError, pack_arrays, unpack_arrays
from transport.files.atomic import as_bytes_view
from transport.records import Alternatives, Int32Array
from transport.unpacked import unpacked

GENERATE_PATH = "/counterpoint/v1/generate"
SCORE_PATH = "/counterpoint/v1/score"
PROBE_PATH = "/counterpoint/v1/probe"
UPDATE_PATH = "/counterpoint/v1/update"
PARSE_PATH = "/counterpoint/v1/parse"
UNLOAD_PATH = "/counterpoint/v1/unload"
DRAIN_PATH = "/counterpoint/v1/drain"
STATUS_PATH = "/counterpoint/v1/status"

NONCE_HEADER = "X-Counterpoint-Nonce"
"""What a server is to prove its identity by, in its status."""

INSTANCE_VARIABLE = "COUNTERPOINT_INSTANCE"
"""The variable by which a server gets the id of its process from the one that starts it."""

REQUEST_OVERHEAD_BYTES = 1 << 16
"""Most bytes of a request besides its prompt."""

MAX_RESPONSE_BYTES = 1 << 30
"""A longer response is refused before it is read: 2**30 bytes is the routing of two million tokens of 48 layers, top-8, in
uint8."""

MAX_MODEL_NAME = 4096
_CALL = ("model", "prompt_ids", "routed_experts_start", "request_id")
"""The fields of a model call besides its sampling parameters."""
_OPTIONAL = ("json_schema", "alternatives")
"""Sampling parameters that are sent where they ask for something."""
_INT32 = np.dtype("<i4")


def max_request_bytes(max_model_len: int) -> int:
    """Returns the longest request body that a server with a context of `max_model_len` tokens accepts."""
    return _INT32.itemsize * max_model_len + REQUEST_OVERHEAD_BYTES


def encode_request(request: GenerateRequest) -> bytes:
    """Returns the body of a request."""
    body: bytes = msgpack.packb(
        {
            "model": request.model,
            "prompt_ids": request.prompt_ids.astype(_INT32, copy=False).tobytes(),
            **request.sampling.named,
            "routed_experts_start": request.routed_experts_start,
            "request_id": request.request_id,
            **({"json_schema": request.sampling.json_schema} if request.sampling.json_schema else {}),
            **({"alternatives": request.sampling.alternatives} if request.sampling.alternatives else {}),
        }
    )
    return body


def decode_request(body: bytes) -> GenerateRequest:
    """Reads a request, whose size the caller has bounded.

    Raises `ValueError`, naming the field, for anything malformed.
    """
    fields = _fields(body)
    prompt_ids = _tokens(fields, "prompt_ids")
    start = _field(fields, "routed_experts_start", int)
    if not 0 <= start <= len(prompt_ids):
        raise ValueError(f"routed_experts_start = {start}: it must be from 0 to the prompt's {len(prompt_ids)} tokens")
    model = _model(fields)
    return GenerateRequest(model, prompt_ids, _sampling(fields), start, _request_id(fields))


def _sampling(fields: dict[Any, Any]) -> SamplingParameters:
    """Reads the sampling parameters: those and no others, so that one which a client of another version has is not ignored."""
    given = {name: value for name, value in fields.items() if name not in _CALL}
    for name in SamplingParameters.model_fields:
        if name not in given and name not in _OPTIONAL:
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
    fields = _fields(body)
    token_ids, start = _tokens(fields, "token_ids"), _field(fields, "start", int)
    if not 1 <= start < len(token_ids):
        raise ValueError(f"start = {start}: it must be from 1 to the last of the {len(token_ids)} tokens")
    return ScoreRequest(_model(fields), token_ids, start, _request_id(fields))


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
    return {"weights": None if answer.origin is None else answer.origin.encode(), "echo": answer.echo}


def _provenance(header: dict[str, Any]) -> tuple[Origin, bytes]:
    """Reads `_provenance_header`. Raises `ServerFailure` if anything is missing."""
    try:
        origin = Origin.decode(header.get("weights"))
    except ValueError as error:
        raise ServerFailure(f"the response is malformed: {error}") from error
    echo = header.get("echo")
    if type(echo) is not bytes or len(echo) != REQUEST_ID_BYTES:
        raise ServerFailure("the response is malformed: it does not say which request it answers")
    return origin, echo


def _fields(body: bytes) -> dict[Any, Any]:
    fields = unpacked(body, "the body", CodecError, max_array_len=MOST_STOP_TOKENS, max_map_len=64, max_ext_len=0)
    if not isinstance(fields, dict):
        raise ValueError(f"the body is a msgpack {type(fields).__name__}, a map is expected")
    return fields


def _tokens(fields: dict[Any, Any], name: str) -> Int32Array:
    data = _field(fields, name, bytes)
    if not data or len(data) % _INT32.itemsize:
        raise ValueError(f"{name}: {len(data)} bytes are not one or more int32")
    return np.frombuffer(data, dtype=_INT32)


def _request_id(fields: dict[Any, Any]) -> bytes:
    request_id: bytes = _field(fields, "request_id", bytes)
    if len(request_id) != REQUEST_ID_BYTES:
        raise ValueError(f"request_id: {len(request_id)} bytes; expected {REQUEST_ID_BYTES}")
    return request_id


def _model(fields: dict[Any, Any]) -> str:
    model: str = _field(fields, "model", str)
    if not 0 < len(model) <= MAX_MODEL_NAME:
        raise ValueError(f"model: a name of {len(model)} characters; 1 to {MAX_MODEL_NAME} are allowed")
    return model


def _field(fields: dict[Any, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(
            f"{name}: {kind.__name__} is expected, got {'nothing' if value is None else type(value).__name__}"
        )
    return value


def encode_completion(completion: Completion) -> bytes:
    """Returns the body of a response."""
    arrays: dict[str, Any] = {
        "token_ids": completion.token_ids,
        "log_probabilities": completion.log_probabilities,
    }
    if completion.routed_experts is not None:
        arrays["routed_experts"] = completion.routed_experts
    if (alternatives := completion.alternatives) is not None:
        arrays["alternative_ids"] = alternatives.token_ids_TK
        arrays["alternative_log_probabilities"] = alternatives.log_probabilities_TK
    header: dict[str, Any] = {"finish_reason": completion.finish_reason, **_provenance_header(completion)}
    if completion.cached_tokens is not None:
        header["cached_tokens"] = completion.cached_tokens
    return b"".join(as_bytes_view(buffer) for buffer in pack_arrays(header, arrays))


def decode_completion(body: bytes | memoryview) -> Completion:
    """Reads a response; its arrays are views of `body`. Raises `ServerFailure` for anything malformed."""
    try:
        header, arrays = unpack_arrays(body)
    except CodecError as error:
        raise ServerFailure(f"the response is malformed: {error}") from error
    token_ids, log_probabilities = arrays.get("token_ids"), arrays.get("log_probabilities")
    if token_ids is None or token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise ServerFailure("the response is malformed: token_ids is not a row of int32")
    if log_probabilities is None or log_probabilities.dtype != np.float32 or log_probabilities.ndim != 1:
        raise ServerFailure("the response is malformed: log_probabilities is not a row of float32")
    experts = arrays.get("routed_experts")
    if experts is not None and experts.dtype not in (np.uint8, np.uint16):
        raise ServerFailure(
            f"the response is malformed: routed_experts is {experts.dtype}, uint8 or uint16 is expected"
        )
    alternatives = None
    if "alternative_ids" in arrays:
        ids_TK, values_TK = arrays["alternative_ids"], arrays.get("alternative_log_probabilities")
        if values_TK is None or ids_TK.dtype != np.int32 or values_TK.dtype != np.float32 or ids_TK.ndim != 2:
            raise ServerFailure("the response is malformed: its alternatives are not rows of int32 and float32")
        alternatives = Alternatives(ids_TK, values_TK)
    cached = header.get("cached_tokens")
    if cached is not None and type(cached) is not int:
        raise ServerFailure("the response is malformed: cached_tokens is not an integer")
    return Completion(
        token_ids,
        log_probabilities,
        str(header.get("finish_reason")),
        experts,
        cached,
        *_provenance(header),
        alternatives,
    )
