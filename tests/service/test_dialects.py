"""OpenAI's and Anthropic's APIs of the service: whose weights answer, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.service.keys import digest
from counterpoint.service.records.ledger import Used
from counterpoint.service.records.structs import SavedRecord
from tests.orchestrator.toy_model import make_toy_model
from tests.service.serving import KEYS, serving
from tests.service.test_rest import a_model
from tests.service.test_sampling import Servers
from tests.support.polling import until

pytestmark = pytest.mark.slow

WORDS = [{"role": "user", "content": "hello"}]
OWNERS = [digest(key).hex() for key in KEYS]


class ParsingServers(Servers):
    """Servers that also parse: no call and no reasoning is in what they wrote."""

    parses_reasoning = False

    @property
    def parser(self) -> ParsingServers:
        return self


async def asked(client: Any, path: str, key: str = KEYS[0], **fields: Any) -> tuple[int, Any]:
    response = await client.post(f"/oai/api/{path}", json=fields, headers={"Authorization": f"Bearer {key}"})
    body = await response.read()
    return response.status, orjson.loads(body) if response.content_type == "application/json" else body


async def test_a_clients_own_weights_answer_in_each_dialect(tmp_path: Path) -> None:
    servers = ParsingServers()
    async with serving(tmp_path, servers, Chat(make_toy_model(tmp_path / "toy")), max_tokens=128) as (client, service):
        model = a_model(service.store, 0, OWNERS[0])
        saved = SavedRecord(model.model_id, "sampler_weights", "w", 3, 1, str(tmp_path / "published"))
        service.store.write(saved)
        for path, fields in (
            ("v1/chat/completions", {"messages": WORDS}),
            ("v1/completions", {"prompt": "hello"}),
            ("v1/responses", {"input": "hello"}),
            ("v1/messages", {"messages": WORDS, "max_tokens": 5}),
        ):
            for name in (saved.path, "tiny"):
                code, answer = await asked(client, path, model=name, **fields)
                assert (code, answer["model"]) == (200, name), answer
            (adapter, _, _), (base, parameters, _) = servers.asked[-2:]
            assert adapter == (f"{model.run_id}.published", tmp_path / "published")
            assert base is None
            assert parameters.max_tokens < 128, "there is no room for so many"
            code, events = await asked(client, path, model=saved.path, stream=True, **fields)
            assert code == 200
            assert saved.path.encode() in events
        code, counted = await asked(client, "v1/messages/count_tokens", model="tiny", messages=WORDS, max_tokens=1)
        assert code == 200
        assert counted["input_tokens"] > 0
        [day] = service.store.ledger.days().values()
        used = day[OWNERS[0]]
        assert used.sampled == 12
        before = used.prompt
        await asked(client, "v1/chat/completions", model="tiny", messages=WORDS, n=3)
        assert (used.sampled, used.prompt) == (15, before + counted["input_tokens"])


async def test_what_is_not_the_clients_or_not_served_is_refused(tmp_path: Path) -> None:
    servers = ParsingServers()
    async with serving(tmp_path, servers, Chat(make_toy_model(tmp_path / "toy")), max_tokens=128) as (client, service):
        model, theirs = a_model(service.store, 0, OWNERS[0]), a_model(service.store, 1, OWNERS[1])
        state = SavedRecord(model.model_id, "weights", "w", 3, 1)
        other = SavedRecord(theirs.model_id, "sampler_weights", "w", 3, 1, str(tmp_path / "published"))
        for record in (state, other):
            service.store.write(record)
        path = "v1/chat/completions"
        for code, fields in (
            (404, {"model": other.path}),
            (404, {"model": "another"}),
            (404, {"model": "tinker://x/inflight/newest"}),
            (400, {"model": state.path}),
            (400, {"model": 5}),
            (400, {}),
            (400, {"model": "tiny", "prompt_logprobs": 1}),
            (400, {"model": "tiny", "messages": [{"role": "user", "content": "x " * 200}]}),
            (400, {"model": "tiny", "n": 1000}),
        ):
            assert (await asked(client, path, **{"messages": WORDS} | fields))[0] == code, fields
        assert (await asked(client, path, "tml-cccccccccccccccccccc", model="tiny", messages=WORDS))[0] == 401
        assert (await client.get("/oai/api/v1/models")).status == 401
        code, answer = await asked(client, "v1/messages", model=other.path, messages=WORDS, max_tokens=1)
        assert (code, answer["type"]) == (404, "error")
        assert not servers.asked


async def test_a_key_over_its_tokens_waits(tmp_path: Path) -> None:
    servers, chat = ParsingServers(), Chat(make_toy_model(tmp_path / "toy"))
    async with serving(tmp_path, servers, chat, max_tokens=128, quota={"tokens_per_day": 150}) as (client, _):
        found = [await asked(client, "v1/chat/completions", model="tiny", messages=WORDS) for _ in range(2)]
        assert [code for code, _ in found] == [200, 429]
        assert "tinker.quota.tokens_per_day" in found[1][1]["error"]["message"]


async def test_an_abandoned_request_ends_at_the_servers_and_counts(tmp_path: Path) -> None:
    servers, chat = ParsingServers(), Chat(make_toy_model(tmp_path / "toy"))
    async with serving(tmp_path, servers, chat, max_tokens=128) as (client, service):
        servers.held = ("-2",)
        asking = asyncio.create_task(asked(client, "v1/chat/completions", model="tiny", messages=WORDS, n=3))
        await until(lambda: len(servers.asked) == 3, "the samples")
        asking.cancel()
        await until(lambda: servers.ended == 1, "the last one has ended at the servers")
        await until(lambda: bool(service.store.ledger.days()), "it counts")
        [day] = service.store.ledger.days().values()
        assert day[OWNERS[0]].sampled == 2 + 2


async def test_a_client_is_told_when_to_ask_again_unless_that_is_another_day(tmp_path: Path) -> None:
    chat, fields = Chat(make_toy_model(tmp_path / "toy")), {"model": "tiny", "messages": WORDS}
    for used, waits in ((0, True), (150, False)):
        quota = {"tokens_per_day": 150}
        async with serving(tmp_path / str(used), ParsingServers(), chat, max_tokens=128, quota=quota) as (
            client,
            service,
        ):
            await service.store.ledger.count(OWNERS[0], "s0:train:0:1", Used(trained=used))
            with service.tenants.tokens.held(OWNERS[0], 150):
                answer = await client.post(
                    "/oai/api/v1/chat/completions", json=fields, headers={"Authorization": f"Bearer {KEYS[0]}"}
                )
            assert (answer.status, "Retry-After" in answer.headers) == (429, waits)
