"""Configuration of inference: the vLLM server that we start, and the pool of servers that an orchestrator uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from counterpoint.transport.config import Config, Seed
from counterpoint.transport.loopback import is_loopback


def check_url(url: str) -> str:
    """Returns a server's base URL without a `/` at its end. Raises `ValueError` if it is invalid, or holds a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        valid = False
    if "@" in url:  # addresses are in logs, in metrics and on the page
        raise ValueError("a server's URL holds no user or password; its token is read from api_key_file")
    if not valid or parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} is no server: http://HOST:PORT is expected")
    return url.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(check_url)]
"""The base URL of a server."""


class LoraServingConfig(Config):
    """Adapter slots of a server."""

    max_rank: int = Field(default=8, ge=1, le=512)
    """Largest LoRA rank that an adapter may have."""

    max_adapters: int = Field(default=4, ge=1)
    """Adapters that compute at once, each with room for its weights. More runs than that take turns."""

    max_adapters_in_memory: int = Field(default=16, ge=1)
    """Adapters kept in main memory, from where they are put in place at their turn; further ones are read from disk. At least
    `max_adapters` are."""


class InferenceConfig(Config):
    """One vLLM server, started as a subprocess with our plugin."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds (`tiny-moe`, `tiny-dense`, `tiny-math`, `smollm2`)."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `api_key_file`."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port. Refused before anything is started when it is taken."""

    api_key_file: Path | None = None
    """A file holding the bearer token that requests must carry; with several lines, any of them. Read again when it changes."""

    identity_file: Path | None = None
    """A file holding the secret by which the server proves whose it is. A job makes one and sets this."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and activations."""

    max_model_len: int = Field(default=2048, ge=16)
    """Longest prompt plus completion, in tokens. Refused above what the model takes (`max_position_embeddings`)."""

    max_num_seqs: int = Field(default=64, ge=1)
    """Most sequences that run at once."""

    max_num_batched_tokens: int = Field(default=65536, ge=16)
    """Most tokens of one engine step. Above the longest prompt, prefills are never chunked."""

    kv_cache_gib: int | None = Field(default=None, ge=1)
    """KV cache on a CPU, in GiB. Unset: 1, or what a small model can use, if less: four contexts of `max_model_len` for each of
    `max_num_seqs`. On a GPU vLLM sizes it."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model."""

    return_routed_experts: bool = False
    """Return the experts each token was routed to (MoE models), for router replay."""

    lora: LoraServingConfig | None = None
    """Serve LoRA adapters. Unset: full weights are updated."""

    tool_parser: str | None = None
    """How calls of tools are read from what the model wrote: a name that vLLM knows (`--tool-call-parser`), such as `hermes`
    (Qwen2.5, Qwen3, the built-in models), `qwen3_xml`, `llama3_json`, `mistral` or `deepseek_v31`. Needed by environments with
    tools."""

    reasoning_parser: str | None = None
    """How reasoning is told from the answer: a name that vLLM knows (`--reasoning-parser`), such as `qwen3` or
    `deepseek_r1`."""

    seed: Seed = 0
    """Seed of the engine's sampling."""

    startup_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long the server may take to answer its health check."""

    extra_args: list[str] = []
    """Further arguments for vLLM's own command line, as they are."""

    log_file: Path | None = None
    """The file for vLLM's output. Unset: standard error."""

    @property
    def scheme(self) -> str:
        """The scheme of its URL: `https` where `extra_args` give vLLM a certificate."""
        return "https" if self.sets("--ssl-certfile") else "http"

    @property
    def parses_calls(self) -> bool:
        """Whether calls of tools are parsed, by `tool_parser` or by `extra_args`."""
        return self.tool_parser is not None or self.sets("--tool-call-parser")

    def sets(self, flag: str) -> bool:
        """Returns whether `extra_args` have a flag of vLLM's, written with dashes or, as vLLM takes it too, with underscores."""
        return flag in {argument.partition("=")[0].replace("_", "-") for argument in self.extra_args}

    @model_validator(mode="after")
    def _answers_what_is_trained_on(self) -> InferenceConfig:
        for argument, following in zip(self.extra_args, [*self.extra_args[1:], ""], strict=False):
            flag, _, value = argument.partition("=")
            if flag.replace("_", "-") == "--logprobs-mode" and (value or following) != "processed_logprobs":
                raise ValueError(
                    f"extra_args have --logprobs-mode {value or following}: a run that samples at another temperature than 1 "
                    "would train with wrong ratios; leave it out, the server has processed_logprobs"
                )
        return self

    @model_validator(mode="after")
    def _guarded_beyond_loopback(self) -> InferenceConfig:
        if self.api_key_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines: set api_key_file, or listen on 127.0.0.1"
            )
        return self


class PoolConfig(Config):
    """The servers an orchestrator sends rollouts to, and how it treats them."""

    urls: list[ServerUrl] = ["http://127.0.0.1:8000"]
    """Base URLs, one a server, `http` or `https`. Empty by default if `dns` or `urls_file` is set; servers from all three are
    used together."""

    dns: str | None = None
    """`http://NAME:PORT`, where every address that NAME resolves to is a server, looked up again and again."""

    urls_file: Path | None = None
    """A file with one base URL a line, which is watched. `drain` before a URL lets that server finish what it has and sends it
    nothing new, as for one whose line is gone; `#` begins a comment. Replace the file by a rename."""

    protocol: Literal["binary", "openai"] = "binary"
    """`binary`: our plugin's routes. `openai`: a stock vLLM over JSON (`/v1/completions`), whose weights can be updated
    only as LoRA adapters, through `/v1/load_lora_adapter`."""

    api_key_file: Path | None = None
    """A file holding the bearer token to send; of several lines, the first. Read again when it changes."""

    identity_file: Path | None = None
    """A file holding the secret that the servers must have (their own `identity_file`): others are not used, whatever listens at
    their addresses. A job sets it for its own servers."""

    ca_file: Path | None = None
    """PEM file with the certificate authorities that may sign the servers' certificates (`https`). Unset: the machine's own
    list."""

    max_concurrent_requests_per_server: int = Field(default=256, ge=1)
    """Requests in flight to one server; further ones wait in the pool. With `capacity = "adaptive"` the most there may be."""

    capacity: Literal["adaptive", "fixed"] = "adaptive"
    """`adaptive`: the limit of each server follows its load (KV cache, queue, preemptions), as far as it tells it. `fixed`: it
    stays at `max_concurrent_requests_per_server`."""

    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Deadline of one request, retries included."""

    connect_timeout_seconds: float = Field(default=5.0, gt=0)
    """Deadline of one TCP connect."""

    max_retries: int = Field(default=3, ge=0)
    """Further attempts after a lost connection or a failed server; the first comes at once, elsewhere if possible."""

    health_interval_seconds: float = Field(default=2.0, gt=0)
    """Seconds between health checks of one server, and between looks at `dns` and `urls_file`."""

    startup_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long to wait for the first healthy server."""

    update_timeout_seconds: float = Field(default=300.0, gt=0)
    """Deadline of one weight update of one server, the sending included."""

    send_weights: bool = False
    """Send new weights to the servers over HTTP, for servers that do not see the job's directory (docs/inference.md). False: they
    get the path, and read the files themselves."""

    take_over: bool = False
    """Load new weights also where they belong to another run, which is gone and could not give them up
    (docs/inference.md). For one start: two runs that share a server would take it from each other."""

    probe_tolerance: float | None = Field(default=None, gt=0)
    """Largest root mean square difference between the trainer's and a server's log-probabilities of a probe, in nats. Unset: a
    tenth of their spread, and what rounding does to each of them as the trainer measures it, which suits every precision."""

    def apart(self, urls: list[str], protocol: str, api_key_file: Path | None, most_requests: int) -> PoolConfig:
        """Returns the same for servers of others, as a teacher's: each gets at most so many requests at once."""
        own = {"urls": urls, "dns": None, "urls_file": None, "identity_file": None}
        limits = {"max_concurrent_requests_per_server": most_requests, "capacity": "fixed"}
        return self.model_copy(update={**own, **limits, "protocol": protocol, "api_key_file": api_key_file})

    @model_validator(mode="after")
    def _can_be_sent(self) -> PoolConfig:
        if self.send_weights and self.protocol != "binary":
            raise ValueError(
                f"send_weights with protocol = {self.protocol!r}: a stock vLLM reads adapters from a path; use "
                'protocol = "binary", or let it see the job\'s directory'
            )
        return self

    @model_validator(mode="after")
    def _has_a_source(self) -> PoolConfig:
        if self.dns is not None:
            parts = urlsplit(check_url(self.dns))
            if parts.scheme != "http" or parts.path:
                raise ValueError(
                    f"dns = {self.dns!r}: http://NAME:PORT is expected (with https the certificate would have to name "
                    "each address)"
                )
        if self.dns is None and self.urls_file is None:
            if not self.urls:
                raise ValueError("urls is empty, and neither dns nor urls_file is set: no server would be asked")
        elif "urls" not in self.model_fields_set:
            self.urls = []
            self.model_fields_set.discard("urls")
        return self
