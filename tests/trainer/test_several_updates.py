"""A step of several updates is all or nothing, and concerns the run that asks for it alone."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from counterpoint.run.config import RunConfig
from counterpoint.run.trained import TrainingConfig
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.run.updates import ReferenceConfig
from counterpoint.trainer import learner
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.losses.load import TRIED_TOKENS
from counterpoint.trainer.model.context import ContextGroup
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.control_files import evict
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.updates.passes import Pass, plan_passes
from counterpoint.trainer.updates.reference import References
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.measure import measure_row
from counterpoint.trainer.work.step import finish, next_pass, train_row
from tests.trainer.conftest import VOCABULARY, make_batch, make_run_config
from tests.trainer.forked_ranks import launch
from tests.trainer.lone_run import LoneRun, make_lone_run
from tests.trainer.many_runs import ALONE, CPU, Bench, gradients
from tests.trainer.one_process_trainer import Death, life, saved_state, write_member
from tests.trainer.orchestrator_end import metrics_lines, write_run
from tests.trainer.ranked_updates import MAX_TOKENS, TRAINING, train

UPDATES: dict[str, Any] = {"updates_per_step": 4, "epochs": 2}


def policy_gradient(inputs: LossInputs) -> LossOutputs:
    """A plain one."""
    loss_P = -inputs.advantages_P * inputs.trainer_log_probabilities_P
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def failing_later(inputs: LossInputs) -> LossOutputs:
    """Is as above until the weights have moved away from those before the step; advantages above 5 tell how it fails then."""
    outputs = policy_gradient(inputs)
    old_P = inputs.old_log_probabilities_P
    if len(inputs.advantages_P) == TRIED_TOKENS or old_P is None:
        return outputs
    moved = not torch.equal(old_P, inputs.trainer_log_probabilities_P)
    if moved and bool((inputs.advantages_P > 7).any()):
        raise RuntimeError("it has moved")
    if moved and bool((inputs.advantages_P > 5).any()):
        return LossOutputs(outputs.loss_P * torch.nan, outputs.masked_P)
    return outputs


def state_of(lone: LoneRun) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in lone.run.torch.optimizer.state().items()}


def assert_equal(former: dict[str, Tensor], latter: dict[str, Tensor]) -> None:
    assert former.keys() == latter.keys()
    for name in former:
        assert torch.equal(former[name], latter[name]), name


def test_mini_batches_are_dealt_by_the_order_of_the_batch(tmp_path: Path) -> None:
    config = make_run_config(tmp_path, tmp_path, updates_per_step=6, epochs=2).training
    trained = {0: 5, 2: 1, 3: 4, 7: 2, 8: 3}
    dealt = [((0, 7), 7), ((2, 8), 4), ((3,), 4)]
    updates = [Pass(*each, first_epoch=first) for first in (True, False) for each in dealt]
    rollouts = [f"{index}-0" for index in range(9)]
    assert plan_passes(config, rollouts, trained, ()) == updates
    measured = [Pass(*each, measures=True) for each in dealt]
    assert plan_passes(config, rollouts, trained, ("old",)) == [*measured, *updates]
    assert plan_passes(config, rollouts, {4: 9}, ()) == [Pass((4,), 9), Pass((4,), 9, first_epoch=False)]
    assert plan_passes(config, rollouts, {}, ("old",)) == []
    with pytest.raises(ValueError, match=r"updates_per_step = 3 .*epochs = 2.*updates_per_step = 2"):
        make_run_config(tmp_path, tmp_path, updates_per_step=3, epochs=2)
    with pytest.raises(ValueError, match=r'updates_per_step = 2 with loss.kind = "reinforce"'):
        make_run_config(tmp_path, tmp_path, updates_per_step=2, loss={"kind": "reinforce"})


@given(
    players=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    dealt=st.integers(1, 6),
    untrained=st.sets(st.integers(0, 47)),
)
def test_every_update_has_its_share_of_every_players_samples(
    players: list[int], dealt: int, untrained: set[int]
) -> None:
    """Whatever number of samples each rollout has, in the batch one after the other."""
    owners = [(rollout, player) for rollout, count in enumerate(players) for player in range(count)]
    trained = {index: 1 for index in range(len(owners)) if index not in untrained}
    config = TrainingConfig(updates_per_step=dealt)
    found = [each.samples for each in plan_passes(config, [f"{rollout}-0" for rollout, _ in owners], trained, ())]
    assert sorted(sample for samples in found for sample in samples) == list(trained)
    assert len(found) == min(dealt, len(trained))
    assert not found or max(map(len, found)) - min(map(len, found)) <= 1
    if untrained.isdisjoint(range(len(owners))):
        for player in range(4):
            of_player = [sum(owners[sample][1] == player for sample in samples) for samples in found]
            assert max(of_player) - min(of_player) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("advantage", "reason"), [(6.0, "the loss of step 2 is not finite"), (8.0, "it has moved")])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_refusal_of_a_later_update_refuses_the_step(
    dense_directory: Path, tmp_path: Path, advantage: float, reason: str, lora: dict[str, int] | None
) -> None:
    training = {"loss": {"kind": f"{__name__}:failing_later"}, "lora": lora, **UPDATES}
    tried, never = (make_lone_run(tmp_path / name, dense_directory, **training) for name in ("tried", "never"))
    for lone in (tried, never):
        lone.train(make_batch(1))
    before = state_of(tried)
    bad = make_batch(2)
    bad.advantages_T[bad.loss_mask_T == 1] = advantage
    with pytest.raises(InvalidBatch, match=reason):
        tried.train(bad)
    assert_equal(state_of(tried), before)
    assert (tried.run.progress.step, tried.run.torch.intact, tried.run.torch.held) == (1, True, None)
    assert all(parameter.grad is None for parameter in tried.run.torch.optimizer.parameters.values())
    tried.learner.drop_step(0)
    for number in (2, 3):
        assert tried.train(make_batch(number))["loss"] == never.train(make_batch(number))["loss"]
    assert_equal(state_of(tried), state_of(never))


def test_a_refusal_of_the_first_step_of_all_leaves_the_optimizer_without_moments(
    dense_directory: Path, tmp_path: Path
) -> None:
    lone = make_lone_run(tmp_path, dense_directory, loss={"kind": f"{__name__}:failing_later"}, **UPDATES)
    before = state_of(lone)
    bad = make_batch(1)
    bad.advantages_T[bad.loss_mask_T == 1] = 6.0
    with pytest.raises(InvalidBatch, match="the loss of step 1 is not finite"):
        lone.train(bad)
    assert_equal(state_of(lone), before)
    assert all(name.startswith("master.") for name in lone.run.torch.optimizer.state())


def open_until_pass(lone: LoneRun, number: int, passes: int) -> Contribution:
    """A step whose first `passes` passes have ended; of the next one nothing is trained."""
    step = lone.learner.open_step(0, make_batch(number))
    for _ in range(passes):
        lone.learner.train_rows([[(0, step.samples)]])
        assert lone.learner.next_pass(0, lone.run.scheduled()) is step
    return step


_RATIOS: list[float] = []
"""Of each row of an update, the largest distance of a token's log-probability from that before the step, in nats."""


def recording(inputs: LossInputs) -> LossOutputs:
    """Is a plain loss, and notes how far a row's tokens are from what was measured of them."""
    if inputs.old_log_probabilities_P is not None and len(inputs.advantages_P) != TRIED_TOKENS:
        apart_P = (inputs.trainer_log_probabilities_P.detach() - inputs.old_log_probabilities_P).abs()
        _RATIOS.append(float(apart_P.max()))
    return policy_gradient(inputs)


@pytest.mark.slow
def test_rows_are_measured_as_they_are_trained_so_that_ratios_begin_at_1(dense_directory: Path, tmp_path: Path) -> None:
    """Bit for bit in bfloat16, also where samples share a prompt with others of their mini-batch; nothing moves the weights."""
    _RATIOS.clear()
    lone = make_lone_run(
        tmp_path,
        dense_directory,
        {"dtype": "bfloat16", "max_tokens": 100},
        loss={"kind": f"{__name__}:recording"},
        learning_rate=1e-30,
        value_head={},
        **UPDATES,
    )
    assert lone.learner.loaded.limits.shares_prompts
    batch = make_batch(1, lengths=(33, 25, 41, 30, 27, 38, 22, 35))
    for first in batch.sample_offsets[:-1]:
        batch.token_ids_T[first : first + 12] = batch.token_ids_T[:12]
        batch.loss_mask_T[first : first + 12] = 0
    assert lone.train(batch)["updates"] == 4
    assert len(_RATIOS) > 4
    assert max(_RATIOS) == 0.0


@pytest.mark.slow
def test_in_the_middle_of_a_step_the_run_is_saved_and_left_as_before_it(dense_directory: Path, tmp_path: Path) -> None:
    training: dict[str, Any] = {"lora": {"rank": 4}, "value_head": {}, **UPDATES}
    lone = make_lone_run(tmp_path, dense_directory, {"max_tokens": 64}, **training)
    lone.train(make_batch(1))
    before = state_of(lone)
    step = open_until_pass(lone, 2, passes=3)
    assert not step.current.measures
    assert not step.is_last_pass
    assert not torch.equal(state_of(lone)["master.value_head.weight"], before["master.value_head.weight"])
    checkpoint.write(checkpoint.take(lone.run), tmp_path, 2)
    saved = load_file(checkpoints_directory(tmp_path, "default") / "step_1" / "state.safetensors")
    assert_equal({name: value for name, value in saved.items() if not name.startswith("random.")}, before)
    lone.learner.drop_step(0)
    assert_equal(state_of(lone), before)
    again = make_lone_run(tmp_path, dense_directory, {"max_tokens": 64}, resume=True, **training)
    assert_equal(state_of(again), before)
    assert lone.train(make_batch(2))["loss"] == again.train(make_batch(2))["loss"]
    assert_equal(state_of(lone), state_of(again))


def test_one_update_a_step_has_the_optimizers_schedule_and_metrics_of_a_step(
    dense_directory: Path, tmp_path: Path
) -> None:
    lone = make_lone_run(
        tmp_path, dense_directory, {"max_tokens": 18}, steps=4, lr_schedule="linear", token_export=True, **UPDATES
    )
    rates = [lone.train(make_batch(number))["learning_rate"] for number in (1, 2)]
    assert rates == pytest.approx([1e-3, 0.75e-3])
    exported = (tmp_path / "trainer" / "tokens" / "default" / "step_1.rank_0.jsonl").read_bytes().splitlines()
    assert len(exported) == 4, "each sample once"
    empty = make_batch(3)
    empty.loss_mask_T[:] = 0
    before = state_of(lone)
    assert lone.train(empty)["grad_norm"] == 0.0
    assert_equal(state_of(lone), before)
    assert lone.train(make_batch(4, lengths=(9,)))["updates"] == 2, "one sample has one mini-batch"


def whole_step(bench: Bench, step: Contribution) -> None:
    """All passes of a step, alone."""
    while True:
        chosen = [(step, step.samples)]
        if step.current.measures:
            measure_row(bench.model, bench.replay, bench.limits, chosen)
        else:
            train_row(bench.model, bench.replay, bench.limits, chosen)
        if not next_pass(step, ALONE, step.run.scheduled()):
            finish([step], ALONE, step.run.scheduled())
            return


@pytest.mark.slow
def test_a_reference_concerns_its_own_run_alone(moe_directory: Path) -> None:
    """The base under the adapter: the bare model, over the samples of the run that asks for it, and no other's."""
    bench = Bench(moe_directory, max_tokens=256)
    asking, other = bench.admit(0, rank=4), bench.admit(1, rank=8)
    for number, run in enumerate((asking, other)):
        whole_step(bench, bench.open(run, make_batch(number + 1, routed=True)))
    assert (
        max(float(value.detach().abs().max()) for name, value in bench.parameters(0).items() if "lora_B" in name) > 1e-4
    )
    training = asking.config.training.model_copy(update={"reference": ReferenceConfig()})
    asking.config = asking.config.model_copy(update={"training": training})
    steps = [bench.open(run, make_batch(number, routed=True)) for number, run in ((3, asking), (4, other))]
    assert [step.current.measures for step in steps] == [True, False]
    seen: list[int] = []
    handle = bench.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    measure_row(bench.model, bench.replay, bench.limits, [(steps[0], steps[0].samples)])
    handle.remove()
    assert seen == [43], "one forward pass over its own tokens"
    batch = steps[0].batch
    for sample in steps[0].samples:
        span = slice(*batch.sample_offsets[sample : sample + 2])
        tokens = torch.from_numpy(batch.token_ids_T[span]).long()
        predicting = torch.arange(len(tokens) - 1)
        temperature = batch.samples[sample].temperature
        with torch.no_grad():
            bare, _ = log_probabilities(
                bench.model, tokens, torch.arange(len(tokens)), [len(tokens)], predicting, tokens[1:], temperature
            )
        found = steps[0].columns.of("reference", [sample])
        torch.testing.assert_close(found, bare[torch.from_numpy(batch.loss_mask_T[span][1:]).bool()], atol=1e-5, rtol=0)
    assert next_pass(steps[0], ALONE, steps[0].run.scheduled())
    train_row(bench.model, bench.replay, bench.limits, [(step, step.samples) for step in steps])
    beside = gradients(other)
    steps[1].begin_anew()
    train_row(bench.model, bench.replay, bench.limits, [(steps[1], steps[1].samples)])
    for name, gradient in gradients(other).items():
        torch.testing.assert_close(gradient, beside[name], atol=1e-7, rtol=1e-5)


def test_at_the_first_step_an_adapter_is_no_distance_from_its_base(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory, lora={"rank": 4}, reference={}, learning_rate=0.05)
    metrics = [lone.train(make_batch(number))["reference_kl"] for number in (1, 2)]
    assert abs(float(metrics[0])) < 1e-9 < 1e-8 < float(metrics[1])


def test_a_reference_is_loaded_once_and_has_the_same_vocabulary(dense_directory: Path, tmp_path: Path) -> None:
    references = References(str(dense_directory), "float32", ALONE, sharded=False)
    named = make_run_config(tmp_path, tmp_path, reference={"model": str(dense_directory)}, lora={}).training
    base = make_run_config(tmp_path, tmp_path, reference={}, lora={}).training
    given = make_run_config(tmp_path, tmp_path, reference={}).training
    assert references.open(0, base, VOCABULARY) is None
    model = references.open(1, named, VOCABULARY)
    assert model is not None
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert references.open(0, given, VOCABULARY) is model
    references.close(1)
    assert references.open(2, named, VOCABULARY) is model
    references.close(0)
    references.close(2)
    assert references.open(1, named, VOCABULARY) is not model
    references.close(1)
    with pytest.raises(ValueError, match=r"vocabulary of 96 tokens; expected 97"):
        references.open(1, named, VOCABULARY + 1)
    with pytest.raises(ValueError, match=r"there is no config.json in that directory"):
        references.open(1, make_run_config(tmp_path, tmp_path, reference={"model": tmp_path}).training, VOCABULARY)


@pytest.mark.slow
def test_the_reference_of_a_run_that_cannot_be_made_is_released_at_once(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(learner, "Optimizer", lack_memory)
    manager = MultiRunManager(tmp_path, 1)
    own = learner.Learner(TrainerConfig(output_dir=tmp_path, model=str(dense_directory), threads=1), ALONE, manager)
    write_run(make_run_config(tmp_path, dense_directory, reference={}))
    assert manager.discover_runs()
    own.synchronize()
    assert manager.registry.in_slot(0).failure == "MemoryError: "
    assert own._references.models == []


@pytest.mark.slow
def test_a_reference_leaves_the_memory_with_its_run(dense_directory: Path, tmp_path: Path) -> None:
    """Also where ranks share rows, and watch it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        everyone = dist.new_group()
        lone = make_lone_run(
            tmp_path,
            dense_directory,
            ranks=Ranks(0, 1, CPU, everyone, ContextGroup(everyone, 0, 1, everyone)),
            reference={"reward_coefficient": 0.1},
        )
        lone.train(make_batch(1))
        reference = weakref.ref(lone.run.torch.reference)
        assert reference() is not None
        lone.learner.manager.evict_run(0, "it is not wanted any more")
        lone.learner.manager.discover_runs()
        lone.learner.synchronize()
        gc.collect()
        assert reference() is None
    finally:
        dist.destroy_process_group()


def test_a_value_head_needs_rollouts_that_no_group_filters(tmp_path: Path) -> None:
    config = make_run_config(tmp_path, tmp_path, value_head={})
    assert type(config).model_validate(config.model_dump(exclude={"filters"})).filters == []
    filters = [{"kind": "zero_advantage", "mode": "monitor"}]
    assert type(config).model_validate(config.model_dump() | {"filters": filters})
    filters = [{"kind": "zero_advantage"}]
    with pytest.raises(ValueError, match=r"filters: zero_advantage .* remove that filter \(filters = \[\]"):
        type(config).model_validate(config.model_dump() | {"filters": filters})


@pytest.mark.parametrize(
    ("loss", "refused"), [("grpo", True), ("rloo", True), ("reinforce_plus_plus", False), ("importance_ratio", True)]
)
def test_a_group_of_one_is_not_compared_with_itself(tmp_path: Path, loss: str, refused: bool) -> None:
    """Its rollout would always be filtered, and another drawn in its place, for ever."""
    values = make_run_config(tmp_path, tmp_path).model_dump(exclude={"filters", "advantage", "training"})
    values |= {"training": {"loss": {"kind": loss}}, "schedule": {"group_size": 1}}
    with pytest.raises(ValueError, match="group_size = 1: ") if refused else nullcontext():
        RunConfig.model_validate(values)
    RunConfig.model_validate(values | {"filters": []})


class Kills:
    """Kills the trainer before the one of its rows, updates and measurements that is due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.due: int | None = None
        for name in ("train_row", "measure_row", "next_pass", "finish"):
            monkeypatch.setattr(learner, name, self._watched(name, getattr(learner, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            self.seen.append(name)
            if len(self.seen) - 1 == self.due:
                raise Death
            return real(*arguments)

        return operation


@pytest.mark.slow
def test_a_kill_in_any_pass_repeats_the_whole_step(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another run beside it, whose steps are of one update."""
    steps = {"plain": 3, "several": 2}
    training: dict[str, Any] = {"reference": {"reward_coefficient": 0.1}, "value_head": {}, "checkpoint_interval": 1}
    training |= {"optimizer": "sgd", "momentum": 0.9}
    kills = Kills(monkeypatch)

    def live(job: Path) -> None:
        with life(job, dense_directory, dict(steps), max_tokens=24, keep_checkpoints=9) as one:
            one.until_step(**steps)
            one.turn()

    def prepare(name: str) -> Path:
        job = tmp_path / name
        job.mkdir()
        write_member(job, dense_directory, "plain", steps["plain"], checkpoint_interval=1)
        write_member(job, dense_directory, "several", steps["several"], **training, **UPDATES)
        return job

    live(prepare("whole"))
    moments = len(kills.seen)
    assert {"train_row", "measure_row", "next_pass", "finish"} == set(kills.seen)
    assert kills.seen.count("next_pass") == 2 * 5
    expected = {run: saved_state(tmp_path / "whole", run, step) for run, step in steps.items()}
    for due in range(2, moments, max(1, moments // 4)):
        job = prepare(f"killed-{due}")
        kills.seen, kills.due = [], due
        with pytest.raises(Death):
            live(job)
        kills.due = None
        live(job)
        for run, step in steps.items():
            lines = [line["step"] for line in metrics_lines(job) if line["run_id"] == run]
            assert lines == list(range(1, step + 1))
            found = saved_state(job, run, step)
            for name, tensor in expected[run].items():
                torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_eviction_in_the_middle_of_a_step_saves_the_last_whole_one(dense_directory: Path, tmp_path: Path) -> None:
    write_member(tmp_path, dense_directory, "several", 4, checkpoint_interval=9, **UPDATES)
    with life(tmp_path, dense_directory, {"several": 3}, max_tokens=24) as one:
        one.until_step(several=2)
        before = {name: tensor.clone() for name, tensor in one.run("several").torch.optimizer.state().items()}
        one.turn_until(lambda: one.run("several").torch.held is not None, "the middle of step 3")
        changed = one.run("several").torch.optimizer.state()
        assert not all(torch.equal(before[name], changed[name]) for name in before)
        evict(tmp_path, "several", "by hand")
        one.turn_until(lambda: one.step_of("several") == -1, "its leaving")
        one.turn()
    assert_equal(saved_state(tmp_path, "several", 2), before)


@pytest.mark.slow
def test_two_ranks_measure_update_and_refuse_as_one(dense_directory: Path, tmp_path: Path) -> None:
    launch(2, tmp_path, str(dense_directory), module="tests.trainer.ranked_updates")
    lone = make_lone_run(tmp_path / "alone", dense_directory, {"max_tokens": MAX_TOKENS}, **TRAINING)
    for expected, found in zip(train(lone), json.loads((tmp_path / "metrics.json").read_text()), strict=True):
        for name in ("loss", "grad_norm", "reference_kl", "loss/guess", "tokens/trained", "updates"):
            assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    first, second = (load_file(tmp_path / f"rank_{rank}.safetensors") for rank in (0, 1))
    assert_equal(first, second)
    for name, tensor in state_of(lone).items():
        torch.testing.assert_close(first[name], tensor, atol=1e-5, rtol=0)
