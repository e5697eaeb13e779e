"""Bodies are bounded for each key and for all, and are counted before objects are made of them."""

from __future__ import annotations

import asyncio
import gc
import io
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from google.protobuf.message import DecodeError

from counterpoint.service.keys import digest
from counterpoint.service.tinker import intake
from counterpoint.service.tinker.app import ENDPOINTS, PROTOBUF
from counterpoint.service.tinker.intake import MOST_FIELDS, RECORDS, zstd
from counterpoint.service.tinker.proto import MESSAGES, check_fields
from tests.service.serving import KEYS, serving
from tests.service.test_fuzz import message
from tests.support.polling import DEADLINE_SECONDS, until

MESSAGE = {"Content-Type": PROTOBUF, "X-API-Key": KEYS[0]}

REPEATED = [
    (b"\x1a\x00", "data without anything"),
    (b"\x1a\x02\x0a\x00", "chunks without anything"),
    (b"\x1a\x04\x12\x02\x0a\x00", "inputs with an empty name"),
    (b"\x2a\x00", "configuration of the loss"),
    (b"\x10\x01", "the same number"),
    (b"\x7a\x00", "a field that nobody knows"),
]


def nested(data: Any) -> int:
    """Counts the fields of a message as protobuf has read it."""
    count = 0
    for field, value in data.ListFields():
        values = value if field.is_repeated else [value]
        for each in values:
            count += 1 + (nested(each) if field.message_type is not None else 0)
        if field.is_repeated and field.message_type is None:
            count += 1  # the list itself
    return count


def test_fields_are_counted_as_protobuf_reads_them() -> None:
    data = message()
    assert check_fields(data, "ForwardBackwardRequest", 10**9) == nested(
        MESSAGES["ForwardBackwardRequest"].FromString(data)
    )


@pytest.mark.parametrize(
    "data", [b"\x1a", b"\x1a\x05\x00", b"\x10", b"\x10" + b"\xff" * 20, b"\x0b", b"\x1a\x02\x0b\x0c"]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        check_fields(data, "ForwardBackwardRequest", 100)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "what"), REPEATED)
@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_message_of_many_parts_is_refused_before_any_is_made(
    part: bytes, what: str, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MOST_FIELDS", 1000)
    async with serving(tmp_path) as (client, _):
        body = part * 1001
        headers = MESSAGE | ({"Content-Encoding": "zstd"} if is_packed else {})
        sent = zstd.compress(body) if is_packed else body
        refused = await client.post("/api/v1/forward_backward", data=sent, headers=headers)
        assert refused.status == 413, what


def test_a_list_of_numbers_counts_by_its_bytes() -> None:
    shape = MESSAGES["ForwardBackwardRequest"]()
    shape.data.add().loss_fn_inputs.add(key="a").value.shape.extend([1] * (MOST_FIELDS + 1))
    assert check_fields(shape.SerializeToString(), "ForwardBackwardRequest", MOST_FIELDS) > MOST_FIELDS


@pytest.mark.slow
async def test_memory_is_that_of_the_bytes_and_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 KB that unpack to 64 MB, of which protobuf would make 1.6 GB."""
    monkeypatch.setattr(intake, "MOST_FIELDS", 1000)  # memory is traced slowly
    body = zstd.compress(b"\x1a\x00" * (2**25 - 1))
    async with serving(tmp_path) as (client, _):
        headers = MESSAGE | {"Content-Encoding": "zstd"}
        tracemalloc.start()
        try:
            asked = [client.post("/api/v1/forward_backward", data=body, headers=headers) for _ in range(3)]
            assert {answer.status for answer in await asyncio.gather(*asked)} == {413}
            gc.collect()
            left, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 3 * 64 * 2**20 + 32 * 2**20
    assert left < 16 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("values", [b"[]", b'"a"'])
@pytest.mark.parametrize("endpoint", [(method, path) for method, path, _ in ENDPOINTS if method in ("POST", "PUT")])
async def test_json_of_many_values_is_refused_by_every_endpoint(
    endpoint: tuple[str, str], values: bytes, tmp_path: Path
) -> None:
    method, path = endpoint
    place = path.format(session="s1", model="s1:train:0", sampler="s1:sample:0", kind="weights", name="a")
    async with serving(tmp_path) as (client, _):
        body = b'{"user_metadata": {"a": [' + b",".join([values] * (900_000 // len(values))) + b"]}}"
        answer = await client.request(method, f"/api/v1{place}", data=io.BytesIO(body), headers={"X-API-Key": KEYS[0]})
        if (
            path == "/asample"
        ):  # the tokens of a prompt may be as many; there is nothing else in which these would be objects
            assert answer.status == 422
        elif path == "/telemetry" or path.startswith("/client"):  # nothing of it is read
            assert answer.status == 200
        elif path == "/forward_backward":
            assert answer.status == 422
        elif "copy" in path or "publish" in path or "auth" in path:
            assert answer.status == 400
        else:
            assert answer.status == 413


async def test_metadata_of_long_text_with_commas_is_taken(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        body = orjson.dumps({"user_metadata": {"a": ",[{" * RECORDS.values}})
        answer = await client.post("/api/v1/create_session", data=body, headers={"X-API-Key": KEYS[0]})
        assert answer.status == 200


async def test_a_key_with_large_bodies_is_asked_to_wait_and_another_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MOST_BYTES", 3 * 2**20)
    async with serving(tmp_path) as (client, service), asyncio.timeout(DEADLINE_SECONDS):
        owner = digest(KEYS[0]).hex()
        _, writer = await asyncio.open_connection(client.server.host, client.server.port)
        head = f"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEYS[0]}\r\nContent-Length: {2**20}\r\n\r\n"
        writer.write(head.encode() + b"{")  # and no end
        await until(lambda: service.intake._room.of(owner) == 2**20, "its room")
        small = await client.post("/api/v1/create_session", data=b"{}", headers={"X-API-Key": KEYS[0]})
        assert small.status == 200
        body = b'{"user_metadata": {"a": "' + b"x" * (2**20 - 1000) + b'"}}'
        refused, other = [
            await client.post("/api/v1/create_session", data=io.BytesIO(body), headers={"X-API-Key": key})
            for key in KEYS
        ]
        assert (refused.status, refused.headers["Retry-After"], other.status) == (429, "1", 200)
        writer.close()
        await until(lambda: not service.intake._room.of(owner), "the room is given back")
        again = await client.post("/api/v1/create_session", data=io.BytesIO(body), headers={"X-API-Key": KEYS[0]})
        assert again.status == 200


def test_a_key_that_has_its_share_of_room_sends_small_bodies_all_the_same() -> None:
    bodies = intake.Intake()
    with bodies.room("a", intake.MOST_BYTES // 2), bodies.room("b", intake.MOST_BYTES // 4), bodies.room("a", 100):
        pass


async def test_a_key_that_asks_for_much_rests_and_another_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "REST", 1e9)
    bodies, done = intake.Intake(alone=False), list[str]()

    async def compute(owner: str) -> None:
        await bodies.computed(owner, lambda: sum(range(10_000)))
        done.append(owner)

    for owner in "ab":
        await compute(owner)
    resting = [asyncio.create_task(compute(owner)) for owner in "aab"]
    await compute("c")
    assert done == ["a", "b", "c"]
    for each in resting:
        each.cancel()
    await asyncio.gather(*resting, return_exceptions=True)
    alone = intake.Intake()
    for _ in range(3):
        assert await alone.computed("", lambda: 7) == 7
