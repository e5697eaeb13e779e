"""The vocabulary of inference: what is asked of a server, what comes back, and what can go wrong.

`wire` encodes these for our own route, `openai_client` for a stock server; `pool` is what the orchestrator talks to. Nothing here
knows a socket, and nothing in this package outside `plugin/` imports torch or vllm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from transport.records import Float32Array, Int32Array, RoutingArray

MAX_PROBE_BYTES = 1 << 20
"""A probe is a few tokens; a larger `probe.json` is not one."""


class InferenceError(Exception):
    """A request that got no answer, or a weight update that no server took. The message is for a person."""


class RequestRefused(InferenceError):
    """The server understood the request and will never serve it; asking again, or elsewhere, is pointless."""


class ServerFailure(InferenceError):
    """One server failed one request; another attempt, or another server, may succeed."""


class ServerUnreachable(ServerFailure):
    """Nothing listens there any more: the connection was refused, reset or cut."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How a completion is sampled, without a seed of its own: at `temperature`, from the whole distribution unless it is cut."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens that complete one are its last."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: it must be positive and finite")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens = {self.max_tokens}: at least one token must be asked for")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(
                f"top_p = {self.top_p}, min_p = {self.min_p}: they are probabilities, and top_p is above 0"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: 0 (all tokens) or more is expected")
        if "" in self.stop:
            raise ValueError("stop: an empty string would end every completion")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One model call. `model` names the base model or an adapter."""

    model: str
    prompt_ids: Int32Array
    sampling: SamplingParameters
    routed_experts_start: int = 0
    """The first token whose routing the caller lacks; at most the length of the prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server answered. Arrays may be views of the bytes received."""

    token_ids: Int32Array
    log_probabilities: Float32Array
    """Of the distribution that was sampled from (temperature, top-p, top-k, min-p), natural logarithm, one a token."""
    finish_reason: str
    routed_experts: RoutingArray | None
    """Rows `routed_experts_start ... prompt + completion - 2`, `[rows, layers, top_k]`, or None where the model has no
    experts."""

    def check(self, request: GenerateRequest) -> None:
        """Raises `ServerFailure`, naming the field, if this cannot be an answer to `request`."""
        tokens = len(self.token_ids)
        if self.finish_reason not in ("stop", "length") or not tokens:
            raise ServerFailure(
                f"the server gave up on the request: finish reason {self.finish_reason!r}, {tokens} tokens"
            )
        if tokens > request.sampling.max_tokens:
            raise ServerFailure(f"{tokens} tokens came back where at most {request.sampling.max_tokens} were asked for")
        if len(self.log_probabilities) != tokens:
            raise ServerFailure(f"{tokens} tokens came back with {len(self.log_probabilities)} log-probabilities")
        if not np.isfinite(self.log_probabilities).all():
            at = int(np.flatnonzero(~np.isfinite(self.log_probabilities))[0])
            raise ServerFailure(f"the log-probability of completion token {at} is {self.log_probabilities[at]}")
        if int(self.token_ids.min()) < 0:
            raise ServerFailure(f"token id {int(self.token_ids.min())} came back: ids are not negative")
        if self.routed_experts is not None:
            rows = len(request.prompt_ids) + tokens - 1 - request.routed_experts_start
            if self.routed_experts.ndim != 3 or len(self.routed_experts) != rows:
                shape = self.routed_experts.shape
                raise ServerFailure(f"routed experts have the shape {shape}; {rows} rows of [layers, top_k] were due")


@dataclass(frozen=True, slots=True)
class Probe:
    """What a policy must answer: proof that a server holds the weights it says it holds."""

    version: int
    token_ids: list[int]
    log_probabilities: list[float]
    """Of each token after the first, given those before it, at temperature 1."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.log_probabilities) != len(self.token_ids) - 1:
            raise ValueError(
                f"a probe of {len(self.token_ids)} tokens needs one log-probability for each token after the first, "
                f"and has {len(self.log_probabilities)}"
            )
        if not np.isfinite(self.log_probabilities).all():
            raise ValueError("a probe's log-probabilities must be finite")

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Reads `probe.json`. Raises `ValueError`, naming the file, for anything that is not a probe; `OSError` if unreadable."""
        if (size := path.stat().st_size) > MAX_PROBE_BYTES:
            raise ValueError(f"{path}: {size} bytes; a probe has at most {MAX_PROBE_BYTES}")
        try:
            content = orjson.loads(path.read_bytes())
            return cls(
                version=int(content["version"]),
                token_ids=[int(token) for token in content["token_ids"]],
                log_probabilities=[float(value) for value in content["log_probabilities"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a probe: {error!r}") from error

    def mismatch(self, log_probabilities: Float32Array, tolerance: float) -> str | None:
        """None if `log_probabilities` agree within `tolerance` at every token, else what disagrees, for a person."""
        if len(log_probabilities) != len(self.log_probabilities):
            return f"{len(log_probabilities)} log-probabilities came back where {len(self.log_probabilities)} were due"
        difference = np.abs(np.asarray(self.log_probabilities, dtype=np.float32) - log_probabilities)
        difference[~np.isfinite(log_probabilities)] = np.inf
        worst = int(difference.argmax())
        if difference[worst] <= tolerance:
            return None
        return (
            f"the log-probability of probe token {worst + 1} is {log_probabilities[worst]:.4f} at the server and "
            f"{self.log_probabilities[worst]:.4f} at the trainer: {difference[worst]:.4f} apart, {tolerance:g} allowed"
        )


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
    """One server as the pool sees it."""

    url: str
    state: str
    """`unknown` (never reached), `loading` (weights or their proof under way), `serving`, `draining` (finishes what it has),
    `out`."""
    reason: str
    """Why it does not serve, or takes nothing new; empty while it serves."""
    version: int | None
    """The policy version it is known to hold."""
    in_flight: int
    """This run's requests at the server now."""
    cap: int
    """How many there may be."""
