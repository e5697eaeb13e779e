"""The program that measures on a GPU works on a CPU, each kind of row small; a row that fails does not end the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.config import JobConfig
from counterpoint.models import smollm2
from perf.gpu import adapters, jobs, servers
from perf.gpu.__main__ import Result, run_row, table
from perf.gpu.even_tokens import EvenTokens
from perf.gpu.profile import kind_of
from perf.gpu.rows import ROWS
from perf.gpu.steps import full, lora, operations, small
from perf.step_speed import SHAPES
from tests.support.job_processes import processes_of
from tests.support.jobs import shipped_line, trained_line, write_lines
from tests.support.polling import wait_until
from tests.support.rollouts import make_rollout, make_turn

SPANS = (("load", 0.5), ("probe", 0.0125))
PAUSES = ("0.0100", "0.0200", "0.3000")
WHOLE_JOBS = ("staleness", "mixture", "real", "files", "deltas", "sent")


@pytest.mark.slow
def test_a_row_gives_its_figures(tmp_path: Path) -> None:
    """Of the trainer alone. `trl` is in `test_step_speed.py`; the jobs and servers of the others are only checked here."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "perf.gpu", "profile-eager", "--device", "cpu", "--json", str(file)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1000, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(file.read_text())["rows"]
    assert (row["row"], row["error"]) == ("profile-eager", "")
    assert row["figures"]["products %"] > 0


def test_kernels_of_products_attention_and_copies_are_told_from_the_rest() -> None:
    names = [
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void flash::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<cutlass::bfloat16_t>>>(Params)",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(flash::Flash_fwd_params)",
        "Memcpy HtoD (Pinned -> Device)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int)",
    ]
    assert [kind_of(name) for name in names] == [
        "products",
        "products",
        "attention",
        "attention",
        "copies",
        "rest",
        "rest",
    ]


def no_adapter(*_: object, **named: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(0), torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize("name", WHOLE_JOBS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_job_of_a_row_is_valid(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[JobConfig] = []

    def end(job: dict[str, Any], *_: object) -> Path:
        given.append(JobConfig.model_validate(job))
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "write", lambda directory, _device, **_: directory)
    monkeypatch.setattr(jobs, "export_random", no_adapter)
    monkeypatch.setattr(jobs, "_run", end)
    monkeypatch.setattr(jobs, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGES", ())
    with pytest.raises(KeyboardInterrupt):
        ROWS[name].run(device, tmp_path)
    assert [job.trainer.device for job in given] == [device]


@pytest.mark.parametrize("name", ["vllm", "vllm-eager"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_server_of_a_row_is_valid(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def server(settings: dict[str, Any], _directory: Path) -> Iterator[str]:
        config = InferenceConfig.model_validate(settings)
        assert ("--enforce-eager" in config.extra_args) == (device == "cuda" and name == "vllm-eager")
        yield "http://nowhere"

    monkeypatch.setattr(servers, "write", lambda directory, _device: directory)
    monkeypatch.setattr(servers, "server", server)
    monkeypatch.setattr(servers, "_sample", lambda _url, _model, sequences, tokens: sequences * tokens)
    figures = ROWS[name].run(device, tmp_path)
    assert figures["sequences"] == (4 if device == "cpu" else 256)


def test_a_job_tells_how_versions_were_published_and_routing_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/inference/test_vllm_moe.py` shows that vLLM's log has such lines."""
    shipped = [shipped_line(step, float(step)) | {"wall_seconds": 1.5} for step in (1, 2)]
    more = {"phase/broadcast": 0.25, "tokens_per_second": 9.0}
    trained = [trained_line(step) | more | {"replayed_share": 0.5 * step} for step in (1, 2)]
    spans = [{"role": "inference", "name": name, "begin": 1.0, "end": 1.0 + end} for name, end in SPANS]
    write_lines(tmp_path / jobs.RUN / "metrics.jsonl", shipped)
    write_lines(tmp_path / jobs.RUN / "spans.jsonl", spans)
    write_lines(tmp_path / "trainer" / "metrics.jsonl", trained)
    lines = [f"Version {version} is loaded; requests were paused for {each} s" for version, each in enumerate(PAUSES)]
    (tmp_path / "inference_0.log").write_text("\n".join(lines))
    monkeypatch.setattr(jobs, "write", lambda directory, _device, **_: directory)
    monkeypatch.setattr(jobs, "_run", lambda *_: tmp_path)
    common = {"step s": 1.5, "tokens/s trained": 9, "lag max ms": 7.0}
    published = {"load s": 0.5, "pause ms": 20.0, "longest": 300.0, "proof ms": 12.5, "broadcast s": 0.25}
    assert ROWS["sent"].run("cpu", tmp_path) == common | published
    assert ROWS["mixture"].run("cpu", tmp_path) == common | {"mismatch KL": "1.5e-06", "replayed": 0.75}


def test_attention_alone_tells_the_rate_of_each_direction(tmp_path: Path) -> None:
    figures = ROWS["attention"].run("cpu", tmp_path)
    assert len(figures) == 2
    assert all(float(rate) > 0 for rate in figures.values())


@pytest.mark.slow
def test_a_trainer_alone_tells_its_rate_and_the_plan(tmp_path: Path) -> None:
    figures = ROWS["lora-16k"].run("cpu", tmp_path)
    assert min(float(figures[each]) for each in ("tokens a step", "tokens/s", "planned GB")) > 0


@pytest.mark.slow
def test_a_layer_tells_the_time_of_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "COUNTS", (1, 2))
    figures = ROWS["adapters"].run("cpu", tmp_path)
    assert all(0 < float(figures[f"host's with {count}"]) <= float(figures[f"ms with {count}"]) for count in (1, 2))


@pytest.mark.slow
def test_a_trainer_tells_the_time_and_the_memory_of_many_runs(tmp_path: Path) -> None:
    figures = ROWS["many-adapters"].run("cpu", tmp_path)
    assert all(
        float(figures[f"{name} {count}"]) > 0 for name in ("publications of", "a further run of") for count in (2, 4)
    )
    assert float(figures["step of 4 over one"]) > 0


def test_the_mismatch_is_told_by_the_age_of_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = [
        shipped_line(step, float(step)) | {"staleness/mean": 1 + step % 2, "wall_seconds": 1.0} for step in range(1, 6)
    ]
    trained = [
        trained_line(step) | {"mismatch_kl": 10.0 ** -(3 + step % 2) * step, "tokens_per_second": 9.0}
        for step in range(1, 6)
    ]
    write_lines(tmp_path / jobs.RUN / "metrics.jsonl", shipped)
    write_lines(tmp_path / "trainer" / "metrics.jsonl", trained)
    monkeypatch.setattr(jobs, "write", lambda directory, _device, **_: directory)
    monkeypatch.setattr(jobs, "export_random", no_adapter)
    monkeypatch.setattr(jobs, "_run", lambda *_: tmp_path)
    figures = ROWS["staleness"].run("cpu", tmp_path)
    assert figures["KL at 0 old"] == "3.0e-03 (2 steps)"
    assert figures["KL at 1 old"] == "3.0e-04 (3 steps)"


def test_the_real_models_job_tells_what_it_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job itself takes minutes on a CPU: `python -m perf.gpu real --device cpu`."""
    shipped = [shipped_line(step, time.time() + 100 * step) | {"wall_seconds": 1.0} for step in (2, 12, 14)]
    write_lines(tmp_path / jobs.RUN / "metrics.jsonl", shipped)
    write_lines(
        tmp_path / "trainer" / "metrics.jsonl",
        [trained_line(step) | {"tokens_per_second": 9.0} for step in (2, 12, 14)],
    )
    monkeypatch.setattr(jobs, "_run", lambda *_: tmp_path)
    monkeypatch.setattr(jobs, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGES", ())
    figures = ROWS["real"].run("cpu", tmp_path)
    assert (figures["first reward"], figures["last"]) == (0.1, 0.7)
    assert 1200 <= float(figures["to a reward of 0.5 s"]) < 1300
    assert figures["mismatch KL of the first step"] == "2.0e-06"


def test_a_real_model_that_is_not_installed_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGES", ("no_such_package",))
    figures = ROWS["real"].run("cpu", tmp_path)
    assert "counterpoint[smollm2]" in str(figures["not run"])


@pytest.mark.slow
def test_a_row_is_ended_at_its_deadline() -> None:
    result = run_row("full-16k", "cpu", 0.2)
    assert "deadline" in result.error
    assert not result.figures


@pytest.mark.slow
def test_a_row_ends_with_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf.gpu", "full-16k", "--device", "cpu", "--json", str(tmp_path / "gpu.json")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    repository = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=repository, env=environment, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(processes_of(tmp_path / "gpu-")), "the row's process")
        process.terminate()
        process.wait(300)
    wait_until(lambda: not processes_of(tmp_path), "the end of all that the program had started")
    assert process.returncode == 143
    assert not list(tmp_path.glob("gpu-*")), "what is in shared memory takes memory"


async def test_rewards_of_what_random_weights_write_differ() -> None:
    chosen = np.random.default_rng(0)
    environment = EvenTokens()
    written = [chosen.integers(0, 151_936, 16).tolist() for _ in range(8)]
    rewards = [
        await environment.score(environment.example(0), make_rollout(turns=[make_turn([1], each)])) for each in written
    ]
    assert len(set(rewards)) > 1


def test_the_table_names_what_failed() -> None:
    shown = table("a machine", [Result("a", 1.0, {"tokens/s": 1000}), Result("b", 2.0, {}, "first\nlast")])
    figures = list(shown.columns[2].cells)
    assert figures == ["tokens/s 1,000", "FAILED: last"]


def test_an_unknown_row_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "perf.gpu", "nothing", "--device", "cpu", "--json", str(file)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing" in done.stderr
    assert all(name in done.stderr for name in ROWS)
    assert not file.exists()


@pytest.mark.parametrize("adapter", [False, True])
def test_operations_are_those_that_torch_counts(adapter: bool) -> None:
    """Products with weights, in a forward and a backward pass. An adapter leaves out those for the weights' gradients."""
    settings = small(lora("0.6b", 4096, 1) if adapter else full(4096, 1))
    tokens, shape = settings.row_tokens, SHAPES["small"]
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=tokens)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if adapter:
        model.requires_grad_(False)
        model.model.embed_tokens.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64)).logits.sum().backward()
    counts = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    products = sum(count for kind, count in counts.items() if kind in ("aten.mm", "aten.addmm"))
    heads = shape["num_attention_heads"] * shape["head_dim"]
    attention = 3 * 2 * 2 * shape["num_hidden_layers"] * heads * tokens / 2
    assert products == tokens * (operations(settings) - attention)
