"""A driven run has the weights of an orchestrated one with the same batches, bit for bit; also after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from counterpoint.run.items import AdamW, Given, Objective, Sgd, UpdateValues
from counterpoint.run.requests import CopyRequest, read_answer, write_request
from counterpoint.run.trained import TrainedRun
from counterpoint.trainer import broadcast as broadcast_module
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.driven import LocalRun, drive
from counterpoint.trainer.optimizer import check_values
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.updates.columns import Columns
from counterpoint.trainer.work.sources import Item
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.records import Batch
from tests.support.polling import wait_until
from tests.trainer.conftest import VOCABULARY, make_batch
from tests.trainer.forked_ranks import launch
from tests.trainer.one_process_trainer import broadcast, life, write_member
from tests.trainer.orchestrator_end import processes

pytestmark = pytest.mark.slow

STEPS = 3
WEIGHTS = "adapter_model.safetensors"
MEMBER = Objective(returns=True)
"""The configured loss, with results."""


def described(**training: object) -> TrainedRun:
    """The run of `write_member`, without an end."""
    lora = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}
    table = {"lora": lora, "learning_rate": 1e-3, **training}
    return TrainedRun.model_validate({"run_id": "one", "training": table})


def configured(directory: Path, model: Path, *, resume: bool = False) -> TrainerConfig:
    return TrainerConfig(output_dir=directory, model=str(model), threads=1, max_tokens=64, device="cpu", resume=resume)


def train(driven: LocalRun, step: int) -> None:
    """The step of an orchestrated run."""
    driven.contribute(make_batch(step, run_id="one"))
    driven.update()
    assert driven.step == step


def items() -> list[Item]:
    """What is asked for of a run of `STEPS` steps: each update is published, and the first is saved."""
    asked: list[Item] = []
    for step in range(1, STEPS + 1):
        asked += [Item(make_batch(step)), Item(updates=True), Item(publication=f"after-{step}")]
        asked += [Item(saves="newest")] if step == 1 else []
    return asked


def ask(driven: LocalRun, up_to: int | None = None) -> None:
    """Asks for the items from the first on."""
    for number, item in enumerate(items()[:up_to], 1):
        driven.ask(item, number).result(0)


CONTRIBUTED = 5
"""The number of the item that is the second step's contribution."""


def published(directory: Path, name: str) -> dict[str, Tensor]:
    return load_file(directory / "run_one" / "published" / name / WEIGHTS)


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def orchestrated(dense_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that an orchestrator has had trained."""
    directory = tmp_path_factory.mktemp("orchestrated")
    write_member(directory, dense_directory, "one", STEPS)
    with life(directory, dense_directory, {"one": STEPS}) as one:
        one.until_step(one=STEPS)
    return directory


def test_weights_are_those_of_an_orchestrated_run(dense_directory: Path, tmp_path: Path, orchestrated: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        driven.publish("begin")
        for step in range(1, STEPS + 1):
            train(driven, step)
            driven.publish(f"after-{step}")
    check_equal(published(tmp_path, "begin"), broadcast(orchestrated, "one", 0))
    for step in range(1, STEPS + 1):
        check_equal(published(tmp_path, f"after-{step}"), broadcast(orchestrated, "one", step))


def test_weights_on_two_ranks_are_those_of_an_orchestrated_run_there(dense_directory: Path, tmp_path: Path) -> None:
    for kind in ("orchestrated", "driven"):
        (tmp_path / kind).mkdir()
        launch(2, tmp_path / kind, str(dense_directory), kind, module="tests.trainer.driven_ranks")
    check_equal(published(tmp_path / "driven", "last"), broadcast(tmp_path / "orchestrated", "one", STEPS))
    (tmp_path / "killed").mkdir()
    with pytest.raises(AssertionError):
        launch(2, tmp_path / "killed", str(dense_directory), "killed", module="tests.trainer.driven_ranks")
    assert (tmp_path / "killed" / "contributed").exists()
    launch(2, tmp_path / "killed", str(dense_directory), "resumed", module="tests.trainer.driven_ranks")
    for step in range(1, STEPS + 1):
        found = published(tmp_path / "killed", f"after-{step}")
        check_equal(found, broadcast(tmp_path / "orchestrated", "one", step))


def contribute_and_wait(directory: Path, model: Path) -> None:
    """Until it is killed: after a saved step, a contribution without its update."""
    with drive(configured(directory, model), described()) as driven:
        assert driven is not None
        ask(driven, CONTRIBUTED)
        (directory / "contributed").touch()
        signal.pause()


def test_a_kill_between_contribution_and_update_changes_no_weight(
    dense_directory: Path, tmp_path: Path, orchestrated: Path
) -> None:
    process = processes.Process(target=contribute_and_wait, args=(tmp_path, dense_directory))
    process.start()
    try:
        wait_until(lambda: (tmp_path / "contributed").exists() or not process.is_alive(), "the contribution")
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    with drive(configured(tmp_path, dense_directory, resume=True), described()) as driven:
        assert driven is not None
        assert (driven.step, driven.item) == (1, 2), "what was saved"
        ask(driven)
        assert driven.item == len(items())
    for step in range(1, STEPS + 1):
        check_equal(published(tmp_path, f"after-{step}"), broadcast(orchestrated, "one", step))


def test_a_resumed_run_has_no_contribution(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        ask(driven, CONTRIBUTED)
    with drive(configured(tmp_path, dense_directory, resume=True), described()) as driven:
        assert driven is not None
        with pytest.raises(ValueError, match="no contribution since update 1"):
            driven.update()


def test_items_are_carried_out_in_the_order_of_their_numbers(
    dense_directory: Path, tmp_path: Path, orchestrated: Path
) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        asked = list(enumerate(items(), 1))
        answers = {number: driven.ask(item, number) for number, item in reversed(asked[1:])}
        assert not any(answer.done() for answer in answers.values())
        assert driven.item == 0
        answers[1] = driven.ask(asked[0][1], 1)
        assert all(answers[number].result(0) is not None for number, _ in asked)
        again = driven.ask(items()[0], 1)
        assert again.result(0) is None, "it was carried out"
        assert driven.step == STEPS
    check_equal(published(tmp_path, f"after-{STEPS}"), broadcast(orchestrated, "one", STEPS))


def test_items_are_not_carried_out_on_top_of_updates_that_have_no_numbers(
    dense_directory: Path, tmp_path: Path
) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        ask(driven, up_to=4)
    (file,) = (tmp_path / "trainer").glob("**/step_1/state.json")
    state = json.loads(file.read_text())
    del state["progress"]["item"]  # as an orchestrator leaves it
    file.write_text(json.dumps(state))
    with drive(configured(tmp_path, dense_directory, resume=True), described()) as driven:
        assert driven is not None
        assert (driven.step, driven.item) == (1, 0)
        with pytest.raises(ValueError, match="another output_dir"):
            ask(driven)
        train(driven, 2)
        assert driven.item == 2
        driven.ask(Item(saves="newest"), 3).result(0)
    with drive(configured(tmp_path, dense_directory, resume=True), described()) as driven:
        assert driven is not None
        assert (driven.step, driven.item) == (2, 2)
        assert driven.ask(Item(updates=True), 2).result(0) is None


def test_publications_are_apart_from_updates_and_saves(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        train(driven, 1)
        assert driven.save() == 1, "without a publication"
        driven.contribute(make_batch(2))
        first, second = driven.publish("first"), driven.publish("second")
        check_equal(published(tmp_path, "first"), published(tmp_path, "second"))
        assert (first / "probe.json").read_bytes() == (second / "probe.json").read_bytes()
        driven.update(AdamW(0.1))
        driven.publish("second")
        assert any(
            not torch.equal(published(tmp_path, "second")[name], each)
            for name, each in published(tmp_path, "first").items()
        )
        driven.release("first")
        driven.release("first")
        assert not first.exists()
        for name in ("", "../escape", "a/b", ".hidden"):
            with pytest.raises(ValueError, match="name"):
                driven.publish(name)
    assert published_steps(tmp_path / "trainer" / "one" / "checkpoints") == [1]
    assert published_steps(tmp_path / "run_one" / "broadcast") == []
    with pytest.raises(ValueError, match="resume"), drive(configured(tmp_path, dense_directory), described()):
        pass
    with drive(configured(tmp_path, dense_directory, resume=True), described()) as again:
        assert again is not None
        assert again.step == 1, "the second update was not saved"


@pytest.mark.parametrize("cut", ["_prove", "_directories_of", "symlink_to", "replace", "remove_directory"])
def test_a_name_never_lacks_whole_weights(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """However far its next publication has come at a kill: it has the former weights or the new ones."""

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    at = {"symlink_to": Path, "replace": Path, "remove_directory": broadcast_module}.get(cut, Broadcaster)
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        place = driven.publish("name")
        driven.publish("name.1")
        train(driven, 1)
        former, new = published(tmp_path, "name"), driven.publish("other")
        with monkeypatch.context() as patched:
            patched.setattr(at, cut, kill)
            with pytest.raises(KeyboardInterrupt):
                driven.publish("name")
        assert (place / "STABLE").is_file()
        assert (place / "probe.json").is_file()
        check_equal(published(tmp_path, "name"), load_file(new / WEIGHTS) if cut == "remove_directory" else former)
        driven.publish("name")
        check_equal(published(tmp_path, "name"), load_file(new / WEIGHTS))
        assert len(list(place.parent.iterdir())) == 6, "a link and a directory of each name, whatever was left of it"
        driven.release("name")
        check_equal(published(tmp_path, "name.1"), former)
        assert len(list(place.parent.iterdir())) == 4


def test_weights_elsewhere_are_not_removed_by_a_link_in_their_place(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        driven.publish("kept")
        for link in (".name.7", "name"):
            (tmp_path / "run_one" / "published" / link).symlink_to(tmp_path / "run_one" / "published" / "kept")
        driven.publish("name")
        driven.release("name")
        assert (tmp_path / "run_one" / "published" / "kept" / "STABLE").is_file()


@pytest.mark.parametrize(
    "values",
    [
        AdamW(float("nan")), AdamW(-1.0), AdamW(float("inf")), AdamW(1.0, clip=0.0), AdamW(1.0, eps=0.0),
        AdamW(1.0, clip=float("nan")), AdamW(1.0, betas=(0.9, 1.0)), AdamW(1.0, decay=float("nan")), Sgd(1.0, momentum=1.0),
    ],
)  # fmt: skip
def test_values_that_break_weights_are_refused(values: UpdateValues) -> None:
    with pytest.raises(ValueError, match=type(values).__name__):
        check_values(values)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loss_mask_T", lambda mask_T: mask_T * 2),
        ("loss_mask_T", lambda mask_T: mask_T.astype(np.int64)),
        ("advantages_T", lambda advantages_T: advantages_T * np.float32("nan")),
        ("log_probabilities_T", lambda values_T: values_T + 1),
        ("sample_offsets", lambda offsets: offsets[:-1]),
        ("advantages_T", lambda advantages_T: advantages_T[1:]),
    ],
)
def test_a_batch_that_no_wire_would_bring_is_refused(
    dense_directory: Path, tmp_path: Path, name: str, change: Callable[[Any], Any]
) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        driven.contribute(make_batch(1))
        broken = make_batch(1)
        broken.columns[name] = change(broken.columns[name])
        with pytest.raises(InvalidBatch, match=name):
            driven.contribute(broken)
        assert driven.update()["tokens"] == len(make_batch(1).token_ids_T)


def test_after_an_update_that_failed_nothing_goes_on(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        train(driven, 1)
        driven._run.torch.intact = False
        for each in (lambda: driven.contribute(make_batch(2)), driven.save, lambda: driven.publish("name")):
            with pytest.raises(ValueError, match="last save"):
                each()


def test_what_cannot_be_is_refused_and_harms_nothing(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        driven.contribute(make_batch(1, run_id="one"))
        bad = make_batch(1)
        bad.token_ids_T[0] = VOCABULARY
        with pytest.raises(InvalidBatch, match=f"vocabulary of {VOCABULARY}"):
            driven.contribute(bad)
        with pytest.raises(ValueError, match=r"sgd.*adamw"):
            driven.update(Sgd(1.0))
        expected = driven.update()
        assert expected["tokens"] == len(make_batch(1).token_ids_T), "of the first contribution alone"
        infinite = make_batch(2)
        infinite.advantages_T[:] = np.finfo(np.float32).max
        with pytest.raises(InvalidBatch, match="not finite"):
            driven.contribute(infinite)
        with pytest.raises(ValueError, match="no contribution since update 1"):
            driven.update()
    for training in ({"updates_per_step": 2}, {"lora": {"rank": 2, "target_modules": ["nothing"]}}):
        with (
            pytest.raises(ValueError, match=next(iter(training))),
            drive(configured(tmp_path / "other", dense_directory), described(**training)),
        ):
            pass


def test_full_weights_are_published_whole(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described(lora=None)) as driven:
        assert driven is not None
        train(driven, 1)
        place = driven.publish("whole")
        trained = {name: each.detach().clone() for name, each in driven._run.torch.optimizer.parameters.items()}
    found = load_file(place / "model.safetensors")
    assert trained.keys() <= found.keys()
    assert all(torch.equal(found[name], each) for name, each in trained.items())
    assert (place / "probe.json").is_file()
    assert (place / "config.json").is_file()


def test_a_run_begins_with_the_state_of_another_which_is_its_reference(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as one:
        assert one is not None
        train(one, 1)
        one.save()
        end = load_file(one.publish("end") / WEIGHTS)
    given = described(start_from={"run": "one"}, reference={}).model_copy(update={"run_id": "two"})
    for step in (1, 2):
        with drive(configured(tmp_path, dense_directory, resume=True), given) as two:
            assert two is not None
            assert two.step == step - 1
            if step == 1:
                check_equal(load_file(two.publish("begin") / WEIGHTS), end)
            two.contribute(make_batch(step))
            distance = float(two.update()["reference_kl"])
            two.save()
        assert (distance == 0) == (step == 1), distance


def test_a_measurement_that_fails_leaves_no_contribution(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conclude = Columns.conclude

    def spoil(columns: Columns, *given: Any) -> None:
        conclude(columns, *given)
        columns.measured["reference"].fill_(float("nan"))

    with drive(configured(tmp_path, dense_directory), described(reference={})) as driven:
        assert driven is not None
        driven.contribute(make_batch(1))
        with monkeypatch.context() as patched:
            patched.setattr(Columns, "conclude", spoil)
            with pytest.raises(InvalidBatch, match="not finite: reference"):
                driven.contribute(make_batch(1))
        with pytest.raises(ValueError, match="no contribution since update 0"):
            driven.update()
        driven.contribute(make_batch(1))
        assert driven.update()["tokens"] == len(make_batch(1).token_ids_T)


def test_after_an_interrupt_nothing_counts_twice_or_is_left_out(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(place: object, name: str, call: Callable[[], object]) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(place, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()

    def last() -> Item:
        return Item(make_batch(2), updates=True, publication="last")

    with drive(configured(tmp_path / "whole", dense_directory), described()) as driven:
        assert driven is not None
        driven.ask(Item(make_batch(1)), 1)
        driven.ask(last(), 2)
    with drive(configured(tmp_path / "cut", dense_directory), described()) as driven:
        assert driven is not None
        driven.ask(Item(make_batch(1)), 1)
        interrupted(driven._learner, "train_rows", lambda: driven.ask(last(), 2))
        assert driven.item == 0, "the first contribution is gone, too"
        driven.ask(Item(make_batch(1)), 1)
        interrupted(Broadcaster, "publish_as", lambda: driven.ask(last(), 2))
        assert (driven.step, driven.item) == (1, 2)
        assert driven.ask(last(), 2).result(0) is None, "the update was made"
        assert driven.step == 1
        driven.publish("last")
        driven.contribute(make_batch(3))
        interrupted(driven._learner, "finish_step", driven.update)
        with pytest.raises(ValueError, match="last save"):
            driven.save()
    check_equal(published(tmp_path / "cut", "last"), published(tmp_path / "whole", "last"))


def test_an_answer_is_given_once_and_no_wait_for_it_is_in_vain(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        first, updates = Item(make_batch(1)), Item(updates=True)
        answer = driven.ask(first, 1)
        assert driven.ask(first, 1) is answer, "it was carried out"
        replaced = driven.ask(Item(saves="newest"), 3)
        driven.ask(Item(publication="x"), 3)
        assert replaced.cancelled()
        assert driven.ask(Item(make_batch(2)), 4).cancel(), "it is asked for, though nobody wants the answer"
        driven.ask(updates, 2).result(0)
        assert (driven.step, driven.item) == (1, 4)
        with pytest.raises(ValueError, match="another"):
            driven.ask(updates, 5)
        assert driven.update()["tokens"] == len(make_batch(2).token_ids_T)


def test_a_request_by_a_file_is_not_answered_as_if_it_had_happened(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        write_request(tmp_path / "run_one", CopyRequest(request_id="copy", source="one", step=1))
        for step in (1, 2, 3, 4):
            train(driven, step)
            driven.save()
            driven._trainer._discovered = 0.0
        assert read_answer(tmp_path / "run_one", "copy") is None
        assert not published_steps(tmp_path / "trainer" / "one" / "copies")


def test_the_end_of_a_run_that_has_left_closes_no_file_of_another(dense_directory: Path, tmp_path: Path) -> None:
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        train(driven, 1)
        shutil.rmtree(tmp_path / "run_one")
        driven._trainer._discovered = 0.0
        with pytest.raises(ValueError, match="left its slot"):
            driven.contribute(make_batch(2))
        descriptor = driven._run.descriptor
        assert descriptor is not None
        os.dup2(os.open(tmp_path, os.O_RDONLY), descriptor)
    os.fstat(descriptor)
    os.close(descriptor)


def test_an_adapter_begins_with_its_own_seed_whatever_that_of_the_trainer_is(
    dense_directory: Path, tmp_path: Path
) -> None:
    begun = {}
    for own, of_trainer in ((5, 0), (5, 1), (6, 0), (0, 1), (None, 0)):
        config = configured(tmp_path / f"{own}-{of_trainer}", dense_directory).model_copy(update={"seed": of_trainer})
        lora = {"rank": 2, "target_modules": ["q_proj", "down_proj"], "seed": own}
        with drive(config, described(lora=lora)) as driven:
            assert driven is not None
            begun[own, of_trainer] = load_file(driven.publish("begin") / WEIGHTS)
    check_equal(begun[5, 0], begun[5, 1])
    check_equal(begun[0, 1], begun[None, 0])
    for one, other in (((5, 0), (6, 0)), ((5, 0), (None, 0))):
        assert any(not torch.equal(begun[one][name], begun[other][name]) for name in begun[one])


LIKELY = {"kind": "sft"}


def given(batch: Batch, width: int) -> tuple[Any, Any]:
    """Targets and weights of each token, `[T, width]`."""
    random, shape = np.random.default_rng(width), (len(batch.token_ids_T), width)
    return random.integers(0, VOCABULARY, shape, dtype=np.int32), random.random(shape).astype(np.float32)


def test_several_targets_of_a_token_count_as_so_many_contributions(dense_directory: Path, tmp_path: Path) -> None:
    batch, values = make_batch(1, run_id="one"), Sgd(1e-2, clip=float("inf"))
    targets, weights = given(batch, 3)
    found: dict[str, Any] = {}
    for kind in ("together", "apart"):
        config = configured(tmp_path / kind, dense_directory)
        with drive(config, described(optimizer="sgd")) as driven:
            assert driven is not None
            columns = [slice(0, 3)] if kind == "together" else [slice(each, each + 1) for each in range(3)]
            outcomes = [
                driven.contribute(
                    batch,
                    Objective(
                        LIKELY,
                        1.0,
                        weights[:, own].tobytes(),
                        np.ascontiguousarray(targets[:, own]).tobytes(),
                        returns=True,
                    ),
                ).columns
                for own in columns
            ]
            found[kind] = [
                np.concatenate([each["log_probabilities"].reshape(len(targets), -1) for each in outcomes], axis=1),
                np.sum([each["losses"] for each in outcomes], axis=0),
            ]
            driven.update(values)
            found[kind] += load_file(driven.publish("after") / WEIGHTS).values()
    for one, other in zip(found["together"], found["apart"], strict=True):
        assert np.allclose(one, other, rtol=0, atol=1e-6)
    assert np.allclose(found["together"][1], -(found["together"][0] * weights).sum(1), atol=1e-5)
    assert np.unique(found["together"][0]).size > 50


@pytest.mark.parametrize("loss", [{"kind": "ppo"}, {"kind": "sft", "entropy_coefficient": 0.1}])
def test_several_targets_are_for_likelihoods(dense_directory: Path, tmp_path: Path, loss: dict[str, Any]) -> None:
    targets, weights = given(make_batch(1), 2)
    with drive(configured(tmp_path, dense_directory), described()) as driven:
        assert driven is not None
        for objective in (
            Objective(loss, 1.0, weights.tobytes(), targets.tobytes()),
            Objective(LIKELY, 1.0, weights[:, 0].tobytes(), targets.tobytes()),
            Objective(LIKELY, 1.0, b"", targets[1:].tobytes()),
            Objective(LIKELY, 1.0, inputs={"any": Given(b"1234")}),
        ):
            with pytest.raises(InvalidBatch, match=r"weights|targets|inputs"):
                driven.contribute(make_batch(1), objective)
        driven.contribute(make_batch(1))
        driven.update()


def test_results_alone_have_no_backward_pass_and_no_part_in_an_update(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("there was a backward pass")

    only = Objective(LIKELY, 1.0, returns=True, forward_only=True)
    weights = {}
    for kind in ("with", "without"):
        with drive(configured(tmp_path / kind, dense_directory), described()) as driven:
            assert driven is not None
            if kind == "with":
                with monkeypatch.context() as patched:
                    patched.setattr(torch.autograd, "backward", refuse)
                    before = driven.contribute(make_batch(3), only).columns
                with pytest.raises(ValueError, match="no contribution"):
                    driven.update()
            first = driven.contribute(make_batch(1), MEMBER)
            if kind == "with":
                with monkeypatch.context() as patched:
                    patched.setattr(torch.autograd, "backward", refuse)
                    assert driven.contribute(make_batch(3), only).columns.keys() == before.keys()
                    with pytest.raises(InvalidBatch, match="finite"):
                        driven.contribute(make_batch(3), msgspec.structs.replace(only, weights=b"\0\0\xc0\x7f" * 43))
                assert first.metrics["tokens/trained"]
            assert driven.update()["tokens"] == len(make_batch(1).token_ids_T)
            weights[kind] = load_file(driven.publish("after") / WEIGHTS)
    check_equal(weights["with"], weights["without"])
    loss = before["losses"]
    assert np.allclose(loss, -before["log_probabilities"])
    assert loss.any()
