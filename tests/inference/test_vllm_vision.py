"""A real vLLM serves the text part of a vision-language model: adapters under PEFT's names, and full weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from counterpoint.inference.base import InferenceError, Probe, SamplingParameters, WeightUpdate
from counterpoint.inference.checkpoint import ADAPTER_WEIGHTS
from counterpoint.inference.config import LoraServingConfig, PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from tests.support.tiny_model import log_probabilities, write_probe
from tests.support.vision_model import make_vision_adapter, make_vision_model
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess, run_server, tiny_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 0.004
PROMPT = np.arange(5, 50, dtype=np.int32)
SAMPLING = SamplingParameters(temperature=1.0, max_tokens=24)
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def vision_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Takes adapters. The last directory is an adapter of the same layers under other names."""
    root = tmp_path_factory.mktemp("vision")
    make_vision_model(root / "base")
    directories = [root / f"step_{version}" for version in range(3)]
    models = [make_vision_adapter(root / "base", each, LAYERS, seed=seed) for seed, each in enumerate(directories)]
    tensors = load_file(directories[2] / ADAPTER_WEIGHTS)
    renamed = {name.replace(".language_model.", ".text_tower."): tensor for name, tensor in tensors.items()}
    save_file(renamed, directories[2] / ADAPTER_WEIGHTS)
    for version, (model, directory) in enumerate(zip(models, directories, strict=True)):
        write_probe(model, directory, version, PROBE_TOKENS)
    lora = LoraServingConfig(max_rank=8, max_adapters=2)
    yield from run_server(tiny_config(root / "base", root, lora=lora), directories, models)


def update_to(server: ServerProcess, version: int, directory: Path | None = None) -> WeightUpdate:
    published = server.directories[version]
    return WeightUpdate(version, directory or published, Probe.read(published / "probe.json"), "run")


async def test_an_adapter_is_active_and_one_that_activates_no_module_is_refused(vision_server: ServerProcess) -> None:
    pool = InferencePool(PoolConfig(urls=[vision_server.url], probe_tolerance=TOLERANCE, max_retries=0)).model("run")
    try:
        await pool.start()
        await pool.update(update_to(vision_server, 0))
        turn = await pool.generate(PROMPT, SAMPLING, affinity="a")
        tokens = np.concatenate([turn.prompt_ids, turn.completion_ids])
        expected = log_probabilities(vision_server.models[0], tokens)[len(turn.prompt_ids) - 1 :]
        assert np.abs(expected - turn.log_probabilities).max() < TOLERANCE
        with pytest.raises(InferenceError, match="nothing of its tensors"):
            await pool.update(update_to(vision_server, 2))
        await pool.update(update_to(vision_server, 1))
    finally:
        await pool.release()
