"""Rows that fail: the run whose samples raise has a fault, and what the others accumulate is what they would without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.rows import RankRows
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.step import finish
from tests.trainer.conftest import WINDOW, make_batch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.many_runs import ALONE, Bench, gradients

MARK = 77
"""A token that makes the row it is in fail."""


def mark(step: Contribution, sample: int) -> None:
    step.batch.token_ids_T[step.batch.sample_offsets[sample]] = MARK


def raise_in_forward(ids_T: Tensor, hidden: Tensor) -> None:
    raise ValueError("cannot be computed")


def raise_in_backward(ids_T: Tensor, hidden: Tensor) -> None:
    def raise_(gradient: Tensor) -> None:
        raise ValueError("cannot be differentiated")

    hidden.register_hook(raise_)


def lack_memory(ids_T: Tensor, hidden: Tensor) -> None:
    torch.empty(2**58)


def lack_memory_in_backward(ids_T: Tensor, hidden: Tensor) -> None:
    hidden.register_hook(lambda gradient: torch.empty(2**58))


@contextmanager
def failing(bench: Bench, when: Callable[[Tensor], bool], how: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Rows of which `when` says so fail half-way through the model: some of the layers have done their part."""
    ids: list[Tensor] = []

    def note(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids[:] = [keywords["input_ids"][0]]

    def fail(_: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        if when(ids[0]):
            how(ids[0], output)

    handles = [
        bench.model.register_forward_pre_hook(note, with_kwargs=True),
        bench.model.get_submodule("model.layers.1.mlp").register_forward_hook(fail),
    ]
    yield
    for handle in handles:
        handle.remove()


def holds_the_mark(ids_T: Tensor) -> bool:
    return bool((ids_T == MARK).any())


@pytest.mark.parametrize("how", [raise_in_forward, raise_in_backward, lack_memory, lack_memory_in_backward])
def test_what_one_runs_row_raises_is_its_fault_and_leaves_the_others_as_if_it_had_not_been_there(
    dense_directory: Path, how: Callable[[Tensor, Tensor], None]
) -> None:
    accumulated: list[list[dict[str, Tensor]]] = []
    metrics: list[list[dict[str, Any]]] = []
    for offender in (False, True):
        bench = Bench(dense_directory)
        rows = RankRows(64)
        steps = [bench.open(bench.admit(index), make_batch(index, run_id=f"run-{index}")) for index in range(3)]
        for step in steps:
            step.batch.token_ids_T[step.batch.token_ids_T == MARK] = 0
        one, bad, two = steps
        mark(bad, 2)
        with failing(bench, holds_the_mark, how):
            for samples in ([0, 1], [2], [3]):
                row = [(one, samples), (bad, samples), (two, samples)] if offender else [(one, samples), (two, samples)]
                rows.train(row, bench.train)
        accumulated.append([gradients(step.run) for step in (one, two)])
        metrics.append([finish([step], ALONE, step.run.scheduled()) for step in (one, two)])
        assert (one.fault, two.fault) == (None, None)
        if offender:
            before = {name: value.detach().clone() for name, value in bad.run.torch.optimizer.parameters.items()}
            with pytest.raises(InvalidBatch, match=r"step 1: .*(cannot be|does not fit into memory)"):
                finish([bad], ALONE, bad.run.scheduled())
            assert all(torch.equal(before[name], value) for name, value in bad.run.torch.optimizer.parameters.items())
            assert gradients(bad.run) == {}
            assert bad.run.torch.intact
    for expected, found in zip(*accumulated, strict=True):
        assert expected.keys() == found.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    for before_, after in zip(*metrics, strict=True):
        for name in before_.keys() - {"phase/train", "tokens_per_second"}:
            assert after[name] == pytest.approx(before_[name], rel=1e-5, abs=1e-7)


def is_longer(tokens: int, ids_T: Tensor) -> bool:
    return len(ids_T) > tokens


@pytest.mark.parametrize("how", [lack_memory, lack_memory_in_backward])
def test_a_row_that_does_not_fit_into_memory_is_trained_in_halves(
    dense_directory: Path, how: Callable[[Tensor, Tensor], None]
) -> None:
    results = []
    for fits in (1000, 20):
        bench, rows = Bench(dense_directory), RankRows(64)
        sizes: list[int] = []
        steps = [bench.open(bench.admit(index), make_batch(index, (9, 17, 5, 12))) for index in range(2)]

        def train(row: Any, bench: Bench = bench, sizes: list[int] = sizes) -> None:
            sizes.append(sum(step.length(sample) for step, samples in row for sample in samples))
            bench.train(row)

        with failing(bench, partial(is_longer, fits), how):
            for samples in ([0, 1], [2, 3]):
                rows.train([(step, samples) for step in steps], train)
        assert [step.fault for step in steps] == [None, None]
        if fits == 20:
            assert rows.max_tokens <= 20
            assert len([size for size in sizes if size > 20]) <= 3, "what has been found not to fit is tried no more"
        results.append([gradients(step.run) for step in steps])
    for expected, found in zip(*results, strict=True):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)


def test_a_run_that_lacks_memory_with_every_row_leaves_the_others_the_length_that_fitted(dense_directory: Path) -> None:
    bench, rows = Bench(dense_directory), RankRows(64)
    good, bad = (bench.open(bench.admit(index), make_batch(index, (9, 17, 5, 12))) for index in range(2))
    good.batch.token_ids_T[good.batch.token_ids_T == MARK] = 0
    bad.batch.token_ids_T[:] = MARK
    with failing(bench, holds_the_mark, lack_memory):
        rows.train([(good, [0, 1, 2, 3])], bench.train)
        rows.train([(bad, [0, 1, 2, 3])], bench.train)
    assert (good.fault is None, bad.fault is None) == (True, False)
    assert rows.max_tokens == 9 + 17 + 5 + 12


def test_a_lost_accelerator_ends_the_trainer(dense_directory: Path) -> None:
    """Since nothing that comes after it can succeed, it says nothing about any run."""
    bench = Bench(dense_directory)
    step = bench.open(bench.admit(0), make_batch())

    def lose(row: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(torch.AcceleratorError):
        RankRows(64).train([(step, [0])], lose)
    assert step.fault is None


def demanding(inputs: LossInputs) -> LossOutputs:
    """A loss that has memory for few tokens."""
    if len(inputs.advantages_P) > 12:
        torch.empty(2**58)
    loss = -inputs.advantages_P * inputs.trainer_log_probabilities_P
    return LossOutputs(loss, torch.zeros_like(loss, dtype=torch.bool))


def test_a_loss_that_lacks_memory_gets_fewer_tokens(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory, loss={"kind": f"{__name__}:demanding"})
    assert int(lone.train(make_batch(1))["tokens/trained"]) > 12
    with pytest.raises(InvalidBatch, match=r"step 2: .*40 tokens .*: RuntimeError"):
        lone.train(make_batch(2, (3, 40)))


def test_a_step_of_which_everything_is_trained_again_is_as_any_other(windowed_directory: Path, tmp_path: Path) -> None:
    """Its sums and its export, too."""
    lone = make_lone_run(tmp_path, windowed_directory, {"max_tokens": 18}, token_export=True)
    with pytest.raises(InvalidBatch, match=r"step 1: .*ValueError: .* 17 tokens"):
        lone.train(make_batch(1, (WINDOW, WINDOW + 1)))
    assert lone.run.progress.step == 0
    good = make_batch(1, (9, 16, 5, 12))
    metrics = lone.train(good)
    assert metrics["tokens/trained"] == int(good.loss_mask_T.sum())


def test_an_update_that_fails_leaves_weights_that_are_never_saved(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    lone.train(make_batch(1))
    monkeypatch.setattr(lone.run.torch.optimizer, "step", lambda *_: torch.empty(2**58))
    assert lone.run.torch.intact
    with pytest.raises(InvalidBatch, match=r"step 2 failed: RuntimeError: .*can't allocate memory"):
        lone.train(make_batch(2))
    assert not lone.run.torch.intact


# --- whatever fails, and wherever ---


@dataclass(eq=False)
class FakeRun:
    run_id: str


@dataclass(eq=False)
class FakeStep:
    """A step without a model: what it has accumulated is which samples were trained, and how often."""

    run: FakeRun
    lengths: list[int]
    unfit: set[int]
    """Samples that raise, whoever is beside them."""
    fault: str | None = None
    trained_rows: list[Sequence[int]] = field(default_factory=list)
    accumulated: list[int] = field(default_factory=list)
    batch: Any = field(default_factory=make_batch)

    def length(self, sample: int) -> int:
        return self.lengths[sample]

    def begin_anew(self) -> list[tuple[FakeStep, Sequence[int]]]:
        self.accumulated = []
        rows, self.trained_rows = self.trained_rows, []
        return [(self, row) for row in rows]


class BesideAnotherRank:
    """The passes of a rank that shares experts with one that has memory for few tokens; that one has no row itself."""

    shares_experts = True

    def __init__(self, fits: int) -> None:
        self.fits, self.lacked_memory = fits, False
        self.tokens = 0
        """The tokens of the current piece of this rank."""

    def holders(self, own: bool) -> list[int]:
        return [0] if own else []

    def begin(self) -> None: ...

    def end(self, failed: bool, lacked_memory: bool) -> bool:
        self.lacked_memory = self.tokens > self.fits
        return failed or self.lacked_memory


def test_a_rank_that_shares_experts_tries_less_where_another_lacks_memory() -> None:
    passes = BesideAnotherRank(20)
    rows, step = RankRows(60, cast(Any, passes)), FakeStep(FakeRun("a"), [10, 9, 14, 3, 19], set())

    def train(row: Any) -> None:
        passes.tokens = sum(step.length(sample) for step, samples in row for sample in samples)
        for each, samples in row:
            each.accumulated += samples

    rows.train(cast(Any, [(step, [0, 1, 2, 3, 4])]), train, cast(Any, [step]))
    assert sorted(step.accumulated) == [0, 1, 2, 3, 4]
    assert step.fault is None


_STEPS = st.lists(
    st.lists(st.integers(1, 30), min_size=1, max_size=8).flatmap(
        lambda lengths: st.builds(
            FakeStep,
            st.just(FakeRun("a")),
            st.just(lengths),
            st.sets(st.integers(0, len(lengths) - 1), max_size=2) | st.just(set()),
        )
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@given(steps=_STEPS, memory=st.integers(1, 100), cut=st.integers(1, 8), spoils=st.booleans())
def test_every_sample_counts_once_unless_its_run_has_a_fault(
    steps: list[FakeStep], memory: int, cut: int, spoils: bool
) -> None:
    """And a run has one exactly if a sample of its own fails alone."""
    rows = RankRows(60)

    def train(row: Any) -> None:
        if spoils:  # half of it was accumulated before it failed
            row[0][0].accumulated.append(row[0][1][0])
        if any(set(samples) & step.unfit for step, samples in row):
            raise ValueError("unfit")
        if sum(step.length(sample) for step, samples in row for sample in samples) > memory:
            raise torch.OutOfMemoryError("out of memory")
        for position, (step, samples) in enumerate(row):
            step.accumulated += samples[1:] if spoils and position == 0 else samples

    for start in range(0, max(len(step.lengths) for step in steps), cut):
        row = [(step, list(range(len(step.lengths)))[start : start + cut]) for step in steps]
        rows.train(cast(Any, [(step, samples) for step, samples in row if samples]), train)
    for step in steps:
        assert (step.fault is not None) == bool(step.unfit or max(step.lengths) > memory)
        if step.fault is None:
            assert sorted(step.accumulated) == list(range(len(step.lengths)))
