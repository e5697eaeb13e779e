"""Who uses a job's service for the Tinker SDK, as the page asks for it: whatever clients have called their things."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from counterpoint.serve.api.tenants import _newest
from counterpoint.service.ledger import Used
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.status import status_of, write_status
from counterpoint.service.tinker.store import ModelRecord, SamplerRecord, Session
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
        await asyncio.to_thread(write_status, status_of(service), service.store.directory)
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


async def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    await write_service(tmp_path / "job")
    place = tmp_path / "job" / "service"
    (place / "sessions" / "bad.json").write_text("[]")
    (place / "models" / "empty").mkdir()
    (place / "samplers" / "link.json").symlink_to("/etc/passwd")
    async with api(tmp_path / "job") as client:
        status, answer = await client.get("/jobs/job/tenants")
        assert (status, len(answer["sessions"]), len(answer["models"]), len(answer["samplers"])) == (200, 2, 1, 1)
        (place / "status.json").write_text("{}")


async def test_a_record_that_goes_away_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await write_service(tmp_path / "job")
    place = tmp_path / "job" / "service" / "sessions"
    (place / "s0.json").write_text("{}")
    scan = os.scandir

    def scanned(directory: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        found = scan(directory)
        if directory == place:
            entries = list(found)
            (place / "s0.json").unlink()
            return nullcontext(iter(entries))
        return found

    monkeypatch.setattr(os, "scandir", scanned)
    assert session in {each.session_id for each in _newest(place, "", Session)}
