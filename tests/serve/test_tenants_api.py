"""Who uses a job's service for the Tinker SDK, as the page asks for it: whatever clients have called their things."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from counterpoint.service.records.ledger import Used
from counterpoint.service.records.structs import ModelRecord, SamplerRecord
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.status import MOST_NAME, status_of, write_status
from tests.serve.api_client import api
from tests.service.serving import KEYS, serving
from tests.service.test_rest import OWNERS

HOSTILE = "<script>alert(1)</script>\u202e"


async def write_service(directory: Path) -> str:
    """A service with a client of each key, as it was left; returns the id of the first one's session."""
    await asyncio.to_thread(directory.mkdir)
    prices = {"trained": 2.0, "second": 1.0}
    async with serving(directory, quota={"models": 3, "tokens_per_day": 1000}, price=prices) as (_, service):
        sessions = [
            (await service.create_session(CreateSession(display_name=HOSTILE), owner)).session_id for owner in OWNERS
        ]
        model = f"{sessions[0]}:train:0"
        service.store.write(ModelRecord(model, model.replace(":", "_"), OWNERS[0], 8, []))
        service.store.write(SamplerRecord(f"{sessions[0]}:sample:0", OWNERS[0], path=f"tinker://{HOSTILE}", step=3))
        await service.store.ledger.count(OWNERS[0], f"{model}:1", Used(trained=500_000, seconds=0.5))
        await service.finish_session(sessions[1], OWNERS[1], {})
        await asyncio.to_thread(write_status, status_of(service), service.store)
    return sessions[0]


async def test_keys_sessions_models_samplers_and_the_ledger_are_shown(tmp_path: Path) -> None:
    async with api(tmp_path / "job") as client:
        assert (await client.get("/jobs/job/tenants"))[0] == 404
        session = await write_service(tmp_path / "job")
    async with api(tmp_path / "job") as client:
        status, answer = await client.get("/jobs/job/tenants")
        raw = str(answer)
    assert status == 200, answer
    other = f"key-{OWNERS[1][:8]}"
    assert {each["key"]: (each["tokens_today"], each["most_tokens"], each["models"]) for each in answer["keys"]} == {
        "anna": (500_000, 1000, 0),
        other: (0, 1000, 0),
    }
    assert {(each["key"], each["finished"]) for each in answer["sessions"]} == {("anna", False), (other, True)}
    assert [each["state"] for each in answer["models"]] == ["closed"]
    assert [(each["sampler"], each["step"]) for each in answer["samplers"]] == [(f"{session}:sample:0", 3)]
    [row] = answer["ledger"]
    assert (row["key"], row["trained"], row["seconds"], row["cost"]) == ("anna", 500_000, 0.5, 1.5)
    assert "\u202e" not in raw, "it would turn the direction of what is written"
    assert not any(part in raw for part in (*OWNERS, *KEYS))


async def test_a_status_of_a_former_version_has_no_records(tmp_path: Path) -> None:
    await write_service(tmp_path / "job")
    path = tmp_path / "job" / "service" / "status.json"
    status = msgspec.json.decode(path.read_bytes())
    for name in ("sessions", "models", "samplers", "newest"):
        del status[name]
    path.write_bytes(msgspec.json.encode(status))
    async with api(tmp_path / "job") as client:
        code, answer = await client.get("/jobs/job/tenants")
    assert (code, answer["sessions"], len(answer["keys"])) == (200, [], 2)


async def test_a_long_name_is_shown_in_part_and_what_is_no_status_is_no_service(tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "job").mkdir)
    async with serving(tmp_path / "job") as (_, service):
        await service.create_session(CreateSession(display_name="x" * 100_000), OWNERS[0])
        await asyncio.to_thread(write_status, status_of(service), service.store)
    async with api(tmp_path / "job") as client:
        _, answer = await client.get("/jobs/job/tenants")
        assert [len(each["name"]) for each in answer["sessions"]] == [MOST_NAME]
    (tmp_path / "job" / "service" / "status.json").write_text("[]")
    async with api(tmp_path / "job") as client:
        assert (await client.get("/jobs/job/tenants"))[0] == 404
