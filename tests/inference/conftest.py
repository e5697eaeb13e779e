"""A real vLLM server that takes LoRA adapters, for all tests of this package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from counterpoint.inference.config import LoraServingConfig
from tests.support.tiny_model import make_adapter, make_model, write_probe
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess, run_server, tiny_config


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
