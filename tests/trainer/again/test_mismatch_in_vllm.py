"""A real vLLM computes with one layer of a version before: `counterpoint mismatch` names load, layer and version."""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from counterpoint.inference.base import Probe, SamplingParameters, WeightUpdate
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.transport.records import Batch, SampleInfo, Turn
from tests.support.tiny_model import write_probe
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess
from tests.trainer.again.recorded import STEPS, record
from tests.trainer.again.test_mismatch import said_of
from tests.trainer.conftest import make_batch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
ADAPTER = "mismatch"
NEWEST = STEPS - 1
SAMPLING = SamplingParameters(temperature=1.0, max_tokens=12)
PROMPTS = [np.random.default_rng(index).integers(5, 100, 8, dtype=np.int32) for index in range(16)]


def broadcast(output_dir: Path, version: int) -> Path:
    return output_dir / "run_default" / "broadcast" / f"step_{version}"


def with_old_layer(output_dir: Path, base: Path) -> Path:
    """The newest version with layer 1 of the one before, and the proof of that: who published it took the wrong layer."""
    made = output_dir / "wrong"
    shutil.copytree(broadcast(output_dir, NEWEST), made)
    newest, former = (
        load_file(broadcast(output_dir, each) / "adapter_model.safetensors") for each in (NEWEST, NEWEST - 1)
    )
    mixed = {name: former[name] if ".layers.1." in name else newest[name] for name in newest}
    assert any(".layers.1." in name for name in mixed)
    save_file(mixed, made / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    write_probe(PeftModel.from_pretrained(model, made).eval(), made, NEWEST, PROBE_TOKENS)
    return made


async def sampled(server: ServerProcess, weights: Path) -> list[Turn]:
    """A completion of each prompt, by these weights as the newest version."""
    pool = InferencePool(PoolConfig(urls=[server.url], max_retries=0)).model(ADAPTER)
    await pool.start()
    try:
        await pool.update(WeightUpdate(NEWEST, weights, Probe.read(weights / "probe.json"), ADAPTER))
        calls = [pool.generate(prompt, SAMPLING, affinity=str(index)) for index, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*calls)
    finally:
        await pool.release()


def batch_of(rollouts: dict[str, Turn]) -> Batch:
    """Step `STEPS` with a sample of each rollout, by its id."""
    turns = list(rollouts.values())
    masks = [np.arange(len(PROMPTS[0]) + len(turn.completion_ids)) >= len(PROMPTS[0]) for turn in turns]
    mask_T = np.concatenate(masks).astype(np.uint8)
    log_probabilities_T = np.zeros(len(mask_T), np.float32)
    log_probabilities_T[mask_T != 0] = np.concatenate([turn.log_probabilities for turn in turns])
    return Batch(
        run_id="default",
        step=STEPS,
        samples=tuple(SampleInfo(name, "reverse", turn.policy_version, 0.0, 1.0) for name, turn in rollouts.items()),
        columns={
            "token_ids_T": np.concatenate([ids for turn in turns for ids in (turn.prompt_ids, turn.completion_ids)]),
            "loss_mask_T": mask_T,
            "log_probabilities_T": log_probabilities_T,
            "advantages_T": np.where(mask_T, np.random.default_rng(5).standard_normal(len(mask_T)), 0).astype(
                np.float32
            ),
            "sample_offsets": np.cumsum([0, *map(len, masks)]).astype(np.int64),
        },
    )


def line_of(name: str, turn: Turn) -> str:
    counts = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(turn.completion_ids)}
    own = {"server": turn.server, "load": turn.load, "policy_version": turn.policy_version}
    return json.dumps({"rollout_id": name, "turns": [counts | own], "sampling_args": {"top_p": 1.0}}) + "\n"


async def test_a_layer_of_a_version_before_is_named(
    adapter_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(adapter_server.config.model)
    rollouts: dict[str, Turn] = {}

    def make(step: int) -> Batch:
        if step < STEPS:
            return make_batch(step)
        for index, weights in enumerate((broadcast(tmp_path, NEWEST), with_old_layer(tmp_path, base))):
            with ThreadPoolExecutor(1) as thread:  # in a loop of its own, since the trainer's link waits in this one
                turns = thread.submit(asyncio.run, sampled(adapter_server, weights)).result(300)
            rollouts.update({f"{group}-{index}": turn for group, turn in enumerate(turns)})
        return batch_of(rollouts)

    await record(tmp_path, base, {"keep_broadcasts": 9}, make, learning_rate=3e-3, lora=LORA)
    records = tmp_path / "run_default" / "rollouts" / f"step_{STEPS}" / "rollouts.jsonl"
    records.write_text("".join(line_of(name, turn) for name, turn in rollouts.items()))
    found, said = said_of(tmp_path, capsys)
    wrong = next(turn for name, turn in rollouts.items() if name.endswith("-1"))
    layer = f"layer 1 of the weights that sampled them was that of version {NEWEST - 1}, not {NEWEST}"
    assert found["fault"] is not None, said
    assert (found["fault"]["key"], found["fault"]["group"]) == ("load", f"{wrong.load} of server {wrong.server}"), said
    assert found["fault"]["explanation"] == layer, said
    assert found["adds_up"], said
