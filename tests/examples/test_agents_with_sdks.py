"""The examples of agents with other people's SDKs: each plays through the gateway as it stands, token for token."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.gateway.agent import AgentEnvironment
from counterpoint.environments.scripted import play as play_scripted
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout
from counterpoint.transport.records import Rollout, Turn
from tests.environments.gateway.models import extends
from tests.support.tiny_model import CHAT_TEMPLATE
from tests.support.vllm_server import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples/agent"
GUESSED = [write_hermes("guess", {"number": 2}), write_hermes("guess", {"number": 4}), "It is 4."]
SCRIPTS = {
    "with_agents_sdk.py": GUESSED,
    "with_anthropic.py": GUESSED,
    "with_langchain.py": ["It may be 4.", '{"number": 4}'],
    "with_pydantic_ai.py": GUESSED,
}
"""What a model says that finds the number 4."""


def environment_of(program: str, *, warm: bool = False) -> AgentEnvironment:
    command = [sys.executable, str(EXAMPLES / program)]
    return AgentEnvironment(command=command, data={"rows": [{"prompt": "guess 1-7", "answer": 4}]}, warm=warm)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("program", SCRIPTS)
async def test_an_agent_plays_and_its_turns_continue_one_another(program: str, warm: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, longest=1024)
    environment = environment_of(program, warm=warm)
    rollout = await play_scripted(environment, 0, Chat(tmp_path), *SCRIPTS[program])
    await environment.close()
    assert rollout.reward == 1.0
    assert rollout.state["refused"] == []
    assert len(rollout.turns) == len(SCRIPTS[program])
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False):
        assert extends(after, before)
    constrained = [not turn.trained_tokens for turn in rollout.turns]
    assert constrained == ([False, True] if program == "with_langchain.py" else [False] * 3)


@pytest.mark.promise("an agent that knows an OpenAI base URL is trained token for token")
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("program", SCRIPTS)
async def test_every_token_of_a_real_server_is_trained_once(
    program: str, moe_server: ServerProcess, tmp_path: Path
) -> None:
    """A random model, which says what it likes; only what is constrained has a form."""
    directory = Path(shutil.copytree(moe_server.config.model, tmp_path / "model"))
    (directory / "chat_template.jinja").write_text("{{ tools }}" + CHAT_TEMPLATE)
    chat = Chat(directory)
    pool = InferencePool(PoolConfig(urls=[moe_server.url])).model(moe_server.config.model)
    await pool.start()
    environment = environment_of(program)
    rollout = Rollout("0-0", 0, "agent", 0)
    model = PolicyModel(
        rollout, chat, pool, SamplingParameters(max_tokens=64, stop_token_ids=list(chat.stop_token_ids))
    )
    config = EnvironmentConfig(name="agent", kind="agent", rollout_timeout_seconds=600.0)
    try:
        await play(LoadedEnvironment(config, environment), rollout, model)
    finally:
        await environment.close()
        await pool.release()
    assert rollout.error is None
    assert rollout.state["refused"] == []
    free = [turn for turn in rollout.turns if turn.trained_tokens]
    if program == "with_langchain.py":
        assert chat.decode(rollout.turns[-1].completion_ids.tolist()).startswith("{")
        assert len(free) == 1
    trained = Counter[tuple[int, float]]()
    for sample in merge_rollout(rollout):
        where = sample.loss_mask_T == 1
        trained.update(zip(sample.token_ids_T[where].tolist(), sample.log_probabilities_T[where].tolist(), strict=True))
    assert trained == sum((sampled(turn) for turn in free), Counter[Any]())


def sampled(turn: Turn) -> Counter[tuple[int, float]]:
    """The tokens of a turn with their log-probabilities."""
    return Counter(zip(turn.completion_ids.tolist(), turn.log_probabilities.tolist(), strict=True))
