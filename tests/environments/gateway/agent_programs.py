"""Agents as users of an SDK write them, for `test_agents_as_they_are.py`: `python agent_programs.py SDK [MODEL]`.

Each offers the model one tool, `run`, which runs a command, until the model calls it no more. It runs in the environment of
`make test-agents`, so it imports nothing of this repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TASK = [{"role": "user", "content": "Write your reward."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command."}},
    "required": ["command"],
}
FUNCTION = {"name": "run", "description": "Runs a command.", "parameters": PARAMETERS}


def run(command: str) -> str:
    """Runs a command.

    Args:
        command: The command.
    """
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout + "done"


def with_openai() -> None:
    """The Responses API."""
    import openai

    items: list[Any] = [*TASK]
    create: Any = openai.OpenAI().responses.create
    while True:
        output = create(model="policy", input=items, tools=[{"type": "function", **FUNCTION}]).output
        items += output
        if not (calls := [item for item in output if item.type == "function_call"]):
            return
        for call in calls:
            said = run(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})


def with_openai_chat() -> None:
    """The chat API, streamed."""
    import openai

    client = openai.OpenAI()

    def complete(**asked: Any) -> Any:
        with client.chat.completions.stream(**asked) as events:
            return events.get_final_completion()

    _chat(complete, "policy")


def with_litellm(model: str) -> None:
    """LiteLLM, which has the form of the chat API for each provider."""
    import litellm

    _chat(litellm.completion, model)


def _chat(complete: Any, model: str) -> None:
    messages: list[Any] = [*TASK]
    while True:
        tools = [{"type": "function", "function": FUNCTION}]
        message = complete(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            said = run(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def with_anthropic() -> None:
    """The Messages API, by the SDK's own loop of tools."""
    import anthropic

    tool = anthropic.beta_tool(run)
    anthropic.Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=1000,
        messages=TASK,  # type: ignore[arg-type]
        tools=[tool],
    ).until_done()


def with_langchain(model: str) -> None:
    """LangChain's own agent."""
    from langchain.agents import create_agent

    create_agent(model, tools=[run]).invoke({"messages": TASK})


def with_smolagents(*roles: str) -> None:
    """The agent that writes code, where its own notes have these roles instead of the assistant's."""
    import smolagents

    model = smolagents.OpenAIModel("policy", custom_role_conversions=dict(zip(roles[::2], roles[1::2], strict=True)))
    smolagents.CodeAgent(tools=[smolagents.tool(run)], model=model).run(TASK[0]["content"])


if __name__ == "__main__":
    globals()[f"with_{sys.argv[1]}"](*sys.argv[2:])
