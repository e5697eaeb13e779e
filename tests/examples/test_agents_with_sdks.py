"""The examples of agents with other people's SDKs: each plays through the gateway as it stands, token for token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from environments.chat import Chat
from environments.gateway.agent import AgentEnvironment
from environments.scripted import play as play_scripted
from environments.tools.hermes import write_hermes
from models.tiny_tokenizer import write_tokenizer
from tests.environments.gateway.models import extends

EXAMPLES = Path(__file__).parents[2] / "examples/agent"
GUESSED = [write_hermes("guess", {"number": 2}), write_hermes("guess", {"number": 4}), "It is 4."]
SCRIPTS = {
    "with_agents_sdk.py": GUESSED,
    "with_langchain.py": ["It may be 4.", '{"number": 4}'],
    "with_pydantic_ai.py": GUESSED,
}
"""What a model says that finds the number 4."""


def environment_of(program: str) -> AgentEnvironment:
    command = [sys.executable, str(EXAMPLES / program)]
    return AgentEnvironment(command=command, data={"rows": [{"prompt": "guess 1-7", "answer": 4}]})


@pytest.mark.slow
@pytest.mark.parametrize("program", SCRIPTS)
async def test_an_agent_plays_and_its_turns_continue_one_another(program: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, longest=1024)
    environment = environment_of(program)
    rollout = await play_scripted(environment, 0, Chat(tmp_path), *SCRIPTS[program])
    await environment.close()
    assert rollout.reward == 1.0
    assert rollout.state["refused"] == []
    assert len(rollout.turns) == len(SCRIPTS[program])
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False):
        assert extends(after, before)
    constrained = [not turn.trained_tokens for turn in rollout.turns]
    assert constrained == ([False, True] if program == "with_langchain.py" else [False] * 3)
