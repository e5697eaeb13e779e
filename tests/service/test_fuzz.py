"""Whatever bytes come, the service answers at once, with nothing that the SDK repeats, and goes on.

As a program: `python -m tests.service.test_fuzz 100000` sends so many.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from counterpoint.inference.base import InferenceError
from counterpoint.service.keys import digest
from counterpoint.service.tinker.app import ENDPOINTS, PROTOBUF
from tests.service.serving import KEYS, serving
from tests.service.test_rest import a_model

pytestmark = pytest.mark.slow

FINAL = {200, 400, 401, 404, 405, 410, 413, 415, 422, 429}
"""Statuses that the SDK does not repeat, and 429: a request that is too far ahead of a missing one is to come again."""

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 1e308, "", "s1", "s1:train:0", "s1:sample:0", "../x", "\0", "é" * 999, [], {}, [[]],
]  # fmt: skip


class NoServers:
    """Servers that have no answer."""

    async def sample(self, *_: object) -> None:
        raise InferenceError("no server")

    score = sample


def bodies() -> list[dict[str, Any]]:
    """Bodies that are right, to be spoilt."""
    model = {"model_id": "s1:train:0", "seq_id": 1}
    session = {"session_id": "s1", "model_seq_id": 1, "sampling_session_seq_id": 1, "base_model": "tiny"}
    sample = {
        "sampling_session_id": "s1:sample:0",
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {},
    }
    saved = {"path": "tinker://s1:train:0/weights/a", "tinker_path": "tinker://s1:train:0/weights/a", "optimizer": True}
    return [
        model | {"adam_params": {"learning_rate": 1e-4}, "path": "a", "ttl_seconds": 5, "kind": "inflight"},
        session | {"lora_config": {"rank": 1}, "user_metadata": {"a": "b"}, "model_path": saved["path"]},
        sample | {"request_id": "s1:sample:0:1", "num_samples": 2, "topk_sample_logprobs": 2},
        session | saved | {"optimizer_config": {"type": "adamw"}},
        {
            "target": {"sampling_session_id": "s1:sample:0"},
            "prev_cursor": 0,
            "timeout": 0,
            "request_id": "s1:train:0:1",
        },
        {
            "limit": 2,
            "cursor": {"last_created_at": "2026-01-01", "last_session_id": "s"},
            "statuses": [{"type": "active"}],
        },
    ]


def message() -> bytes:
    """A request in protobuf that is right."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[2, 3], dtype="int64", shape=[2])},
    )
    asked = types.ForwardBackwardInput(data=[datum] * 2, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id="s1:train:0", seq_id=1)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def spoilt(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with some replaced, left out or put in."""
    result = bytearray(data)
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(result) + 1)
        result[at : at + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
    return bytes(result)


def spoilt_json(body: dict[str, Any], chance: random.Random) -> bytes:
    """The body with some values replaced, or its bytes spoilt."""
    for _ in range(chance.randrange(3)):
        body = body | {chance.choice([*body]): chance.choice(VALUES)}
    try:
        data = orjson.dumps(body)
    except TypeError:  # an integer that JSON's reader in Rust does not have
        data = b"{}"
    return spoilt(data, chance) if chance.random() < 0.3 else data


async def fuzz(count: int, directory: Path, seed: int) -> None:
    """Sends so many bodies. Raises `AssertionError`."""
    chance, right, given = random.Random(seed), message(), bodies()
    places = [(method, path) for method, path, _ in ENDPOINTS if "finish" not in path]
    async with serving(directory, NoServers()) as (client, service):
        model = a_model(service.store, 1, digest(KEYS[0]).hex())
        await service._open(model)
        for index in range(count):
            method, path = chance.choice(places)
            place = path.format(session="s1", model="s1:train:0", sampler="s1:sample:0", kind="weights", name="a")
            is_message = path == "/forward_backward"
            body = spoilt(right, chance) if is_message else spoilt_json(chance.choice(given), chance)
            headers = {"X-API-Key": KEYS[0], "Content-Type": PROTOBUF if is_message else "application/json"}
            if chance.random() < 0.05:
                headers["Content-Encoding"] = "zstd"
            async with asyncio.timeout(60):
                answer = await client.request(method, f"/api/v1{place}", data=body, headers=headers)
                said = await answer.text()
            assert answer.status in FINAL, (index, method, place, body, answer.status, said)
        alive = await client.post(
            "/api/v1/session_heartbeat", json={"session_id": "s1"}, headers={"X-API-Key": KEYS[0]}
        )
        assert alive.status == 200


async def test_no_body_breaks_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.service.tinker.app.POLL_SECONDS", 0.0)
    monkeypatch.setattr("counterpoint.service.tinker.app.MANY_SECONDS", 0.0)
    await fuzz(1000, tmp_path, 0)


if __name__ == "__main__":
    from counterpoint.service.tinker import app

    app.POLL_SECONDS = app.MANY_SECONDS = 0.0
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(fuzz(int(sys.argv[1]), Path(place), 1))
    print(f"{sys.argv[1]} bodies")
