"""Compiled layers compute what the others do, of rows of any number of samples, by few graphs."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.fx import GraphModule

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.compiled import compile_layers
from counterpoint.trainer.model.compiler import Compilations, Fallback, compilations, keep_to_own_cache
from counterpoint.trainer.model.head import compile_head, prove_head
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.model.recompute import checkpoint_layers
from counterpoint.trainer.model.sharding import differentiate_inputs
from tests.trainer.compiled_learner import TRACED, WAYS
from tests.trainer.conftest import VOCABULARY, make_batch
from tests.trainer.forked_ranks import launch
from tests.trainer.lone_run import LoneRun, make_lone_run
from tests.trainer.test_sharding import assert_close

STEPS = 20

HEAD_GRAPHS = 3
"""Those of the output layer: forward, and backward with and without a gradient of the entropies."""

GRAPHS = 8 + HEAD_GRAPHS
"""More than a layer has, with those; far below one for each of the rows."""

ADAPTED_GRAPHS = 16 + HEAD_GRAPHS
"""The same, of layers that are cut at seven adapters each."""

TIMES = {"tokens_per_second", "phase/train"}


@pytest.fixture
def _anew() -> Iterator[None]:
    """Compiles in this process, without what other tests have compiled, and leaves them nothing that could not be."""
    torch._dynamo.reset()
    counters.clear()
    with inductor.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def assert_same_steps(compiled: LoneRun, plain: LoneRun, routed: bool) -> None:
    late = compilations.late
    for step in range(1, STEPS + 1):
        lengths = tuple(5 + (step * 7 + sample * 3) % 17 for sample in range(2 + step % 5))
        lines = [lone.train(make_batch(step, lengths, routed=routed)) for lone in (compiled, plain)]
        found, expected = ({name: line[name] for name in line.keys() - TIMES} for line in lines)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    weights = compiled.weights()
    for name, weight in plain.weights().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
    assert compilations.late == late, "every graph was there before the first step"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by a C++ compiler")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_twenty_steps_are_those_of_layers_as_they_are(
    dense_directory: Path,
    moe_directory: Path,
    tmp_path: Path,
    checkpointing: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The models are a dense one, and a mixture with recorded routing whose layers are computed again in the backward pass.

    Its code is compiled by the ranks of `compiled_learner.py`."""
    if checkpointing:
        monkeypatch.setattr(torch, "compile", TRACED)
    model = moe_directory if checkpointing else dense_directory
    trainer: dict[str, Any] = {"max_tokens": 48, "activation_checkpointing": checkpointing}
    plain = make_lone_run(tmp_path / "plain", model, trainer, learning_rate=1e-4)
    with caplog.at_level(logging.INFO):
        compiled = make_lone_run(tmp_path / "compiled", model, trainer | {"compile": True}, learning_rate=1e-4)
    assert "2 layers of" in caplog.text
    assert_same_steps(compiled, plain, routed=checkpointing)
    assert 0 < counters["stats"]["unique_graphs"] <= GRAPHS


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by a C++ compiler")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_twenty_steps_of_an_adapter_are_those_of_layers_as_they_are(
    dense_directory: Path,
    moe_directory: Path,
    tmp_path: Path,
    checkpointing: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between adapters a mixture has the code of a dense model: it is compiled once."""
    if checkpointing:
        monkeypatch.setattr(torch, "compile", TRACED)
    model = moe_directory if checkpointing else dense_directory
    trainer: dict[str, Any] = {"max_tokens": 48, "activation_checkpointing": checkpointing}
    training: dict[str, Any] = {"learning_rate": 1e-2, "lora": {"rank": 4}, "optimizer": "sgd"}
    plain = make_lone_run(tmp_path / "plain", model, trainer, **training)
    with caplog.at_level(logging.INFO):
        compiled = make_lone_run(tmp_path / "compiled", model, trainer | {"compile": True}, **training)
    assert "2 layers of" in caplog.text
    assert_same_steps(compiled, plain, routed=checkpointing)
    assert 0 < counters["stats"]["unique_graphs"] <= ADAPTED_GRAPHS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_rows_of_any_runs_take_the_same_graphs(dense_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", TRACED)
    plain, compiled = (_with_three_adapters(dense_directory) for _ in range(2))
    compile_layers(compiled)
    graphs = counters["stats"]["unique_graphs"]
    for spans in ([(0, 9)], [(0, 5), (1, 7)], [(0, 4), (1, 6), (2, 5)], [(2, 30)]):
        (found, own), (expected, wanted) = (_row_of(model, spans) for model in (compiled, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
    assert 0 < counters["stats"]["unique_graphs"] == graphs <= ADAPTED_GRAPHS


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "adapters", "checkpointing"])
@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_no_row_is_compiled_for_whatever_its_length(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Rows with gradients, and those without, as the probe's and a reference's. 16 is a size of the layers; 2 is one token."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    adapted = way == "adapters"
    model = (
        _with_three_adapters(dense_directory)
        if adapted
        else load_model(dense_directory, "float32", torch.device("cpu"))
    )
    if way == "checkpointing":
        checkpoint_layers(model, None)
    prove_head(model)
    compilations.watch()
    late = compilations.late
    compile_head(model)
    compile_layers(model)
    assert counters["stats"]["unique_graphs"] <= (ADAPTED_GRAPHS if adapted else GRAPHS)
    for length in (24, 6000, 16, 3, 2):
        samples = [length - length // 2, length // 2] if length > 16 else [length]
        spans = list(enumerate(samples))
        with torch.no_grad():
            _values_of(model, spans, adapted)
        values_P, entropies_P = _values_of(model, spans, adapted)
        (values_P + entropies_P).sum().backward()
    assert compilations.late == late


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by a C++ compiler")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_a_pass_without_gradients_gives_the_bits_of_training(dense_directory: Path, adapted: bool) -> None:
    """The first of several updates of a step then has ratios of 1. Layers that are not compiled round otherwise in bfloat16.

    A layer is cut at one adapter, which is a fraction of the time of seven."""
    model = (
        _with_three_adapters(dense_directory, "bfloat16", target_modules=["down_proj"])
        if adapted
        else load_model(dense_directory, "bfloat16", torch.device("cpu"))
    )
    spans = [(0, 40), (1, 30)]
    with torch.no_grad():
        plain_P, _ = _values_of(model, spans, adapted)
    compile_layers(model)
    with torch.no_grad():
        measured_P, _ = _values_of(model, spans, adapted)
    trained_P, _ = _values_of(model, spans, adapted)
    assert (trained_P.requires_grad, measured_P.requires_grad) == (True, False)
    assert torch.equal(measured_P, trained_P.detach())
    assert not torch.equal(measured_P, plain_P)


@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_a_graph_for_a_row_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    seen = Compilations()
    seen.watch()
    try:
        function = torch.compile(lambda tensor: tensor + 1, backend="eager", dynamic=False)
        with seen.due():
            function(torch.ones(4))
        assert (seen.late, "for a row" in caplog.text) == (0, False)
        function(torch.ones(5))
        assert (seen.late, "for a row" in caplog.text) == (1, True)
    finally:
        callback_handler.remove_start_callback(seen._begins)
    assert inductor.triton.mix_order_reduction_non_strict_mode, "graphs would check the length of a row"


def _with_three_adapters(directory: Path, dtype: str = "float32", **lora: Any) -> Any:
    model, generator = load_model(directory, dtype, torch.device("cpu")), torch.Generator().manual_seed(0)
    for layer in apply_lora_to_model(model, 3, LoraConfig(rank=4, **lora)).values():
        for slot in range(3):
            layer.admit(slot, 4, 8.0, generator)
            for parameter in layer.adapter_parameters(slot).values():
                parameter.data.normal_(std=0.1, generator=generator)
    differentiate_inputs(model)
    return model


def _row_of(model: Any, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of a row with a sample of each run, and the gradients of the adapters."""
    values_P, _ = _values_of(model, spans, adapted=True)
    layers = [module for module in model.modules() if isinstance(module, MultiLora)]
    own = [each for layer in layers for slot, _ in spans for each in layer.adapter_parameters(slot).values()]
    return values_P.detach(), list(torch.autograd.grad(values_P.sum(), own))


def _values_of(model: Any, spans: list[tuple[int, int]], adapted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, with gradient, of a row with a sample of each slot and length."""
    lengths = [length for _, length in spans]
    tokens_T = torch.arange(sum(lengths)) * 7 % VOCABULARY
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    every = torch.arange(len(tokens_T) - 1)
    with adapter_spans(model, spans) if adapted else nullcontext():
        return log_probabilities(
            model, tokens_T, positions_T, lengths, every, tokens_T[1:], 1.0, entropy_gradient=len(spans) > 1
        )


@pytest.mark.slow
def test_layers_that_cannot_be_compiled_stay_as_they_are(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    plain = make_lone_run(tmp_path / "plain", dense_directory, {})
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    lone = make_lone_run(tmp_path / "compiled", dense_directory, {"compile": True})
    assert "are not compiled: RuntimeError: no C++ compiler" in caplog.text
    assert_same_steps(lone, plain, routed=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_compiled_layers_may_be_off_by_rounding_alone(
    moe_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str, factor: float
) -> None:
    """A compiler that is wrong by 10 % is wrong by 0.15 nats."""
    model = load_model(moe_directory, dtype, torch.device("cpu"))

    def other(forward: Any, **_: Any) -> Any:
        return lambda *given, **more: factor * forward(*given, **more)

    monkeypatch.setattr(torch, "compile", other)
    with caplog.at_level(logging.INFO):
        compile_layers(model)
    assert ("2 layers of" in caplog.text) == (factor == 1)
    assert ("log-probabilities differ by" in caplog.text) == (factor != 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by a C++ compiler")
@pytest.mark.parametrize("refused", [False, True])
def test_ranks_that_work_together_train_as_one_with_layers_as_they_are(
    dense_directory: Path, moe_directory: Path, tmp_path: Path, refused: bool
) -> None:
    """Compiled on all: of divided weights, divided experts, shared rows; and where one cannot compile, on none."""
    launch(
        2,
        tmp_path,
        dense_directory,
        moe_directory,
        *["refused"] * refused,
        module="tests.trainer.compiled_learner",
        seconds=900.0,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    expected = "another rank has failed, as its log says" if refused else "are compiled"
    trained = [(way, name) for way, (_, names) in WAYS[refused].items() for name in names]
    assert [expected in report for report in found["reports"]] == [True] * len(trained), found["reports"]
    assert ("are not compiled: RuntimeError: no C++ compiler" in (tmp_path / "log_2").read_text()) == refused
    for way, (_, names) in WAYS[refused].items():
        assert refused or 0 < found["graphs"][way] <= GRAPHS * len(names), "far below one for each of the rows"
    for way, name in trained:
        assert_close(found[way][name], found["plain"][name], ["one"])


@pytest.mark.parametrize(
    ("mode", "linked", "stays"), [(0o755, False, True), (0o777, False, False), (0o777, True, False)]
)
def test_what_others_may_write_is_not_run_as_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, linked: bool, stays: bool
) -> None:
    """The default directory is one that any user of the machine can make first."""
    cache, place = tmp_path / "cache", tmp_path / "link"
    cache.mkdir()
    cache.chmod(mode)
    place.symlink_to(cache)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given := str(place if linked else cache))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keep_to_own_cache()
    found = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert (found == given) == stays
    assert stays or Path(found).stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
@pytest.mark.usefixtures("_anew")
def test_a_graph_that_cannot_be_compiled_for_a_row_does_not_fail_its_run(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when torch knows of a size that it has to be compiled for again, and the disk is full."""
    refused: list[GraphModule] = []

    def backend(graph: GraphModule, _: list[Any]) -> Any:
        if full:
            refused.append(graph)
            raise OSError(errno.ENOSPC, "No space left on device")
        return graph.forward

    training: dict[str, Any] = {"lora": {"rank": 4, "target_modules": ["q_proj"]}}
    plain = make_lone_run(tmp_path / "plain", dense_directory, {}, **training)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    full = False
    compiled = make_lone_run(tmp_path / "compiled", dense_directory, {"compile": True}, **training)
    assert counters["stats"]["unique_graphs"] > 0
    full = True
    torch._dynamo.reset()
    found, expected = (lone.train(make_batch(1)) for lone in (compiled, plain))
    assert refused
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)


def test_a_graph_that_cannot_be_compiled_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    """It falls back in any thread, since a GPU's backward pass has its own. Other errors are those of the row."""
    tried: list[int] = []

    def compiled(value: int) -> int:
        tried.append(value)
        if value == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if value > 1:
            raise TorchDynamoException("No space left on device")
        return value

    function = Fallback(compiled, lambda value: value)
    with pytest.raises(torch.OutOfMemoryError):
        function(0)
    assert [function(value) for value in (1, 2, 3)] == [1, 2, 3]
    assert tried == [0, 1, 2]
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
