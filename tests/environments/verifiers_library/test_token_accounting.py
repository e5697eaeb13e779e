"""Tokens and loss masks beside the library's own: the same episodes through its training client and through ours.

The library's client renders with its renderer of Qwen3, which continues a sampled turn token for token where it can, and keeps
the tokens in the trace's message graph. A stand-in for vLLM's endpoint answers it with what the scripted model says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from counterpoint.environments.chat import Chat
from counterpoint.environments.scripted import LOG_PROBABILITY, ScriptedModel
from counterpoint.environments.verifiers_library.environment import Verifiers
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout
from counterpoint.transport.records import Rollout
from tests.environments.verifiers_library.conftest import Running
from tests.environments.verifiers_library.test_environment import played

pytestmark = pytest.mark.slow

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>",
)  # fmt: skip

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Branch = tuple[list[int], list[int], list[float]]
"""Token ids, loss mask, log-probabilities."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes with the special tokens of Qwen3, and the part of its template that texts need."""
    directory = tmp_path_factory.mktemp("qwen")
    symbols = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=symbols, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@asynccontextmanager
async def endpoint(chat: Chat, answers: Sequence[str]) -> AsyncIterator[str]:
    """Stands in for vLLM's `/inference/v1/generate`."""
    said = iter(answers)

    async def generate(request: web.Request) -> web.Response:
        ids = [*chat.encode(next(said)), chat.stop_token_ids[0]]
        logprobs = {"content": [{"token": f"token_id:{each}", "logprob": LOG_PROBABILITY} for each in ids]}
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
        return web.json_response({"request_id": "1", "choices": [choice]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def theirs(environment: Verifiers, model: Path, chat: Chat, answers: Sequence[str]) -> list[Branch]:
    """The samples of the library's own training client: a branch of each trainable trace."""
    import verifiers.v1 as vf

    async with endpoint(chat, answers) as url, environment._env.serving():
        client = vf.TrainClientConfig(
            base_url=url, api_key_var="NO_KEY", renderer={"name": "qwen3"}, renderer_model_name=str(model)
        )
        episode = await environment._env.run_episode(
            environment._tasks[0], vf.ModelContext(model="policy", client=client)
        )
    assert episode.ok, episode.errors
    return [
        (branch.token_ids, [int(trained) for trained in branch.sampled_mask], branch.logprobs)
        for trace in episode.traces
        if trace.agent.trainable
        for branch in trace.branches
    ]


def ours(rollout: Rollout) -> list[Branch]:
    rollout.advantage = 1.0
    return [
        (sample.token_ids_T.tolist(), sample.loss_mask_T.tolist(), sample.log_probabilities_T.tolist())
        for sample in merge_rollout(rollout)
    ]


@pytest.mark.parametrize(
    ("sample", "answers"),
    [
        ("spelling", ["rats"]),
        ("guessing", ["5", "2", "1"]),
        ("debate", ["pro", "yes", "con", "no"]),
        ("spelling", []),
    ],
)
async def test_the_same_tokens_are_trained(sample: str, answers: list[str], qwen: Path, running: Running) -> None:
    arguments: dict[str, Any] = {"select": {"limit": 1}}
    if not answers:
        answers, arguments["env"] = ["hello", "rats", "###DONE###"], {"id": "user-sim"}
    chat = Chat(qwen)
    async with running(sample, **arguments) as environment:
        rollout = await played(environment, ScriptedModel(chat, answers))
    expected = await theirs(Verifiers(id=f"{__package__}.samples.{sample}", **arguments), qwen, chat, answers)
    assert ours(rollout) == expected
    assert sum(sum(mask) for _, mask, _ in expected) > 0
