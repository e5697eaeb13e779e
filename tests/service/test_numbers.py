"""Every number of every request, far beyond its range, is refused for good: nothing that a client would repeat for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.service.keys import digest
from counterpoint.service.records.structs import SamplerRecord, SavedRecord
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.models import Request
from tests.service.serving import KEYS, serving
from tests.service.test_fuzz import NoServers
from tests.service.test_models import Run, model_of
from tests.service.test_rest import a_model
from tests.support.polling import DEADLINE_SECONDS

pytestmark = pytest.mark.slow

FAR = [10**30, -(10**30), 2**63, -(2**63) - 1, 10**400]
"""Beyond the range of each number that the protocol has."""

SAMPLE = {
    "sampling_session_id": "s1:sample:0", "seq_id": 1, "num_samples": 1, "topk_prompt_logprobs": 1, "topk_sample_logprobs": 1,
    "prompt_alt_tokens_k": 1, "prompt_logprobs_last_n": 1, "prompt": {"chunks": [{"tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 1, "seed": 1, "stop": [1], "top_k": 1, "temperature": 1.0, "top_p": 1.0},
    "target_prompt_logprobs": {"data": [1], "shape": [1, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
}  # fmt: skip

RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "optim_step": ("POST", {"model_id": "s1:train:0", "seq_id": 1, "adam_params": {}}),
    "save_weights": ("POST", {"model_id": "s1:train:0", "seq_id": 1}),
    "save_weights_for_sampler": ("POST", {"model_id": "s1:train:0", "seq_id": 1}),
    "save_weights_external": ("POST", {"model_id": "s1:train:0", "seq_id": 1}),
    "load_weights": (
        "POST",
        {"path": "tinker://s1:train:0/weights/a", "optimizer": True, "model_id": "s1:train:0", "seq_id": 1},
    ),
    "create_model": (
        "POST",
        {"session_id": "s1", "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 1, "seed": 1}},
    ),
    "create_custom_loss": ("POST", {"session_id": "s1", "custom_loss_seq_id": 1, "inputs": [], "graph": {}}),
    "create_sampling_session": ("POST", {"session_id": "s1", "sampling_session_seq_id": 1, "base_model": "tiny"}),
    "retrieve_futures": (
        "POST",
        {"target": {"sampling_session_id": "s1:sample:0", "cloned_sampler_id": 1}, "prev_cursor": 1},
    ),
    "sessions/search": ("POST", {"limit": 1}),
    "training_runs/s1:train:0/checkpoints/weights/a/ttl": ("PUT", {"ttl_seconds": 1}),
}
"""Requests whose numbers are read at once."""


def far(body: Any, value: int) -> Iterator[tuple[str, Any]]:
    """Yields the body with each of its numbers in turn replaced, and where."""
    entries = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, inner in entries:
        changed = [(str(key), value)] if isinstance(inner, int | float) and not isinstance(inner, bool) else []
        for where, other in changed or ((f"{key}.{where}", other) for where, other in far(inner, value)):
            copy = body.copy()
            copy[key] = other
            yield where, copy


@pytest.mark.parametrize("path", RIGHT)
async def test_a_number_that_is_read_at_once_is_refused_at_once(path: str, tmp_path: Path) -> None:
    method, right = RIGHT[path]
    async with serving(tmp_path, NoServers()) as (client, service), asyncio.timeout(DEADLINE_SECONDS):
        model = a_model(service.store, 1, digest(KEYS[0]).hex())
        service.store.write(SamplerRecord("s1:sample:0", digest(KEYS[0]).hex()))
        service.store.write(SavedRecord(model.model_id, "weights", "a", 1, 1))
        await service._open(model)
        for value in FAR:
            for where, body in far(right, value):
                answer = await client.request(
                    method, f"/api/v1/{path}", data=msgspec.json.encode(body), headers={"X-API-Key": KEYS[0]}
                )
                said = await answer.text()
                assert answer.status == 422, (where, value, said)
                assert "service failed" not in said
        answer = await client.request(method, f"/api/v1/{path}", json=right, headers={"X-API-Key": KEYS[0]})
        assert answer.status != 422, await answer.text()


async def test_a_number_of_a_sample_is_refused_at_once_or_fails_by_its_clients_fault(tmp_path: Path) -> None:
    async with serving(tmp_path, NoServers()) as (client, service), asyncio.timeout(DEADLINE_SECONDS):
        a_model(service.store, 1, digest(KEYS[0]).hex())
        service.store.write(SamplerRecord("s1:sample:0", digest(KEYS[0]).hex()))
        headers, number = {"X-API-Key": KEYS[0]}, 0
        one = SAMPLE | {"prompt": {"chunks": [{"tokens": [1]}]}}
        for value in FAR:
            for where, body in (*far(SAMPLE, value), ("of one token", one | {"prompt_alt_tokens_k": value})):
                if where != "seq_id":
                    body["seq_id"] = number = number + 1
                answer = await client.post("/api/v1/asample", data=msgspec.json.encode(body), headers=headers)
                if answer.status == 200:
                    asked = {"request_id": (await answer.json())["request_id"]}
                    found = await (await client.post("/api/v1/retrieve_future", json=asked, headers=headers)).json()
                    assert found["category"] == "user", (where, value, found)
                else:
                    assert answer.status == 422, (where, value, await answer.text())


@pytest.mark.parametrize("name", ["limit", "offset"])
@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
async def test_a_number_of_a_query_is_refused(path: str, name: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        for value in FAR:
            answer = await client.get(f"/api/v1/{path}?{name}={value}", headers={"X-API-Key": KEYS[0]})
            said = await answer.text()
            assert answer.status == 422, (value, said)
            assert "service failed" not in said


@pytest.mark.parametrize("name", ["ttl_seconds", "sampling_session_seq_id"])
@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
def test_a_number_of_a_request_in_order_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, Run())
    for value in FAR:
        body = {"model_id": "s1:train:0", "seq_id": 1, "path": "a", name: value}
        assert model._asked(Request(kind, 1, msgspec.json.encode(body))).refused
    model._futures.close()


async def test_metadata_with_any_number_is_read_again(tmp_path: Path) -> None:
    """The protocol bounds no number of these: they are given back as they came."""
    async with serving(tmp_path) as (client, service):
        given = {"a": 10**30, "b": [-(2**70), 1.5]}
        session = await service.create_session(CreateSession(user_metadata=given), digest(KEYS[0]).hex())
        answer = await client.get(f"/api/v1/sessions/{session.session_id}", headers={"X-API-Key": KEYS[0]})
        assert answer.status == 200
        assert msgspec.json.decode(await answer.read())["user_metadata"] == given


async def test_a_number_that_is_only_early_comes_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        await service._open(a_model(service.store, 1, digest(KEYS[0]).hex()))
        body = {"model_id": "s1:train:0", "seq_id": 5000, "adam_params": {}}
        answer = await client.post("/api/v1/optim_step", json=body, headers={"X-API-Key": KEYS[0]})
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        body["seq_id"] = 2**31 - 1
        answer = await client.post("/api/v1/optim_step", json=body, headers={"X-API-Key": KEYS[0]})
        assert answer.status == 422, "no client is so far ahead"
