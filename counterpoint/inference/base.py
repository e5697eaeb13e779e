"""The vocabulary of inference: requests, answers, weight updates and errors.

`wire` encodes these for our own route, `openai_client` for a stock server; the orchestrator uses `pool`. This file opens no
socket, and nothing in this package outside `plugin/` imports torch or vllm.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgpack
import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ConfigDict, Field

from counterpoint.environments.sampling import AlternativeCount, JsonSchema, Sampling
from counterpoint.inference.loads import Origin
from counterpoint.inference.model_facts import UNBOUNDED, AnswerBounds
from counterpoint.transport.records import (
    LOG_PROBABILITY_ROUNDING,
    Alternatives,
    Float32Array,
    Int32Array,
    RoutingArray,
)

Float64Array = npt.NDArray[np.float64]

_INT32 = np.dtype("<i4")

_FEW = 64
"""Values of which a pass by Python takes less time than numpy's call."""

REQUEST_ID_BYTES = 16
"""The bytes of the random id of a request, and of what an answer repeats of it."""

MAX_PROBE_BYTES = 1 << 20
"""A probe has a few tokens and three digests; a larger `probe.json` is refused."""

MOST_STOP_TOKENS = 256
"""Tokens that may end one completion."""

TOLERATED_SHARE = 0.1
"""The largest difference (root mean square) between log-probabilities of right kernels, as a share of the spread of the probe's
log-probabilities, beside what rounding does to them. `docs/inference.md` has figures of right and wrong kernels."""

LEAST_TOLERANCE = 0.01
"""The least tolerance, in nats, which applies if all tokens are equally likely."""

DEVIATIONS_TO_REFUSE = 12.0
"""Standard deviations by which an answer must be nearer to the previous version's than to this one's to be refused. With ten
degrees of freedom, chance exceeds 6 once in 15,000 times, and 12 once in 7 million."""


class InferenceError(Exception):
    """A request without an answer, or a weight update that no server took. The message is for a person."""


class RequestRefused(InferenceError, ValueError):
    """The server will never serve this request; asking again, or another server, is pointless."""


class WeightsNotSeen(RequestRefused):
    """A server does not see the published weights that it is to load, or may not read them."""


class ModelNotServed(InferenceError):
    """A server does not have the model that is asked of it."""


class ServerFailure(InferenceError):
    """One server failed one request; another attempt, or another server, may succeed."""


class WrongAnswer(ServerFailure):
    """An answer that the model cannot give, whatever its weights: the server is out of order, or serves something else."""


class WrongWeights(ServerFailure):
    """An answer was computed with other weights than those that were loaded for the run."""


class AnswerToAnother(ServerFailure):
    """An answer belongs to another request, or to another prompt, as something in between may deliver it."""


class ServerUnreachable(ServerFailure):
    """Nothing listens at the address any more: the connection was refused, reset or cut."""


OPTIONAL_PARAMETERS = ("json_schema", "alternatives", "seed")
"""Sampling parameters that are sent where they ask for something."""


class SamplingParameters(Sampling):
    """How one completion is sampled. Raises `ValueError` for what vLLM would refuse."""

    model_config = ConfigDict(frozen=True)

    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_STOP_TOKENS)] = []
    """Tokens that end a completion."""
    ignore_eos: bool = False
    """Whether the model's own end of a text does not end a completion."""
    json_schema: JsonSchema = ""
    """A JSON schema, as text, that the completion fits; its log-probabilities are those after the constraint. Empty: any text."""
    alternatives: AlternativeCount = 0
    """The most probable tokens to return at each place. It has no effect on what is sampled."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """By which the same prompt has the same completion, as far as other requests beside it change no rounding; 0: none."""

    def replaced(self, **values: Any) -> SamplingParameters:
        """Returns it with other values, which are checked."""
        return SamplingParameters.model_validate(self.model_dump() | values)

    @cached_property
    def dumped(self) -> Mapping[str, Any]:
        """All of them by their names, for records. Every rollout asks for it."""
        return self.model_dump()

    @cached_property
    def named(self) -> Mapping[str, Any]:
        """All but the optional ones, by their names in vLLM's `SamplingParams` and OpenAI API. Every turn asks for it."""
        return self.model_dump(exclude=set(OPTIONAL_PARAMETERS))

    @cached_property
    def packed(self) -> bytes:
        """All of them as `wire` sends them: those of `named`, the others where they ask for something. Every turn asks for it."""
        asked = {name: value for name in OPTIONAL_PARAMETERS if (value := getattr(self, name))}
        packed: bytes = msgpack.packb({**self.named, **asked})
        return packed


def echo_of(token_ids: Int32Array, request_id: bytes) -> bytes:
    """Returns what an answer repeats of its request: 16 bytes that no other request, and no other tokens, give (BLAKE2b)."""
    data = token_ids.astype(_INT32, copy=False).tobytes()
    return blake2b(data, key=request_id, digest_size=REQUEST_ID_BYTES).digest()


_new_request_id = partial(os.urandom, REQUEST_ID_BYTES)


@dataclass(slots=True)
class GenerateRequest:
    """One model call. `model` names the base model or an adapter.

    Nobody changes it, nor a `Completion`. They are not frozen because that takes five times as long to make, for every turn.
    """

    model: str
    prompt_ids: Int32Array
    sampling: SamplingParameters
    routed_experts_start: int = 0
    """The first token whose routed experts the caller lacks; at most the length of the prompt."""
    request_id: bytes = field(default_factory=_new_request_id)
    on_cut: Callable[[int], None] | None = None
    """Called with the number of tokens that were sampled when the call is cancelled, as far as the server says it."""

    @property
    def echo(self) -> bytes:
        """What the answer repeats of it."""
        return echo_of(self.prompt_ids, self.request_id)

    def check(self, bounds: AnswerBounds) -> None:
        """Raises `RequestRefused` if the model has not all ids of the prompt: some servers would end at them."""
        if (outside := _outside(self.prompt_ids, bounds.vocabulary)) is not None:
            raise RequestRefused(f"prompt_ids: {_in_vocabulary(self.prompt_ids[outside], bounds)}")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Asks for the log-probabilities of given tokens under `model`, as `GenerateRequest` names it."""

    model: str
    token_ids: Int32Array
    start: int
    """The first token whose log-probability is returned; at least 1, since something must come before it."""
    request_id: bytes = field(default_factory=_new_request_id)

    @property
    def echo(self) -> bytes:
        """What the answer repeats of it."""
        return echo_of(self.token_ids, self.request_id)

    def check(self, answer: Scores) -> None:
        """Raises `AnswerToAnother`, or `WrongAnswer` if `answer` cannot be the answer."""
        _check_echo(answer.echo, self)
        scores = answer.log_probabilities
        if len(scores) != len(self.token_ids) - self.start:
            raise WrongAnswer(
                f"{len(scores)} log-probabilities came back where {len(self.token_ids) - self.start} were due"
            )
        if (at := _no_log_probability(scores)) is not None:
            raise WrongAnswer(
                f"the log-probability of token {self.start + at} is {scores[at]}; expected a finite number, 0 or less"
            )


@dataclass(frozen=True, slots=True)
class Scores:
    """A server's answer to a `ScoreRequest`, or to a probe."""

    log_probabilities: Float32Array
    origin: Origin | None = None
    """The weights that computed it; None if the server reports none."""
    echo: bytes | None = None
    """What it repeats of its request; None if the server repeats nothing."""


def _check_echo(echo: bytes | None, request: GenerateRequest | ScoreRequest) -> None:
    """Raises `AnswerToAnother` if an answer that repeats something of its request repeats it of another one."""
    if echo is not None and echo != request.echo:
        raise AnswerToAnother(
            "the answer is one to another request, or to another prompt: something between here and the server mixes answers"
        )


@dataclass(slots=True)
class Completion:
    """A server's answer to a `GenerateRequest`. Arrays may be views of the bytes received."""

    token_ids: Int32Array
    log_probabilities: Float32Array
    """The natural logarithm of each token's probability in the distribution sampled from (temperature, top-p, top-k, min-p)."""
    finish_reason: str
    routed_experts: RoutingArray | None
    """Rows `routed_experts_start ... prompt + completion - 2`, `[rows, layers, top_k]`, or None where the model has no
    experts."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were not prefilled, since the prefix cache had them; None if the server does not say."""
    origin: Origin | None = None
    """The weights that computed it; None if the server reports none."""
    echo: bytes | None = None
    """What it repeats of its request; None if the server repeats nothing."""
    alternatives: Alternatives | None = None
    """None unless the request asked for them."""

    def check(self, request: GenerateRequest, bounds: AnswerBounds = UNBOUNDED) -> None:
        """Raises `ServerFailure` if the server gave up, and `WrongAnswer` if this cannot be an answer to `request`.

        `AnswerToAnother` if it is one to another. The message names field and value.
        """
        _check_echo(self.echo, request)
        tokens = len(self.token_ids)
        if self.finish_reason not in ("stop", "length") or not tokens:
            raise ServerFailure(
                f"the server gave up on the request: finish reason {self.finish_reason!r}, {tokens} tokens"
            )
        if tokens > request.sampling.max_tokens:
            raise WrongAnswer(f"{tokens} tokens came back where at most {request.sampling.max_tokens} were asked for")
        if len(self.log_probabilities) != tokens:
            raise WrongAnswer(f"{tokens} tokens came back with {len(self.log_probabilities)} log-probabilities")
        if (at := _no_log_probability(self.log_probabilities)) is not None:
            value = self.log_probabilities[at]
            raise WrongAnswer(
                f"the log-probability of completion token {at} is {value}; expected a finite number, 0 or less"
            )
        if (outside := _outside(self.token_ids, bounds.vocabulary)) is not None:
            raise WrongAnswer(f"completion token {outside}: {_in_vocabulary(self.token_ids[outside], bounds)}")
        if request.sampling.alternatives:
            self._check_alternatives(request.sampling.alternatives, bounds)
        elif self.alternatives is not None:
            raise WrongAnswer("the most probable tokens at each place came back, and nobody asked for them")
        if self.routed_experts is not None:
            self._check_routing(self.routed_experts, request, bounds)

    def _check_alternatives(self, asked: int, bounds: AnswerBounds) -> None:
        if (found := self.alternatives) is None:
            raise WrongAnswer(f"the {asked} most probable tokens at each place were asked for, and none came back")
        ids_TK, values_TK = found.token_ids_TK, found.log_probabilities_TK
        least = asked if bounds.vocabulary is None else min(asked, bounds.vocabulary)
        if ids_TK.shape != values_TK.shape or ids_TK.shape != (len(self.token_ids), least):
            raise WrongAnswer(
                f"alternatives of shape {ids_TK.shape}; expected {least} for each of {len(self.token_ids)} tokens"
            )
        if (outside := _outside(ids_TK.ravel(), bounds.vocabulary)) is not None:
            raise WrongAnswer(f"an alternative: {_in_vocabulary(ids_TK.ravel()[outside], bounds)}")
        if not (values_TK <= LOG_PROBABILITY_ROUNDING).all():
            raise WrongAnswer("the log-probability of an alternative is no number of 0 or less")

    def _check_routing(self, experts: RoutingArray, request: GenerateRequest, bounds: AnswerBounds) -> None:
        rows = len(request.prompt_ids) + len(self.token_ids) - 1 - request.routed_experts_start
        if experts.ndim != 3 or len(experts) != rows:
            raise WrongAnswer(f"routed experts have the shape {experts.shape}; {rows} rows of [layers, top_k] were due")
        if bounds.routing is not None and experts.shape[1:] != bounds.routing:
            raise WrongAnswer(
                f"routed experts have [layers, top_k] {list(experts.shape[1:])}; the model has {list(bounds.routing)}"
            )
        if bounds.experts is not None and int(experts.max(initial=0)) >= bounds.experts:
            raise WrongAnswer(f"routed to expert {int(experts.max())} of a model with {bounds.experts} experts")


def _outside(token_ids_T: Int32Array, vocabulary: int | None) -> int | None:
    """Returns the place of the first id that is no token; None if all are tokens."""
    bound = 2**31 if vocabulary is None else vocabulary
    if token_ids_T.size > _FEW:  # As unsigned numbers, negative ids are above all others: one pass finds both.
        is_right = np.maximum.reduce(token_ids_T.view(np.uint32)) < bound
    else:
        values = token_ids_T.tolist()
        is_right = not values or (min(values) >= 0 and max(values) < bound)
    return None if is_right else int(((token_ids_T < 0) | (token_ids_T >= bound)).argmax())


def _in_vocabulary(token_id: np.int32, bounds: AnswerBounds) -> str:
    most = "" if bounds.vocabulary is None else f" to {bounds.vocabulary - 1}"
    return f"the id {token_id} is no token of the model, whose ids go from 0{most or ' on'}"


def _no_log_probability(values_T: Float32Array) -> int | None:
    """Returns the place of the first value that is no log-probability; None if all are."""
    if values_T.size > _FEW:  # The least of values with a NaN is NaN, which is not above minus infinity, either.
        least, most = np.minimum.reduce(values_T), np.maximum.reduce(values_T)
    else:  # So is their sum.
        values = values_T.tolist()
        least, most = sum(values), max(values, default=0.0)
    if least > -math.inf and most <= LOG_PROBABILITY_ROUNDING:
        return None
    return int(((values_T > -np.inf) & (values_T <= LOG_PROBABILITY_ROUNDING)).argmin())


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What a completion says, as a server's parsers read it."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """The name and the arguments, as JSON, of each call of a tool. Nothing of it is checked."""
    malformed: str = ""
    """Why calls could not be read; empty if there is nothing amiss."""

    @classmethod
    def from_answer(cls, answer: dict[str, Any], url: str) -> ParsedText:
        """Reads the answer of `plugin.routes.parse`. Raises `ServerFailure` for anything else."""
        try:
            calls = tuple((str(call["name"]), str(call["arguments"])) for call in answer["calls"])
            return cls(str(answer["content"]), str(answer["reasoning"]), calls, str(answer["malformed"]))
        except (KeyError, TypeError) as error:
            raise ServerFailure(f"{url} answered a parse without its fields: {error!r}") from error


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights that a server computes with, as read back from its memory."""

    dtype: str
    """The server's precision, to which the trainer's numbers are rounded before they are hashed."""
    layers: dict[str, str]
    """A digest (`counterpoint/inference/digest.py`) for each layer number; only layers that can be compared."""
    load: int = 0
    """The number of the load that brought them (`loads`)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The digest and log-probabilities that a server must reproduce to prove that it computes with the published weights."""

    version: int
    token_ids: list[int]
    log_probabilities: list[float]
    """The log-probability of each token after the first, given those before it, at temperature 1."""
    previous: list[float] | None = None
    """The previous version's log-probabilities, if the trainer has them and computes precisely enough to tell the two apart."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """The expected `HeldWeights.layers` for each precision of a server."""
    rounding: list[float] | None = None
    """Nats by which rounding to bfloat16 may move each of `log_probabilities`, measured with these weights; None if unknown."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.log_probabilities) != len(self.token_ids) - 1:
            raise ValueError(
                f"a probe of {len(self.token_ids)} tokens needs one log-probability for each token after the first, "
                f"and has {len(self.log_probabilities)}"
            )
        if self.previous is not None and len(self.previous) != len(self.log_probabilities):
            raise ValueError(
                f"a probe has {len(self.previous)} log-probabilities of the previous version; expected "
                f"{len(self.log_probabilities)}, as of this version"
            )
        if self.rounding is not None and len(self.rounding) != len(self.log_probabilities):
            raise ValueError(
                f"a probe has the rounding of {len(self.rounding)} log-probabilities; expected {len(self.log_probabilities)}"
            )
        if not np.isfinite([*self.log_probabilities, *(self.previous or ()), *(self.rounding or ())]).all():
            raise ValueError("a probe's log-probabilities, and their rounding, must be finite")

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Reads `probe.json`.

        Raises `ValueError`, naming the file, for anything that is not a probe; `OSError` if it cannot be read.
        """
        if (size := path.stat().st_size) > MAX_PROBE_BYTES:
            raise ValueError(f"{path}: {size} bytes; a probe has at most {MAX_PROBE_BYTES}")
        return cls.parse(path.read_bytes(), path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Probe:
        """Returns the probe in `data`, the content of the file at `path`. Raises `ValueError`, naming that, if it is none."""
        try:
            content = orjson.loads(data)
            return cls(
                version=int(content["version"]),
                token_ids=[int(token) for token in content["token_ids"]],
                log_probabilities=[float(value) for value in content["log_probabilities"]],
                rounding=None if content.get("rounding") is None else [float(value) for value in content["rounding"]],
                previous=None if content.get("previous") is None else [float(value) for value in content["previous"]],
                digests={
                    str(dtype): {str(layer): str(value) for layer, value in layers.items()}
                    for dtype, layers in content.get("digests", {}).items()
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a probe: {error!r}") from error

    def compares(self, held: HeldWeights) -> bool:
        """Whether there is a layer for which both ends have a digest."""
        return bool(self.digests.get(held.dtype, {}).keys() & held.layers.keys())

    def mismatched_layers(self, held: HeldWeights) -> str | None:
        """Returns a message that names the layers whose digests differ from the published ones; None if none does.

        Only layers for which both ends have a digest are compared.
        """
        published = self.digests.get(held.dtype, {})
        others = sorted(
            layer for layer in published.keys() & held.layers.keys() if published[layer] != held.layers[layer]
        )
        if not others:
            return None
        named = ", ".join(f"layer {layer}" if layer else "weights outside the layers" for layer in others[:5])
        return f"{len(others)} of {len(held.layers)} digests differ from those that the trainer published: {named}" + (
            f" and {len(others) - 5} more" if len(others) > 5 else ""
        )

    def mismatch(
        self, log_probabilities: Float32Array, tolerance: float | None, dtype: str | None = None
    ) -> str | None:
        """Returns a message that says how `log_probabilities` differ from those of this version; None if they match.

        They may differ by `tolerance` (root mean square). None allows for each `TOLERATED_SHARE` of the spread of the expected
        ones and what rounding does to it. They must not be the previous version's. `dtype` is the server's precision, where it is
        known: in float32 rounding moves nothing that counts.
        """
        if len(log_probabilities) != len(self.log_probabilities):
            return f"{len(log_probabilities)} log-probabilities came back where {len(self.log_probabilities)} were due"
        expected = np.asarray(self.log_probabilities, dtype=np.float64)
        share = max(TOLERATED_SHARE * float(expected.std()), LEAST_TOLERANCE)
        rounding = np.zeros(len(expected))
        if self.rounding is not None and dtype != "float32":
            rounding = np.asarray(self.rounding, dtype=np.float64)
        uncertain = np.hypot(share, rounding)
        allowed = uncertain if tolerance is None else np.full_like(uncertain, tolerance)
        difference = np.abs(expected - log_probabilities)
        difference[~np.isfinite(log_probabilities)] = np.inf
        found = float(np.sqrt(np.square(difference / allowed).mean()))
        if not found <= 1.0:
            worst, apart = int((difference / allowed).argmax()), float(np.sqrt(np.square(difference).mean()))
            return (
                f"its log-probabilities differ from the trainer's by {apart:.4f} nats (root mean square), {found:.3g} times what "
                f"is allowed: that of probe token {worst + 1} is {log_probabilities[worst]:.4f} at the server and "
                f"{expected[worst]:.4f} at the trainer, and may differ by {allowed[worst]:.4f} nats. Its kernels compute another "
                "function of these weights. If the server's precision explains it (quantization), set probe_tolerance in "
                "[orchestrator.inference] to the nats that are to be allowed"
            )
        if self.previous is not None and _is_previous_version(
            np.asarray(self.previous) / uncertain,
            expected / uncertain,
            log_probabilities / uncertain,
        ):
            return (
                f"its log-probabilities are those of version {self.version - 1}: its kernels compute with older weights"
            )
        return None


def _is_previous_version(former: Float64Array, current: Float64Array, answer: Float64Array) -> bool:
    """Whether `answer` is nearer to `former` than to `current`, by more than its rounding explains.

    `share` is the position of the answer on the line from `former` (0) to `current` (1). Its distance from that line is
    rounding, and gives the standard deviation of `share`. Where that is as large as the step itself, as with a small step in
    bfloat16, the result is False.
    """
    way = current - former
    length = float(way @ way)
    if not length or len(way) < 2:
        return False
    come = answer - former
    share = float(come @ way) / length
    off = come - share * way
    deviation = float(np.sqrt(off @ off / (len(way) - 1) / length))
    return share + DEVIATIONS_TO_REFUSE * deviation < 0.5


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights to serve."""

    version: int
    directory: Path
    """A published directory: `STABLE` and either `*.safetensors` of the whole model or a PEFT adapter."""
    probe: Probe
    adapter: str | None
    """Name of the LoRA adapter; None for full weights."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server's state in the pool."""

    url: str
    state: str
    """`unknown` (never reached), `loading` (weights or their proof under way), `serving`, `draining` (finishes what it has),
    `out`."""
    reason: str
    """Why it does not serve, or gets no new requests; empty while it serves."""
    version: int | None
    """The policy version that it has proven to hold."""
    in_flight: int
    """This run's requests at the server now."""
    cap: int
    """The most requests of this run in flight there."""
