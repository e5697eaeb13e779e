"""A real vLLM with a parser of reasoning: JSON mode without tools answers JSON, and the reasoning apart from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway
from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.orchestrator.rollouts.play import PolicyModel
from counterpoint.transport.records import Rollout, Turn
from tests.environments.gateway.models import client_of, extends
from tests.support.tiny_model import CHAT_TEMPLATE, make_model
from tests.support.vllm_server import ServerProcess, run_server, tiny_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RENAMED = {"<pad>": "<think>", "<unused>": "</think>"}
END_OF_REASONING = 259
SCHEMA: Any = {"type": "object", "properties": {"a": {"const": 3}}, "required": ["a"], "additionalProperties": False}


def make_reasoning_model(directory: Path) -> Any:
    """Writes a random model whose prompts open the reasoning, and which ends it after a few tokens."""
    import torch

    model = make_model(directory, moe=False, seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight[END_OF_REASONING] *= 8  # half of its logits are then far above all others
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (directory / name).read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        (directory / name).write_text(text)
    template = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>")
    assert template != CHAT_TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    return model


@pytest.fixture(scope="module")
def reasoning_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("reasoning")
    model = make_reasoning_model(root / "model")
    config = tiny_config(root / "model", root, tool_parser="hermes", reasoning_parser="qwen3")
    yield from run_server(config, [root / "model"], [model])


async def test_json_mode_answers_json_and_the_reasoning_apart(reasoning_server: ServerProcess) -> None:
    chat = Chat(reasoning_server.config.model)
    pool = InferencePool(PoolConfig(urls=[reasoning_server.url])).model(reasoning_server.config.model)
    await pool.start()
    gateway = Gateway()
    sampling = SamplingParameters(max_tokens=200, stop_token_ids=list(chat.stop_token_ids))
    model = PolicyModel(Rollout("0-0", 0, "agent", 0), chat, pool, sampling)
    format: Any = {"type": "json_schema", "json_schema": {"name": "three", "schema": SCHEMA}}
    reasoned: list[str] = []
    try:
        async with gateway.session(model) as session, client_of(session) as client:
            for number in range(8):
                messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
                answer = await client.chat.completions.create(model="any", messages=messages, response_format=format)
                message = answer.choices[0].message
                assert json.loads(message.content or "") == {"a": 3}
                assert parts_of(message) == written_in(chat, model.rollout.turns[-1])
                reasoned.append(parts_of(message)[0])
                messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "more"}]
                free = await client.chat.completions.create(model="any", messages=messages)
                assert parts_of(free.choices[0].message) == written_in(chat, model.rollout.turns[-1])
            text: Any = {"format": {"type": "json_schema", "name": "three", "schema": SCHEMA}}
            response = await client.responses.create(model="any", input="three", text=text)
    finally:
        await gateway.close()
        await pool.release()
    assert any(reasoned)
    assert json.loads(response.output_text) == {"a": 3}
    constrained, free_turns = model.rollout.turns[0:16:2], model.rollout.turns[1:16:2]
    for before, after in zip(constrained, free_turns, strict=True):
        assert before.trained_tokens == 0
        assert after.trained_tokens == len(after.completion_ids)
        assert extends(after, before)


def parts_of(message: Any) -> tuple[str, str]:
    """Reasoning and content of an answer."""
    return (message.model_extra or {}).get("reasoning_content", ""), message.content or ""


def written_in(chat: Chat, turn: Turn) -> tuple[str, str]:
    """The same of the tokens: what comes before the end of the reasoning, and after it."""
    ids = turn.completion_ids.tolist()
    place = ids.index(END_OF_REASONING) if END_OF_REASONING in ids else len(ids)
    reasoning, content = chat.transcribe([ids[:place], ids[place:]])
    for special in ("<start>", "<end>", *RENAMED.values()):
        reasoning, content = reasoning.replace(special, ""), content.replace(special, "")
    return reasoning, content
