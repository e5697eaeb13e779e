"""A model that is a tokenizer, and a job with three steps of rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from tests.orchestrator.toy_model import make_toy_model
from tests.serve.rollouts.jobs import HOSTILE, name_model, spoken, write_step


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def chat(model: Path) -> Chat:
    return Chat(model)


@pytest.fixture
def job(tmp_path: Path, model: Path, chat: Chat) -> Path:
    directory = tmp_path / "job"
    directory.mkdir()
    name_model(directory, model)
    for step in (1, 2):
        write_step(directory, "one", step, [spoken(chat, 7, f"attempt {step}", reward=step / 10)], chat)
    rollouts = [
        spoken(chat, 0, "so-so ☂", reward=0.5, advantage=0.1, state={"answer": "42"}),
        spoken(chat, 1, "one", "two words", reward=0.75, advantage=0.25, environment="duel", player="white"),
        spoken(chat, 2, "bad", reward=-1.0, advantage=-0.5, filtered_by="repetition"),
        spoken(chat, 3, HOSTILE, reward=None, error=f"ValueError: {HOSTILE}"),
        spoken(chat, 7, "third attempt", reward=0.9),
        spoken(chat, 4, reward=None, error="no answer", inference_failed=True),
    ]
    write_step(directory, "one", 3, rollouts, chat)
    return directory
