"""A chat with the built-in models' tokenizer, which needs no weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.models.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, longest=1024)
    return directory


@pytest.fixture(scope="session")
def chat(tokenizer_directory: Path) -> Chat:
    return Chat(tokenizer_directory)
