"""Agents that others wrote, in the newest versions, unchanged: the table of `docs/gateway.md` is what is played here.

`make test-all` installs those of PyPI, `make test-agents` those of npm, too. Each calls a tool once, which writes the reward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway.agent import AgentEnvironment
from counterpoint.environments.scripted import play
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout

REPOSITORY = Path(__file__).parents[3]
PYTHON = REPOSITORY / "build/agents/python/bin"
NPM = REPOSITORY / "build/agents/npm/node_modules/.bin"
PINS = REPOSITORY / "requirements/agents.txt"
COMMAND = 'echo 1 > "$AGENT_REWARD_FILE"'
CODE = f"Thought: it is easy.\n<code>\nprint(run({COMMAND!r}))\n</code>"


@dataclass(frozen=True)
class Agent:
    """How an agent is started, and what a model says that does the task with it."""

    command: tuple[str, ...]
    says: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    folder: Path = PYTHON
    refused: tuple[str, ...] = ()
    """Fields that it gives up once they are refused."""


def program(sdk: str, *arguments: str) -> tuple[str, ...]:
    return (str(PYTHON / "python"), str(Path(__file__).with_name("agent_programs.py")), sdk, *arguments)


def calling(tool: str, **arguments: str) -> tuple[str, ...]:
    return "I write it. " + write_hermes(tool, arguments), "It is written."


RUN = calling("run", command=COMMAND)
CODEX = (
    f"exec {NPM}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=gateway "
    """-c "model_providers.gateway={name='gateway', base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY'}" """
)
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Else LiteLLM asks the internet for prices at each start, and waits for that."""
AGENTS = {
    "openai": Agent(program("openai"), RUN),
    "openai, chat": Agent(program("openai_chat"), RUN),
    "anthropic": Agent(program("anthropic"), RUN, refused=("thread",)),
    "langchain, openai": Agent(program("langchain", "openai:policy"), RUN),
    "langchain, anthropic": Agent(program("langchain", "anthropic:policy"), RUN),
    "litellm, openai": Agent(program("litellm", "openai/policy"), RUN, OFFLINE),
    "litellm, anthropic": Agent(program("litellm", "anthropic/policy"), RUN, OFFLINE),
    "mini-swe-agent": Agent(
        (str(PYTHON / "mini"), "-t", "Write your reward.", "-y", "--exit-immediately", "-m", "openai/policy"),
        (calling("bash", command=COMMAND)[0], calling("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")[0]),
        {**OFFLINE, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    "smolagents": Agent(
        program("smolagents", "tool-call", "user", "tool-response", "user"),
        (CODE, "<code>\nfinal_answer(1)\n</code>"),
    ),
    "Codex": Agent(
        ("sh", "-c", CODEX),
        (write_hermes("multi_agent_v1__close_agent", {"target": "x"}), *calling("exec_command", cmd=COMMAND)),
        folder=NPM,
    ),
    "Claude Code": Agent(
        (str(NPM / "claude"), "-p", "--allowedTools", "Bash"),
        (
            write_hermes("ToolSearch", {"query": "select:WebFetch"}),
            *calling("Bash", command=COMMAND, description="Writes."),
        ),
        folder=NPM,
    ),
}


def test_the_page_has_the_versions_that_are_played() -> None:
    page = (REPOSITORY / "docs/gateway.md").read_text()
    pins = re.findall(
        r"(?:^|(?<=[ ]))([@\w/-]+?)(?:==|@)(\d[\d.]+)", PINS.read_text().partition("\n\n")[0], re.MULTILINE
    )
    assert len(pins) == 10
    for name, version in pins:
        assert re.search(rf"`{name}`( \||) {re.escape(version)}\b", page), name


def if_installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not AGENTS[name].folder.exists(), reason=f"{name} is not installed: make test-agents")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=if_installed(name)) for name in AGENTS])
async def test_an_agent_plays_unchanged_and_its_turns_are_one_sample(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    write_tokenizer(tmp_path, longest=1024)
    environment = AgentEnvironment(
        command=agent.command,
        data={"rows": [{"prompt": "Write your reward."}]},
        variables={"HOME": str(tmp_path), **agent.variables},
        reward_file=True,
    )
    rollout = await play(environment, 0, Chat(tmp_path), *agent.says)
    await environment.close()
    assert rollout.reward == 1.0
    assert [line.partition(" is ")[0] for line in rollout.state["refused"]] == [
        f"400: {name}" for name in agent.refused
    ]
    assert len(rollout.turns) == len(agent.says)
    [sample] = merge_rollout(rollout)
    assert sample.loss_mask_T.sum() == sum(len(turn.completion_ids) for turn in rollout.turns)
