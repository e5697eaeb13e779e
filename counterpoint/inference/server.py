"""Starts vLLM with our plugin as a subprocess and supervises it: checks before, readiness, logs, signals, no orphans.

vLLM runs as its own program (`counterpoint/inference/plugin/program.py`), below a guardian. This process imports neither
torch nor vllm and only waits. If either is killed, the other ends, too, and nothing of vLLM is left.
"""

from __future__ import annotations

import errno
import http.client
import logging
import math
import os
import re
import secrets
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from counterpoint.inference import identity
from counterpoint.inference.checkpoint import is_delta
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.early_program import PROGRAM, EarlyProgram, cpu_environment, on_cpu
from counterpoint.inference.model_facts import (
    EXPERT_COUNTS,
    attention_heads,
    has_other_parts,
    head_size,
    kept_bytes,
    longest_context,
    text_part,
)
from counterpoint.inference.port_claim import check_port, claimed
from counterpoint.inference.root_cause import is_of_input, is_of_machine, root_cause
from counterpoint.inference.token import API_KEY_FILE_VARIABLE, read_tokens
from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.printable import shortened
from counterpoint.transport.process.child import Child, last_lines, size_of
from counterpoint.transport.process.exit_codes import describe_exit
from counterpoint.transport.process.launch import TEMPORARY
from counterpoint.transport.process.notify import notify_failure
from counterpoint.transport.process.permanent_errors import DISK_FULL, PASSING, exit_code_of, is_disk_full, is_passing
from counterpoint.transport.process.resident import cpu_seconds, stopped_below
from counterpoint.transport.process.start_time import StartTime
from counterpoint.transport.process.stop_requests import StopSignals
from counterpoint.transport.telemetry.start_phases import enter

logger = logging.getLogger(__name__)

PHASES = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        ("capturing CUDA graphs", "Capturing CUDA graphs"),
        (
            "compiling and warming up kernels",
            r"(?i)^(?!.*disabl).*(torch\.compile|compiling a graph|warm(ing|ed)?[ -]?up|graph capturing finished)",
        ),
        ("loading weights", "Starting to load model|Loading (safetensors|weights|.* checkpoint shards)"),
        ("inspecting the model", "Resolved architecture"),
    )
)
"""What vLLM does before it is ready, and the lines that it writes then (`model_executor/warmup`, `compilation/`, `v1/worker`)."""

PHASE_LINES = 60

POLL_SECONDS = 0.25
"""Seconds between checks of the child and of its health."""

STOP_SECONDS = 15.0
"""How long vLLM may take to end after SIGTERM."""

PROCESS_CHECK_SECONDS = 5.0
"""Seconds between checks of vLLM's processes, which read all of /proc."""

NOT_LISTENING_SECONDS = 5.0
"""How long a vLLM that no longer listens may take to end. If its engine was killed, it may wait for ever for pending calls:
vLLM 0.32 then fails requests, but no other calls to the engine, such as loading an adapter
(`AsyncMPClient._call_utility_async`)."""

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM 0.32 accepts for `--max-lora-rank`."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM 0.32 computes on a CPU (`CPUAttentionBackend.get_supported_head_sizes`)."""

STRUCTURED_OUTPUTS_BACKEND = "--structured-outputs-config.backend"
"""vLLM's flag for what constrains answers. Of its backends guidance refuses what it does not hold."""

CONTEXTS_KEPT = 4
"""Whole contexts of each request at once that fit into the KV cache of a small model: the one that it computes, and prefixes."""

ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's variable with which it takes a `max_model_len` above the model's own."""

MAX_LINE = 200
"""Characters of a line of output that a reason quotes."""

MAX_STATUS_BYTES = 1 << 20
"""Longest status that is read of the child."""

EXIT_FAILED, EXIT_BAD_CONFIG = 1, 2


def serve(
    config: InferenceConfig,
    on_ready: Callable[[], None],
    beat: Callable[[str, str], None] = lambda trouble, phase: None,
    early: EarlyProgram | None = None,
) -> int:
    """Runs one vLLM server until it ends or a stop request arrives; a second one kills it. Call from the main thread.

    `on_ready` is called once the server has answered its health check, `beat` every 5 s with the problem that keeps vLLM from
    working, empty for none, and with what it does before it is ready. `early` is a program of vLLM that waits for its order.
    Returns 128 + the signal after a stop request, 2 if the configuration cannot work, 1 for anything else: the port is taken,
    the server did not start in time, or ended by itself.
    """
    try:
        check_configuration(config)
        environment = server_environment(config)
        config = config.model_copy(update={"host": address_of(config.host)})
    except (ValueError, OSError) as error:
        return _failed(exit_code_of(error), str(error))
    try:
        with (
            claimed(config.host, config.port),
            StopSignals() as signals,
        ):
            remove_left(Path(tempfile.gettempdir()), TEMPORARY)
            check_port(config.host, config.port)
            own = _Output(config)
            child = _start(config, environment, early)
            enter("waits for its API server")
            try:
                return _watch(child, config, environment, signals, on_ready, beat, own)
            finally:
                _stop(child, signals)
    except OSError as error:
        passing = PASSING if is_passing(error) else EXIT_FAILED
        return _failed(DISK_FULL if is_disk_full(error) else passing, str(error))


def _failed(code: int, reason: str) -> int:
    """Says why the server ends, in its log and to its supervisor; returns its exit code."""
    logger.error("inference: %s", reason)
    notify_failure(reason)
    return code


class _Output:
    """What vLLM writes from now on, into its log or the file behind our own error output."""

    def __init__(self, config: InferenceConfig) -> None:
        own = Path(f"/proc/self/fd/{sys.stderr.fileno()}") if config.log_file is None else config.log_file
        self._file = own.resolve()
        self._start = size_of(self._file)

    def cause(self) -> str:
        """Returns why vLLM failed, as of `root_cause`; empty if the output does not say it, or is no file."""
        return (root_cause(self._file, self._start) or "") if self._file.is_file() else ""

    def phase(self) -> str:
        """Returns what vLLM does before it is ready, in a few words; empty if its newest lines do not say it."""
        lines = last_lines(self._file, PHASE_LINES, self._start) if self._file.is_file() else []
        found = (phase for line in reversed(lines) for phase, pattern in PHASES if pattern.search(line))
        return next(found, "")

    def last_line(self) -> str:
        """Returns the last line; empty if there is none, or the output is no file."""
        lines = last_lines(self._file, 1, self._start) if self._file.is_file() else []
        return shortened(lines[0], MAX_LINE) if lines else ""


def check_configuration(config: InferenceConfig) -> None:
    """Raises `ValueError`, with advice, for a model or a combination on which vLLM would fail after half a minute."""
    model = read_model(config)
    check_sizes(config, model)
    size = head_size(model)
    if (
        on_cpu()
        and size is not None
        and size not in CPU_HEAD_SIZES
        and not _decides_elsewhere(config, "--hf-overrides")
    ):
        raise ValueError(
            f"model = {config.model!r}: its attention heads have {size} dimensions (head_dim in its config.json), which vLLM's "
            f"kernels for a CPU do not compute; expected one of {', '.join(map(str, CPU_HEAD_SIZES))}, or a GPU"
        )
    text = text_part(model)
    experts = any(text.get(key) for key in EXPERT_COUNTS)
    if config.return_routed_experts and not experts:
        raise ValueError(
            f"return_routed_experts = true, but the model in {config.model} has no experts; remove the setting"
        )
    if config.lora is not None and experts and on_cpu():
        raise ValueError(
            f"[lora] is set, but the model in {config.model} is a mixture of experts, whose adapters vLLM cannot serve on a CPU; "
            "train full weights, use a dense model, or use a GPU"
        )
    if config.lora is not None and "linear_attention" in (text.get("layer_types") or ()) and on_cpu():
        raise ValueError(
            f"[lora] is set, but the model in {config.model} has layers of linear attention, with which vLLM's build for a CPU "
            "computes no adapters; train full weights, or use a GPU"
        )


def read_model(config: InferenceConfig) -> dict[str, Any]:
    """Returns the config.json of the model to serve. Raises `ValueError` for one that vLLM cannot read or start from."""
    path = Path(config.model) / "config.json"
    if is_delta(Path(config.model)):
        raise ValueError(
            f"model = {config.model!r}: this broadcast holds only what changed since an earlier version, which vLLM cannot start "
            "from; give the run's last version, its best/, or one without a delta.safetensors"
        )
    try:
        model = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"model = {config.model!r}: there is no {path}; give a directory with a model in Hugging Face format"
        ) from None
    except orjson.JSONDecodeError as error:
        raise ValueError(f"model = {config.model!r}: cannot read {path}: {error}") from error
    if not isinstance(model, dict):
        raise ValueError(f"model = {config.model!r}: {path} holds a JSON {type(model).__name__}; expected an object")
    return model


def check_sizes(config: InferenceConfig, model: Mapping[str, Any]) -> None:
    """Raises `ValueError` if the model of this config.json takes fewer tokens, or cannot be divided over so many GPUs.

    Only what vLLM refuses too, on any machine.
    """
    _check_context(config, longest_context(model))
    _check_stop_tokens(config, model)
    heads, ranks = attention_heads(model), config.tensor_parallel_size
    if heads is not None and heads % ranks and not _decides_elsewhere(config, "--tensor-parallel-size"):
        raise ValueError(
            f"tensor_parallel_size = {ranks}: the model in {config.model} has {heads} attention heads (num_attention_heads in "
            f"its config.json), and a server's GPUs share them evenly; expected a divisor of {heads}"
        )


def _check_context(config: InferenceConfig, longest: int | None) -> None:
    decided_elsewhere = _decides_elsewhere(config, "--max-model-len") or ALLOW_LONG in os.environ
    if longest is None or config.max_model_len <= longest or decided_elsewhere:
        return
    default = "" if "max_model_len" in config.model_fields_set else ", the default"
    raise ValueError(
        f"max_model_len = {config.max_model_len}{default}: the model in {config.model} takes at most {longest} tokens "
        f"(max_position_embeddings in its config.json); set max_model_len to {longest} or less"
    )


def _check_stop_tokens(config: InferenceConfig, model: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an end of turn that the model's vocabulary lacks: vLLM would refuse every request that names it."""
    vocabulary = text_part(model).get("vocab_size")
    if not isinstance(vocabulary, int) or _decides_elsewhere(config, "--hf-overrides"):
        return
    for name in ("generation_config.json", "config.json"):
        path = Path(config.model) / name
        if not path.is_file():
            continue
        try:
            ends = orjson.loads(path.read_bytes()).get("eos_token_id")
        except (orjson.JSONDecodeError, AttributeError) as error:
            raise ValueError(f"model = {config.model!r}: cannot read {path}: {error}") from error
        for end in ends if isinstance(ends, list) else [ends]:
            if isinstance(end, int) and not 0 <= end < vocabulary:
                raise ValueError(
                    f"model = {config.model!r}: eos_token_id = {end} in {path} is not among the {vocabulary} tokens of the model "
                    "(vocab_size), so that vLLM refuses every request; correct it"
                )


def _decides_elsewhere(config: InferenceConfig, flag: str) -> bool:
    """Returns whether vLLM gets `flag`, or another configuration of the model than its config.json, by `extra_args`."""
    return any(config.sets(each) for each in (flag, "--hf-overrides", "--hf-config-path"))


def server_command(config: InferenceConfig) -> list[str]:
    """Returns vLLM's command line. It contains no secret."""
    command = [sys.executable, "-P", "-m", PROGRAM]
    command += ["--model", config.model, "--host", config.host, "--port", str(config.port)]
    command += ["--dtype", config.dtype, "--seed", str(config.seed)]
    command += ["--max-model-len", str(config.max_model_len), "--max-num-seqs", str(config.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(config.max_num_batched_tokens)]
    command += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    command += ["--worker-extension-cls", "counterpoint.inference.plugin.worker_digest.WeightReader"]
    if not config.sets("--config"):  # a flag goes before what vLLM's own file says
        command += ["--scheduler-cls", "counterpoint.inference.plugin.engine.held_outputs.scheduler"]
    # Log-probabilities at the sampling temperature, and no sampling settings but those a request states: a model's
    # generation_config.json may ask for top-k or top-p, which would train on another distribution than was meant.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    if not any(map(config.sets, ("--config", "--structured-outputs-config", STRUCTURED_OUTPUTS_BACKEND))):
        # By default vLLM's API server chooses one for each schema, and its engine keeps that of the first.
        command += [STRUCTURED_OUTPUTS_BACKEND, "guidance"]
    if on_cpu():
        command += ["--enforce-eager"]
        if not (config.sets("--block-size") or config.sets("--config")):  # a flag goes before what vLLM's own file says
            # On a CPU vLLM chooses 128 and caches whole blocks alone: a shorter prompt never. Its kernels take multiples of 32.
            command += ["--block-size", "32"]
        if not (config.sets("--kv-cache-memory-bytes") or config.sets("--config")):
            command += ["--kv-cache-memory-bytes", str(_kv_cache_bytes(config))]
        if _computes_in_engine(config):
            command += ["--distributed-executor-backend", "uni"]
    if has_other_parts(read_model(config)) and not config.sets("--limit-mm-per-prompt"):
        command += ["--language-model-only"]  # requests are of text: what reads images takes no memory
    if config.return_routed_experts:
        command += ["--enable-return-routed-experts"]
    if config.lora is None:
        command += ["--weight-transfer-config", '{"backend": "counterpoint"}']
    else:
        lora = config.lora
        rank = next(rank for rank in VLLM_LORA_RANKS if rank >= lora.max_rank)
        command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(lora.max_adapters)]
        command += ["--max-cpu-loras", str(max(lora.max_adapters, lora.max_adapters_in_memory))]
    if config.tool_parser is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_parser]
    if config.reasoning_parser is not None:
        command += ["--reasoning-parser", config.reasoning_parser]
    # What comes last is asked first.
    command += ["--middleware", "counterpoint.inference.plugin.authentication.PlainBodies"]
    if config.api_key_file is not None:
        command += ["--middleware", "counterpoint.inference.plugin.authentication.RequireToken"]
    return command + config.extra_args


def server_environment(config: InferenceConfig) -> dict[str, str]:
    """Returns the child's environment. Raises `ValueError` if the token file cannot be read."""
    environment = cpu_environment() if on_cpu() else dict(os.environ)
    environment.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="counterpoint",
        # Spawned workers load the plugin themselves; in forked ones it would count as loaded.
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )
    environment[identity.INSTANCE_VARIABLE] = secrets.token_hex(16)
    environment.pop(identity.VARIABLE, None)
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace the flag
    if config.identity_file is not None:
        identity.read(config.identity_file)
        environment[identity.VARIABLE] = str(config.identity_file.absolute())
    if on_cpu() and _computes_in_engine(config):
        # vLLM 0.32 replaces the executor on a CPU unless this is set, since it sets OpenMP's variables for a worker. They are set
        # already (`cpu_environment`). The engine stays a process of its own: a server knows no other way.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # The engine shares the server's imports (`counterpoint/inference/plugin/forking_server.py`); it has no workers.
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if config.lora is not None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.api_key_file is not None:
        # The plugin checks it on every route, and reads it again when it changes. vLLM's own check would keep the first one.
        read_tokens(config.api_key_file)
        environment.pop("VLLM_API_KEY", None)
        environment[API_KEY_FILE_VARIABLE] = str(config.api_key_file.absolute())
    return environment


def _kv_cache_bytes(config: InferenceConfig) -> int:
    """Returns the bytes of a CPU's KV cache: `kv_cache_gib`, or where that is unset, what a small model can use.

    vLLM writes zeros to all of it when it starts: half a CPU second for a GiB, which stays resident.
    """
    most = (config.kv_cache_gib or 1) * 2**30
    if config.kv_cache_gib is not None or _decides_elsewhere(config, "--max-model-len"):
        return most
    kept = kept_bytes(read_model(config))
    return most if kept is None else min(most, kept * CONTEXTS_KEPT * config.max_num_seqs * config.max_model_len)


def _computes_in_engine(config: InferenceConfig) -> bool:
    """Whether the engine's process computes, too, as it does on a GPU, instead of a worker of its own.

    On a CPU the engine would spin for half a core while it waits for the worker, and a third process would import torch.
    """
    return config.tensor_parallel_size == 1 and not any("executor-backend" in word for word in config.extra_args)


def address_of(host: str) -> str:
    """Returns the address of `host` on which vLLM listens, and which is checked: its first IPv4 address, as vLLM chooses.

    Raises `OSError` for a name without an address.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] is not socket.AF_INET)[4][0])


def _start(config: InferenceConfig, environment: dict[str, str], early: EarlyProgram | None) -> Child:
    """Starts vLLM, or gives the program that was started early its order, unless its output is to go into a file of its own."""
    command = server_command(config)
    if early is not None:
        arguments = command[command.index(PROGRAM) + 1 :]
        if config.log_file is None and (child := early.ordered(arguments, environment)) is not None:
            return child
        early.end()
    ours = None if config.log_file is not None else sys.stderr.fileno()
    return Child("vLLM", command, environment=environment, log=config.log_file, stdout=ours, stderr=ours)


def _watch(
    child: Child,
    config: InferenceConfig,
    environment: Mapping[str, str],
    signals: StopSignals,
    on_ready: Callable[[], None],
    beat: Callable[[str, str], None],
    output: _Output,
) -> int:
    """Waits for readiness, then for the end. Returns the exit code."""
    seconds = config.startup_timeout_seconds
    start = StartTime(f"startup_timeout_seconds = {seconds:g}", seconds, lambda: cpu_seconds(child.pid))
    ready = False
    not_listening_since = math.inf
    looked = -math.inf
    while not signals.count:
        if time.monotonic() - looked >= PROCESS_CHECK_SECONDS:
            looked = time.monotonic()
            beat(_trouble(child), "" if ready else output.phase())
        if (code := child.code) is not None:
            return _ended(code, config, output.cause(), ready=ready)
        if not ready and _answers(config, environment):
            ready = True
            logger.info("inference: vLLM is ready on %s://%s:%d", config.scheme, config.host, config.port)
            on_ready()
        if ready:
            not_listening_since = (
                math.inf if _listens(config.host, config.port) else min(not_listening_since, time.monotonic())
            )
        if time.monotonic() - not_listening_since > NOT_LISTENING_SECONDS:
            child.kill()
            found = f": {found}" if (found := output.cause()) else ""
            return _failed(
                EXIT_FAILED, f"vLLM on port {config.port} listens no more, and does not end: it is killed{found}"
            )
        if not ready:
            start.look()
            if start.is_over:
                last = f"; the last line of its output: {line}" if (line := output.last_line()) else ""
                return _failed(EXIT_FAILED, f"vLLM on port {config.port} does not answer: {start}{last}")
        time.sleep(POLL_SECONDS)
    return signals.exit_code


def _ended(code: int, config: InferenceConfig, cause: str, *, ready: bool) -> int:
    """Says why vLLM ended by itself; returns the exit code of the server."""
    death = describe_exit(code)
    short = ", as the kernel does when memory is short" if (killed := code == 128 + signal.SIGKILL) else ""
    cause = "" if killed else cause  # what is in the output was survived
    refused = bool(cause) and not ready and code <= 128
    what = "did not start" if refused else f"{death}{'' if ready else ' before it was ready'}{short}"
    why = f": {cause}" if cause else ""
    where = f"; its output is in {config.log_file}" if config.log_file else ""
    its_code = PASSING if not ready and (killed or is_of_machine(cause)) else EXIT_FAILED
    if not ready and (code == EXIT_BAD_CONFIG or (refused and is_of_input(cause))):  # 2: argparse refused an argument
        its_code = EXIT_BAD_CONFIG
    return _failed(its_code, f"vLLM on port {config.port} {what}{why}{where}")


def _trouble(child: Child) -> str:
    """Returns the problem that keeps a running vLLM from working; empty if none is found."""
    stopped = stopped_below(child.pid)
    return f"vLLM does not run: process {', '.join(map(str, stopped))} is stopped (SIGSTOP)" if stopped else ""


def _listens(host: str, port: int) -> bool:
    """Whether any process listens there, without a connection to it."""
    try:
        check_port(host, port)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _answers(config: InferenceConfig, environment: Mapping[str, str]) -> bool:
    """Returns whether the child is healthy: it itself answers, and no other server at the same address."""
    host = "127.0.0.1" if config.host == "0.0.0.0" else config.host
    if config.scheme == "https":
        # It is our own child, addressed by IP, and its certificate need not cover that address.
        unverified = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, config.port, timeout=5, context=unverified
        )
    else:
        connection = http.client.HTTPConnection(host, config.port, timeout=5)
    try:
        file = config.api_key_file
        headers = {} if file is None else {"Authorization": f"Bearer {read_tokens(file)[0]}"}
        connection.request("GET", identity.STATUS_PATH, headers=headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            return False
        status = orjson.loads(response.read(MAX_STATUS_BYTES))
        return isinstance(status, dict) and status.get("instance") == environment[identity.INSTANCE_VARIABLE]
    except (OSError, http.client.HTTPException, ValueError):
        # An answer that is no JSON comes here, too, and a token that is being replaced.
        return False
    finally:
        connection.close()


def _stop(child: Child, signals: StopSignals) -> None:
    """Ends the child: SIGTERM, then a kill after `STOP_SECONDS` or a second stop request."""
    if child.code is None:
        child.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while child.code is None and time.monotonic() < deadline and signals.count < 2:
            time.sleep(POLL_SECONDS / 5)
    child.kill()
