"""The SDK's data are trained by the routing of a real vLLM's samples: of a mixture of experts, from the base model.

On a CPU vLLM serves no adapters of such a model. That of the client's model is new, and so changes nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import tomli_w
from tinker import types

from counterpoint.inference.base import Probe, WeightUpdate
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.service.samplers import Samplers
from tests.service.serving import KEYS, serving
from tests.service.test_replay import journal_of
from tests.support.fake_inference import CLAIM
from tests.support.polling import DEADLINE_SECONDS
from tests.support.tiny_model import routing
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = list(range(5, 40))


@pytest.fixture
def trainer(moe_server: ServerProcess, tmp_path: Path) -> Iterator[None]:
    """A trainer of the server's model."""
    config = {
        "output_dir": str(tmp_path),
        "model": moe_server.config.model,
        "device": "cpu",
        "max_runs": 2,
        "stay": True,
    }
    (tmp_path / "trainer.toml").write_text(tomli_w.dumps(config | {"max_tokens": 512, "compile": False}))
    command = [sys.executable, "-m", "counterpoint.cli.main", "trainer", str(tmp_path / "trainer.toml")]
    process = subprocess.Popen(command)
    yield
    process.terminate()
    process.wait(timeout=DEADLINE_SECONDS)


def played(url: str) -> tuple[tinker.ServiceClient, dict[str, Any]]:
    """What a client sees that samples, and contributes its samples, and one with another token in it; and the client."""
    service = tinker.ServiceClient(base_url=url, api_key=KEYS[0])
    sampler = service.create_sampling_client(base_model="tiny").result()
    client = service.create_lora_training_client(base_model="tiny", rank=4, train_mlp=False).result()
    given = types.SamplingParams(max_tokens=24, stop=[])
    found = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, given).result(DEADLINE_SECONDS)
    data, rest = [], [0.0] * (len(PROMPT) - 1)
    for sequence in found.sequences:
        whole = [*PROMPT, *sequence.tokens]
        columns = {
            "target_tokens": np.array(whole[1:], np.int64),
            "logprobs": np.array(rest + list(sequence.logprobs or []), np.float32),
            "advantages": np.array(rest + [1.0] * len(sequence.tokens), np.float32),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=columns))
    first = data[0].model_input.to_ints()
    first[len(PROMPT) + 4] = (first[len(PROMPT) + 4] + 1) % 200
    other = types.Datum(model_input=types.ModelInput.from_ints(first), loss_fn_inputs=data[0].loss_fn_inputs)
    told = client.forward_backward([*data, other], "importance_sampling").result(DEADLINE_SECONDS)
    trained = [list(each["logprobs"].data)[len(PROMPT) - 1 :] for each in told.loss_fn_outputs]
    return service, {
        "tokens": [[*PROMPT, *each.tokens] for each in found.sequences],
        "sampled": [list(each.logprobs or []) for each in found.sequences],
        "trained": trained[:-1],
        "missing": told.metrics["routing/missing:sum"],
    }


@pytest.mark.usefixtures("trainer")
async def test_data_are_trained_by_the_routing_of_their_samples(moe_server: ServerProcess, tmp_path: Path) -> None:
    model = moe_server.directories[0]
    async with HttpSessions(PoolConfig()) as connections:
        loading = BinaryClient(moe_server.url, connections)
        await loading.load(WeightUpdate(0, model, Probe.read(model / "probe.json"), None), CLAIM)
        await loading.unload(None, CLAIM)
    pool = InferencePool(PoolConfig(urls=[moe_server.url]))
    samplers = Samplers(pool, moe_server.config.model, read_bounds(model), 1, CLAIM)
    await samplers.start()
    async with serving(tmp_path, samplers, has_experts=True) as (client, service):
        its, found = await asyncio.to_thread(played, str(client.make_url("")))
        (run_id,) = (model.run_id for model in service.store.models())
        ask, _ = journal_of(tmp_path, run_id).read_item(1)  # it goes with the session
        await asyncio.to_thread(its.close("success").result)
    await samplers.close()
    assert found["missing"] == 1
    for sampled, trained in zip(found["sampled"], found["trained"], strict=True):
        assert trained == pytest.approx(sampled, abs=0.004)
    assert ask.batch is not None
    *whole, part = [chunks[0] for chunks in ask.batch.routed_experts]
    for tokens, chosen in zip(found["tokens"], whole, strict=True):
        expected = routing(moe_server.models[0], np.array(tokens, np.int32))[:-1]
        assert (np.sort(chosen, axis=-1) == expected).all()
    assert (part == whole[0][: len(PROMPT) + 4]).all()
