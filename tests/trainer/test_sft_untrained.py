"""What a row says of what is trained is done, or refused by the field's name; nothing that a message says is lost silently."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.data.rows import DataError
from counterpoint.trainer.sft.batches import SftBatches
from counterpoint.trainer.sft.config import SftConfig
from tests.orchestrator.toy_model import make_toy_model

Trained = Callable[..., str]
NAMES = ["weight", "loss_weight", "loss_mask", "loss", "train", "training", "trainable"]


def conversation(first: dict[str, Any], second: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row of two turns, whose answers have further fields."""
    return {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "first", **first},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "second", **(second or {})},
        ]
    }


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Returns the text of the trained tokens of a row."""
    model = make_toy_model(tmp_path / "model")
    chat = Chat(model)

    def of(row: dict[str, Any], **data: Any) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(orjson.dumps(row) + b"\n")
        config = SftConfig(
            output_dir=tmp_path / "out",
            model=str(model),
            data={"path": str(path), **data},
            epochs=1,
            samples_per_step=1,
        )
        batch = SftBatches(config).batch(1)
        text = chat.transcribe([batch.token_ids_T[batch.loss_mask_T.astype(bool)].tolist()])[0]
        return " ".join(word for word in ("first", "second") if word in text)

    return of


@pytest.mark.parametrize("name", NAMES)
def test_a_message_that_is_not_to_be_trained_is_not(trained: Trained, name: str) -> None:
    for no, yes in ((0, 1), (False, True), (0.0, 1.0)):
        assert trained(conversation({name: no})) == "second"
        assert trained(conversation({}, {name: no})) == "first"
        assert trained(conversation({name: no}, {name: yes})) == "second"
        assert trained(conversation({name: yes}, {name: None})) == "first second"
    assert trained({"messages": orjson.dumps(conversation({name: 0})["messages"]).decode()}) == "second", "JSON text"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (conversation({"weight": 0.5}), "messages[1].weight"),
        (conversation({"weight": "0"}), "messages[1].weight"),
        (conversation({"loss_mask": [0, 1]}), "messages[1].loss_mask"),
        (conversation({"masked": True}), "messages[1].masked"),
        (conversation({"is_trainable": False}), "messages[1].is_trainable"),
        (conversation({"train_detail": [{"begin_offset": 0}]}), "messages[1].train_detail"),
        (conversation({"weight": 0}, {"train": False}), "no message of role assistant is to be trained"),
        (
            {"messages": [{"role": "user", "content": "a", "train": True}, {"role": "assistant", "content": "b"}]},
            "messages[0].train",
        ),
        (conversation({"content": [{"type": "text", "text": "first", "weight": 0}]}), "messages[1].content[0].weight"),
        (conversation({"content": [{"type": "text", "text": "first", "other": 1}]}), "messages[1].content[0].other"),
        (conversation({"content": [[{"type": "text", "text": "first"}]]}), "messages[1].content[0]"),
        (
            conversation({"tool_calls": [{"function": {"name": "f", "arguments": {}, "weight": 0}}]}),
            "messages[1].tool_calls[0].function.weight",
        ),
        (conversation({"tool_calls": [{"name": "f", "arguments": {}, "train": 0}]}), "messages[1].tool_calls[0]"),
        (conversation({}) | {"loss_mask": [0, 1, 0, 1]}, "loss_mask"),
        (conversation({}) | {"loss_mask": "[0, 1, 0, 1]"}, "loss_mask"),
        (conversation({}) | {"train": False}, "train"),
        (conversation({}) | {"trainable": 0}, "trainable"),
        (conversation({}) | {"weight": 0}, "weight"),
        (conversation({}) | {"weight": 0.5}, "weight"),
        (conversation({}) | {"labels": [1, -100]}, "labels"),
        (conversation({}) | {"train": "no"}, "train"),
        (conversation({}) | {"train": "False"}, "train"),
        (conversation({}) | {"loss_mask": "0,1"}, "loss_mask"),
        (conversation({}) | {"loss_masks": [0, 1]}, "loss_masks"),
        (conversation({}) | {"train_mask": [False, True]}, "train_mask"),
        (conversation({}) | {"mask": [0, 1]}, "mask"),
        (conversation({}) | {"assistant_mask": "[0, 1]"}, "assistant_mask"),
        (conversation({}) | {"isTrainable": False}, "isTrainable"),
        (conversation({}) | {"ignore_loss": True}, "ignore_loss"),
        (conversation({}) | {"train_turns": [1]}, "train_turns"),
        (conversation({}) | {"Weight": 0}, "Weight"),
        (conversation({"isTrained": False}), "messages[1].isTrained"),
    ],
)
def test_what_is_said_in_another_way_is_refused_by_its_name(trained: Trained, row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError) as caught:
        trained(row)
    assert named in str(caught.value)


def test_names_that_only_contain_such_a_word_say_nothing_of_training(trained: Trained) -> None:
    row = conversation({"constraints": ["short"], "glossary": "x", "labels": ["kind"]}) | {
        "constraints": 0,
        "split": "train",
    }
    assert trained(row | {"training_source": "books", "train": "", "loss_mask": None}) == "first second"


def test_a_row_that_says_that_all_is_trained_is_trained(trained: Trained) -> None:
    row = conversation({"weight": 1, "tool_calls": None}) | {
        "weight": 1,
        "train": True,
        "loss_mask": [1, 1],
        "loss": None,
    }
    assert trained(row) == "first second"
    assert trained(conversation({}) | {"weight": 0.5}, weight="weight") == "first second", "how often it is drawn"
    assert trained(conversation({}) | {"weight": 0}, columns={"messages": "messages"}) == "first second", (
        "as the error advises"
    )


def test_a_field_that_the_template_does_not_read_is_named_once(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trained(conversation({"mood": "calm"}, {"mood": "calm", "reasoning": "so it is"}))
    assert caplog.text.count("'mood'") == caplog.text.count("'reasoning_content'") == 1
