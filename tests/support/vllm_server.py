"""Real vLLM servers on tiny random models, started through `inference.server` as a process of its own.

A start takes some 20 s, so a server is a fixture of the session: `moe_server` and `adapter_server` of all tests, `lora_server` of
`tests/inference`. A test must load the weights that it needs, whatever another test left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from counterpoint.inference.config import InferenceConfig
from counterpoint.transport.process.launch import descendants
from tests.support.ports import free_port

PROBE_TOKENS = list(range(10, 42))

RUN_SERVER = """
import sys
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.server import serve
config = InferenceConfig.model_validate_json(sys.argv[1])
config = config.model_copy(update={"extra_args": [*config.extra_args, *sys.argv[2:]]})
sys.exit(serve(config, lambda: print("ready", flush=True)))
"""


@dataclass
class ServerProcess:
    """A running server, and the models whose weights it may load."""

    config: InferenceConfig
    process: subprocess.Popen[bytes]
    directories: list[Path]
    """By version: published weights, each with its probe."""
    models: list[Any] = field(repr=False)
    """By version: the same weights as Hugging Face models."""

    @property
    def url(self) -> str:
        """Its base URL. A test that comes after one with the mark `kills_server` fails here instead of waiting."""
        assert self.process.poll() is None, "the server that tests share has ended"
        return f"http://{self.config.host}:{self.config.port}"

    def family(self) -> list[int]:
        """Returns the ids of the server process and of all live processes below it."""
        return sorted([self.process.pid, *descendants(self.process.pid)])


def start_server(config: InferenceConfig, *refused: str) -> subprocess.Popen[bytes]:
    """Starts `serve` in a process of its own, which prints `ready` once it serves. `refused`: arguments that no file may have."""
    command = [sys.executable, "-c", RUN_SERVER, config.model_dump_json(), *refused]
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


def stop_server(process: subprocess.Popen[bytes]) -> int:
    """Sends SIGTERM unless the process has ended, and returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(timeout=60)


def run_server(
    config: InferenceConfig, directories: list[Path], models: list[Any], *refused: str
) -> Iterator[ServerProcess]:
    """Yields a server that is ready, and stops it afterwards. Fails the test with the end of vLLM's log if it does not start."""
    process = start_server(config, *refused)
    try:
        assert process.stdout is not None
        assert config.log_file is not None
        if process.stdout.readline() != b"ready\n":
            pytest.fail(f"vLLM did not start:\n{config.log_file.read_text()[-4000:]}")
        yield ServerProcess(config, process, directories, models)
    finally:
        assert stop_server(process) in (143, -signal.SIGKILL), "told to stop, or killed by a test"


def tiny_config(model: Path, root: Path, **settings: Any) -> InferenceConfig:
    """The configuration of a server of a tiny model in float32, with its log in `root`."""
    return InferenceConfig(
        model=str(model),
        port=free_port(),
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=4096,
        max_num_seqs=32,
        log_file=root / "vllm.log",
        **settings,
    )
