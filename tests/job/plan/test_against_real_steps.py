"""What is planned is what a real step of the trainer holds, at several shapes: within 10 %."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from counterpoint.job.plan.dry_run import moments_bytes, step_bytes
from counterpoint.job.plan.live_bytes import LiveBytes
from counterpoint.job.plan.trainer_memory import host_parts
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.model import attention, chunks
from counterpoint.trainer.model.context import ContextGroup, shared_rows
from counterpoint.trainer.model.head import token_outputs
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.recompute import checkpoint_layers
from counterpoint.transport.records import Batch, SampleInfo
from tests.trainer.lone_run import make_lone_run

pytestmark = pytest.mark.slow

TOKENS = 512
WORDS = 16_384
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    made = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**SHAPE, vocab_size=2048, num_hidden_layers=6, tie_word_embeddings=True)),
        "words": Qwen3ForCausalLM(
            Qwen3Config(**SHAPE, vocab_size=WORDS, num_hidden_layers=2, tie_word_embeddings=True)
        ),
        "mixture": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SHAPE,
                vocab_size=512,
                num_hidden_layers=4,
                moe_intermediate_size=64,
                num_experts=8,
                num_experts_per_tok=2,
                tie_word_embeddings=False,
            )
        ),
    }
    places = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, model in made.items():
        model.save_pretrained(places[name])
    return places


def two_rows(step: int) -> Batch:
    """Two samples, each as long as a row, all of whose tokens are trained."""
    tokens = 2 * TOKENS
    mask = np.ones(tokens, np.uint8)
    mask[[0, TOKENS]] = 0
    return Batch(
        run_id="default",
        step=step,
        samples=tuple(SampleInfo(f"{step}-{index}", "toy", step - 1, 1.0, 1.0) for index in range(2)),
        columns={
            "token_ids_T": np.arange(tokens, dtype=np.int32) % 500,
            "loss_mask_T": mask,
            "log_probabilities_T": np.where(mask, -6.0, 0).astype(np.float32),
            "advantages_T": np.where(mask, 1.0, 0).astype(np.float32),
            "sample_offsets": np.array([0, TOKENS, tokens], np.int64),
        },
    )


@pytest.mark.parametrize(
    ("kind", "training", "checkpointing"),
    [
        ("dense", {}, False),
        ("dense", {}, True),
        ("dense", {"lora": {"rank": 8}}, False),
        ("dense", {"lora": {"rank": 8}}, True),
        ("dense", {}, 4),
        ("dense", {"lora": {"rank": 8}}, 1),
        ("mixture", {"lora": {"rank": 8}}, 2),
        ("mixture", {}, False),
        ("mixture", {}, True),
        ("mixture", {"lora": {"rank": 8}}, False),
        ("mixture", {"lora": {"rank": 8}}, True),
        ("dense", {"value_head": {}}, True),
        ("dense", {"updates_per_step": 2}, True),
    ],
)
def test_a_real_step(
    models: dict[str, Path], tmp_path: Path, kind: str, training: dict[str, Any], checkpointing: bool | int
) -> None:
    config = TrainingConfig.model_validate(training)
    planned = step_bytes(models[kind], "float32", TOKENS, [config], checkpointing=checkpointing)
    moments = moments_bytes(planned.trained, config)
    expected = planned.weights + planned.adapters + planned.masters + moments + planned.gradients + planned.activations
    host = host_parts(models[kind], TrainerConfig(output_dir=tmp_path, model="", dtype="float32"), [config])
    expected += host.get("held copy", 0)
    trainer: dict[str, Any] = {"max_tokens": TOKENS, "activation_checkpointing": checkpointing, "router_replay": False}
    lone = make_lone_run(tmp_path, models[kind], trainer, **training)
    lone.train(two_rows(1))
    gc.collect()
    with LiveBytes("cpu") as live:
        live.note(lone.model.parameters())
        live.note(lone.model.buffers())
        live.note(lone.run.torch.optimizer.state().values())
        lone.train(two_rows(2))
    assert expected == pytest.approx(live.peak, rel=0.1)
    assert planned.activations > 0.02 * live.peak


@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.parametrize(("kind", "training", "checkpointing"), [("dense", {}, False), ("dense", {}, 4)])
def test_a_real_compiled_step(
    models: dict[str, Path], tmp_path: Path, kind: str, training: dict[str, Any], checkpointing: bool | int
) -> None:
    """Inductor's kernels allocate where no dispatch mode looks, so the CPU's allocator is asked."""
    config = TrainingConfig.model_validate(training)
    planned = step_bytes(models[kind], "float32", TOKENS, [config], checkpointing=checkpointing, compiled=True)
    eager = step_bytes(models[kind], "float32", TOKENS, [config], checkpointing=checkpointing)
    trainer: dict[str, Any] = {"max_tokens": TOKENS, "activation_checkpointing": checkpointing, "router_replay": False}
    torch._dynamo.reset()  # the plan's graphs are not the step's
    lone = make_lone_run(tmp_path, models[kind], trainer | {"compile": True}, **training)
    lone.train(two_rows(1))
    gc.collect()
    held = [*lone.model.parameters(), *lone.model.buffers(), *lone.run.torch.optimizer.state().values()]
    before = sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in held}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        lone.train(two_rows(2))
    peak = before + _most_allocated(profile.profiler.kineto_results.experimental_event_tree())
    moments = moments_bytes(planned.trained, config)
    others = planned.weights + planned.adapters + planned.masters + moments + planned.gradients
    assert 0.95 * peak < others + planned.activations < 1.1 * peak
    if not checkpointing:  # else a layer's gradients, which come at its end, may be the most
        assert planned.activations < eager.activations


def _most_allocated(events: Any) -> int:
    """The highest total that the allocator reports."""
    most, rest = 0, list(events)
    while rest:
        event = rest.pop()
        rest += event.children
        most = max(most, getattr(event.extra_fields, "total_allocated", 0))
    return most


def test_a_gpu_has_the_chunks_that_were_planned_for_it(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks of a small GPU and of a large one, whose logits are most of what its step holds."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * WORDS * 8)
    activations = []
    for tokens in (8, 256):
        memory = chunks.MEMORY_SHARE * 4 * WORDS * tokens
        planned = step_bytes(models["words"], "float32", TOKENS, [TrainingConfig()], checkpointing=True, memory=memory)
        monkeypatch.setattr(chunks, "device_memory", lambda _device, memory=memory: memory)
        model = load_model(models["words"], "float32", torch.device("cpu"))
        model.logits_scale = 1.0
        checkpoint_layers(model, None)
        with LiveBytes("cpu") as live:
            live.note(model.parameters())
            live.note(model.buffers())
            for length in (64, TOKENS):
                ids_T, positions_T = torch.zeros(length, dtype=torch.int64), torch.arange(length)
                outputs = token_outputs(model, ids_T, positions_T, [length], positions_T[:-1], ids_T[1:], 1.0)
                outputs.log_probabilities_P.sum().backward()
        assert planned.weights + planned.gradients + planned.activations == pytest.approx(live.peak, rel=0.1)
        activations.append(planned.activations)
    assert activations[1] > 1.3 * activations[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_row_that_two_ranks_share(
    models: dict[str, Path], checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the two; what it gathers has the right size and any values. A GPU's kernel needs no mask."""
    monkeypatch.setattr(attention, "causal_lower_right", lambda *_: None)
    planned = step_bytes(models["dense"], "float32", TOKENS, [TrainingConfig()], checkpointing=checkpointing, context=2)
    model = load_model(models["dense"], "float32", torch.device("cpu"))
    model.logits_scale = 1.0
    if checkpointing:
        checkpoint_layers(model, None)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        with LiveBytes("cpu") as live, shared_rows(model, ContextGroup(dist.group.WORLD, 1, 2)):
            live.note(model.parameters())
            live.note(model.buffers())
            for tokens in (64, 2 * TOKENS):
                ids_T, positions_T = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
                outputs = token_outputs(model, ids_T, positions_T, [tokens], positions_T[:-1], ids_T[1:], 1.0)
                outputs.log_probabilities_P.sum().backward()
    finally:
        dist.destroy_process_group()
    assert planned.weights + planned.gradients + planned.activations == pytest.approx(live.peak, rel=0.1)
    if not checkpointing:  # else the output layer is the peak
        alone = step_bytes(models["dense"], "float32", TOKENS, [TrainingConfig()], checkpointing=False)
        assert planned.activations > alone.activations
