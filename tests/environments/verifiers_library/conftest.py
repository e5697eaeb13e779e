"""A chat whose template reads tools, a model that calls them, and a running environment."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext, Reply, ToolCall
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.verifiers_library.environment import Verifiers
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.transport.records import Turn

SAMPLES = Path(__file__).with_name("samples")

_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}call {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Running = Callable[..., AbstractAsyncContextManager[Verifiers]]


class CallingModel(ScriptedModel):
    """Answers `call NAME {...}` call a tool; a call of `?` cannot be read."""

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        text = self.chat.decode(turn.completion_ids.tolist())
        found = re.fullmatch(r"call (\S+) (.*)", text)
        if not (tools and found):
            return Reply(text)
        if found[1] == "?":
            return Reply("", malformed=f"cannot read {found[2]}")
        return Reply("", calls=(ToolCall(f"call-{len(self.turns)}", found[1], json.loads(found[2])),))


@pytest.fixture(scope="session")
def tools_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools_tokenizer")
    write_tokenizer(directory, longest=1024)
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def tools_chat(tools_directory: Path) -> Chat:
    return Chat(tools_directory)


@pytest.fixture
def running(tmp_path: Path) -> Running:
    """Starts the environment of these arguments for a block."""

    @asynccontextmanager
    async def run(sample: str, **arguments: Any) -> AsyncIterator[Verifiers]:
        given = {"id": f"{__package__}.samples.{sample}"} | arguments
        environment = Verifiers(**given)
        try:
            await environment.start(EnvironmentContext("library", tmp_path / "library", tmp_path, seed=0))
            yield environment
        finally:
            await environment.close()

    return run
