"""Real vLLM servers on tiny random models, each started once for all tests that use it, through `inference.server` as its
own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inference.config import InferenceConfig, LoraServingConfig
from tests.inference.tiny_model import make_adapter, make_model, write_probe
from tests.support.ports import free_port

PROBE_TOKENS = list(range(10, 42))

RUN_SERVER = """
import sys
from inference.config import InferenceConfig
from inference.server import serve
sys.exit(serve(InferenceConfig.model_validate_json(sys.argv[1]), lambda: print("ready", flush=True)))
"""


@dataclass
class ServerProcess:
    """A running server and the models it may be given."""

    config: InferenceConfig
    process: subprocess.Popen[bytes]
    directories: list[Path]
    """By version: published weights, each with its probe."""
    models: list[Any] = field(repr=False)
    """By version: the same weights as Hugging Face models."""

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.config.port}"

    def family(self) -> list[int]:
        """Ids of all live processes that descend from the server process, itself included."""
        parents = dict(live_processes())
        family = {self.process.pid}
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        return sorted(pid for pid in family if pid in parents)


def live_processes() -> Iterator[tuple[int, int]]:
    """Process id and parent's id of every process that is not a zombie."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            yield int(path.parent.name), int(parent)


def start_server(config: InferenceConfig) -> subprocess.Popen[bytes]:
    """Starts `serve` in a process of its own, which says `ready`."""
    command = [sys.executable, "-c", RUN_SERVER, config.model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


def stop_server(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, and the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(timeout=60)


def run_server(config: InferenceConfig, directories: list[Path], models: list[Any]) -> Iterator[ServerProcess]:
    process = start_server(config)
    try:
        assert process.stdout is not None
        assert config.log_file is not None
        if process.stdout.readline() != b"ready\n":
            pytest.fail(f"vLLM did not start:\n{config.log_file.read_text()[-4000:]}")
        yield ServerProcess(config, process, directories, models)
    finally:
        assert stop_server(process) in (143, -signal.SIGKILL), "told to stop, or killed by a test"


def tiny_config(model: Path, root: Path, **settings: Any) -> InferenceConfig:
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


@pytest.fixture(scope="session")
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A mixture of experts that returns its routing and takes full weights."""
    root = tmp_path_factory.mktemp("moe")
    directories = [root / f"step_{version}" for version in range(2)]
    models = [make_model(directory, moe=True, seed=seed) for seed, directory in enumerate(directories)]
    for version, (model, directory) in enumerate(zip(models, directories, strict=True)):
        write_probe(model, directory, version, PROBE_TOKENS)
    yield from run_server(tiny_config(directories[0], root, return_routed_experts=True), directories, models)


@pytest.fixture(scope="session")
def lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A dense model that takes LoRA adapters behind a bearer token. `directories` and `models` are those of the adapters."""
    root = tmp_path_factory.mktemp("lora")
    make_model(root / "base", moe=False, seed=0)
    directories = [root / f"step_{version}" for version in range(4)]
    models = [make_adapter(root / "base", directory, seed=seed) for seed, directory in enumerate(directories)]
    for version, (model, directory) in enumerate(zip(models, directories, strict=True)):
        write_probe(model, directory, version, PROBE_TOKENS)
    token = root / "token"
    token.write_text("open sesame\n")
    token.chmod(0o600)
    lora = LoraServingConfig(max_rank=8, max_adapters=2, max_adapters_in_memory=2)
    yield from run_server(tiny_config(root / "base", root, lora=lora, api_key_file=token), directories, models)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Hugging Face's forwards of tiny models are slower with more, beside a server that computes too."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
