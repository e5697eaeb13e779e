"""`counterpoint sft` with a model, an adapter or rows that cannot be trained on: it ends, says why, and loses no step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.data.rows import DataError
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.loop import EVICTED
from counterpoint.trainer.probe import BrokenWeights
from counterpoint.trainer.sft.batches import SftBatches
from counterpoint.trainer.sft.train import newest_weights
from counterpoint.trainer.shells.steps import StepsShell
from counterpoint.transport.files.atomic import published_steps
from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port
from tests.support.tiny_model import make_model
from tests.trainer.forked_ranks import launch
from tests.trainer.test_sft import LORA, TEMPLATE, TRAINING, make_config, messages_of, order_of, run, weights_in
from tests.trainer.test_sft import _no_manager_is_left as _no_manager_is_left
from tests.trainer.test_sft import place as place

pytestmark = pytest.mark.slow


def test_an_adapter_that_does_not_fit_the_model_ends_it(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = make_config(place, tmp_path / "wrong", training={"lora": {**LORA, "target_modules": ["nothing"]}})
    assert run(wrong) == 2
    assert "this model has no such layer" in caplog.text
    first = make_config(place, tmp_path / "first", training={**TRAINING, "lora": LORA}, epochs=0.1)
    assert run(first) == 0
    make_model(tmp_path / "other", moe=False, seed=1)
    (tmp_path / "other" / "chat_template.jinja").write_text(TEMPLATE)
    start = {**LORA, "start_from": str(newest_weights(first))}
    config = make_config(place, tmp_path / "out", model=str(tmp_path / "other"), training={**TRAINING, "lora": start})
    assert run(config) == 2
    assert "training.lora.start_from" in caplog.text
    assert "trained over another base model" in caplog.text


def test_two_ranks_refuse_an_adapter_of_another_model_together(place: Path, tmp_path: Path) -> None:
    first = make_config(place, tmp_path / "first", training={**TRAINING, "lora": LORA}, epochs=0.1)
    assert run(first) == 0
    make_model(tmp_path / "other", moe=False, seed=1)
    (tmp_path / "other" / "chat_template.jinja").write_text(TEMPLATE)
    trainer = {"device": "cpu", "threads": 1, "max_tokens": 300, "processes": 2, "sharding": True}
    training = {**TRAINING, "lora": {**LORA, "start_from": str(newest_weights(first))}}
    settings: dict[str, Any] = {"epochs": 0.1, "training": training, "trainer": trainer}
    same = make_config(place, tmp_path / "same", **settings)
    another = make_config(place, tmp_path / "another", model=str(tmp_path / "other"), **settings)
    work = [(each, free_port(), 0) for each in (same, another)]
    launch(2, tmp_path, work, module="tests.trainer.ranked_sft", seconds=DEADLINE_SECONDS)
    assert (tmp_path / "ended").read_text().splitlines() == ["0", "2"]


def test_a_run_whose_directory_is_deleted_ends_and_says_so(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = StepsShell._report

    def delete(steps: StepsShell, *given: Any) -> None:
        report(steps, *given)
        shutil.rmtree(tmp_path / "run_sft", ignore_errors=True)  # gone already if another step ends first
        steps._shared.slots_change = True

    monkeypatch.setattr(StepsShell, "_report", delete)
    assert run(make_config(place, tmp_path, training={**TRAINING, "lora": LORA})) == 2
    assert f"its directory {tmp_path / 'run_sft'} was deleted" in caplog.text


def test_weights_that_cannot_be_published_end_it(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BrokenWeights("the probe is not finite")

    monkeypatch.setattr(Broadcaster, "publish", refuse)
    assert run(make_config(place, tmp_path, training={**TRAINING, "lora": LORA, "checkpoint_interval": 2})) == EVICTED
    assert "the probe is not finite" in caplog.text


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "messages is 'hello'; .*"),
        (
            [*messages_of(1)[:1], {"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"messages\[1\].content\[0\] is 'image_url'; only parts of type text are taken",
        ),
    ],
    ids=["no list", "an image"],
)
def test_a_row_that_cannot_be_used_costs_no_step_before_it(
    place: Path, tmp_path: Path, messages: Any, said: str
) -> None:
    rows: list[dict[str, Any]] = [{"messages": messages_of(index)} for index in range(8)]
    last = order_of(make_config(place, tmp_path, data={"rows": rows}, epochs=1))[-1]
    rows[last] = {"messages": messages}
    training = {**TRAINING, "checkpoint_interval": 99}
    config = make_config(place, tmp_path / "out", data={"rows": rows}, epochs=1, samples_per_step=2, training=training)
    with pytest.raises(ValueError, match=rf"{said}; the weights of step 3 are in .*step_3"):
        run(config)
    assert published_steps(tmp_path / "out" / "trainer" / "sft" / "checkpoints") == [3]
    assert weights_in(newest_weights(config))


def test_too_long_a_conversation_is_found_before_the_training_begins(place: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": messages_of(index)} for index in range(8)]
    last = order_of(make_config(place, tmp_path, data={"rows": rows}, epochs=1))[-1]
    rows[last]["messages"] = [*messages_of(0), {"role": "assistant", "content": "long " * 200}]
    settings: dict[str, Any] = {"data": {"rows": rows}, "epochs": 1, "samples_per_step": 2}
    config = make_config(place, tmp_path / "out", on_long="error", **settings)
    with pytest.raises(ValueError, match=rf"rows\[{last}\]: .* tokens; at most 300 "):
        run(config)
    assert not (tmp_path / "out" / "run_sft").exists()
    assert run(make_config(place, tmp_path / "out", on_long="drop", **settings)) == 0, "as the message says"


def test_a_row_that_no_step_draws_may_be_too_long(place: Path, tmp_path: Path) -> None:
    """It has the weight 0, or is in the rest of an epoch of which a part is trained."""
    rows: list[dict[str, Any]] = [{"messages": messages_of(index), "weight": 1} for index in range(8)]
    long = {"messages": [*messages_of(0), {"role": "assistant", "content": "long " * 200}]}
    weighted = {"data": {"rows": [{**long, "weight": 0}, *rows], "weight": "weight"}, "epochs": 2.0}
    data: dict[str, Any] = {"rows": [{"messages": row["messages"]} for row in rows]}
    last = order_of(make_config(place, tmp_path, data=data, epochs=1))[-1]
    data["rows"][last] = long
    for settings in (weighted, {"data": data, "epochs": 0.5}):
        SftBatches(make_config(place, tmp_path, on_long="error", **settings)).check_lengths()
    with pytest.raises(ValueError, match=rf"rows\[{last}\]: .*\d+ tokens; at most 300 "):
        SftBatches(make_config(place, tmp_path, on_long="error", data=data, epochs=1.0)).check_lengths()


def test_roles_that_are_most_likely_misspelt_and_empty_answers_are_logged(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = messages_of(0)
    bad: dict[str, list[dict[str, Any]]] = {
        "role": [*good, {"role": "asistant", "content": "b"}, {"role": "user", "content": "c"}, *good],
        "empty": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
        "calls": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        ],
    }

    def logged(*names: str) -> list[str]:
        caplog.clear()
        rows = [{"messages": bad[name]} for name in names]
        config = make_config(place, tmp_path, data={"rows": rows}, epochs=1)
        SftBatches(config).batch(1)
        return sorted({record.message for record in caplog.records if "messages[" in record.message})

    (role,) = logged("role", "role")
    assert "messages[2].role is 'asistant', which is read and not trained; known: assistant, developer" in role
    (empty,) = logged("empty")
    assert empty == "rows[0]: messages[1] is an empty answer; the model learns to end its turn at once"
    with pytest.raises(DataError, match=r"rows\[0\]: .* drops a call of messages\[1\]"):  # this template writes none
        logged("calls")
    assert "empty answer" not in caplog.text
