"""A traced loss is taken, or refused in words; asked for again, it is the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.service.keys import digest
from counterpoint.service.records.structs import SessionRecord
from tests.service.serving import KEYS, serving
from tests.support.polling import DEADLINE_SECONDS
from tests.trainer.losses.traced import traced


def a_loss(logprobs: Any) -> Any:
    return -logprobs.sum(), {}


async def test_a_loss_is_kept_and_a_hostile_one_refused(tmp_path: Path) -> None:
    body = msgspec.json.decode(traced(a_loss, {"logprobs": 1})) | {"session_id": "s1", "name": "a_loss"}
    hostile = copy.deepcopy(body)
    hostile["graph"]["nodes"][1]["target"] = "os.system"
    other = copy.deepcopy(body)
    other["graph"]["nodes"][2]["target"] = "operator.invert"
    headers = {"X-API-Key": KEYS[0]}
    async with serving(tmp_path) as (client, service):
        service.store.write(SessionRecord("s1", digest(KEYS[0]).hex()))
        said = []
        for number, each in ((0, body), (0, body), (0, other), (1, hostile), (2, body | {"graph": [1] * 100})):
            given = each | {"custom_loss_seq_id": number}
            async with client.post("/api/v1/create_custom_loss", json=given, headers=headers) as response:
                assert response.status == 200, await response.text()
                request_id = (await response.json())["request_id"]
            found = await service.retrieve(request_id, digest(KEYS[0]).hex(), DEADLINE_SECONDS)
            assert found is not None
            said.append(msgspec.json.decode(found.body).get("loss_id", "refused"))
        async with client.post(
            "/api/v1/create_custom_loss", json=body | {"custom_loss_seq_id": 9}, headers={"X-API-Key": KEYS[1]}
        ) as response:
            assert response.status == 404
        assert said == ["s1:loss:0", "s1:loss:0", "s1:loss:0", "refused", "refused"]
        assert service.store.loss("s1:loss:1") is None
    async with serving(tmp_path) as (_, service):  # started again, before the client has the answer
        found = await service.retrieve("s1:loss:0", digest(KEYS[0]).hex(), DEADLINE_SECONDS)
        assert found is not None
        assert b"s1:loss:0" in found.body
