"""Who may use the service, and what another client's things look like: as if they were not there."""

from __future__ import annotations

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from counterpoint.service.config import QuotaConfig, TinkerConfig
from counterpoint.service.keys import check_access, digest
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import MAX_RECORD_BYTES, ModelRecord, SavedRecord, run_of
from counterpoint.service.tinker.app import Endpoints
from counterpoint.service.tinker.bodies import CreateSession, LoadWeights
from counterpoint.service.tinker.futures import answer
from counterpoint.service.tinker.intake import MAX_BODY_BYTES, TOKENS, zstd
from counterpoint.service.tinker.proto import MESSAGES
from counterpoint.service.tinker.refusals import BadRequest, NoSuchThing
from counterpoint.service.tinker.service import ATTENTION, FEED_FORWARD
from counterpoint.transport.errors import UserError
from counterpoint.transport.http.listening import listening
from tests.service.serving import KEYS, serving
from tests.support.polling import DEADLINE_SECONDS, until


async def status(client: Any, key: str, path: str, body: object) -> int:
    response = await client.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": key})
    return cast(int, response.status)


@pytest.mark.parametrize("then", ["deleted", "saved anew"])
async def test_a_state_that_goes_while_it_is_loaded_begins_no_model(tmp_path: Path, then: str) -> None:
    owner = digest(KEYS[0]).hex()
    async with serving(tmp_path) as (_, service):
        session = (await service.create_session(CreateSession(), owner)).session_id
        source = ModelRecord(f"{session}:train:1", run_of(f"{session}:train:1"), owner, 4, ATTENTION)
        saved = SavedRecord(source.model_id, "weights", "a", 1, 1)
        service.store.write(source)
        service.store.write(saved)
        asked = LoadWeights(path=saved.path, optimizer=True, session_id=session, model_seq_id=2)
        async with service.removing:  # as while states are removed
            loading = asyncio.create_task(service.load_weights(asked, owner, b""))
            await until(lambda: f"{session}:train:2" in service._beginning, "the beginning of the model")
            if then == "deleted":
                await service.weights.delete(saved.path, owner)
            else:
                service.store.keep(SavedRecord(source.model_id, "weights", "a", 2, 2), overwrite=True)
        with pytest.raises((NoSuchThing, BadRequest)):
            await loading
        assert service.store.model(f"{session}:train:2") is None
        assert not service._beginning


async def test_weights_are_not_said_to_be_loaded_into_a_model_that_has_later_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        session = (await service.create_session(CreateSession(), digest(KEYS[0]).hex())).session_id
        source = ModelRecord(f"{session}:train:1", run_of(f"{session}:train:1"), digest(KEYS[0]).hex(), 4,
                             [*ATTENTION, *FEED_FORWARD])  # fmt: skip
        saved = SavedRecord(source.model_id, "weights", "a", 1, 1)
        service.store.write(source)
        service.store.write(saved)
        model, lora = f"{session}:train:0", {"rank": 4}
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        assert await status(client, KEYS[0], "create_model", create) == 200
        step = {"model_id": model, "seq_id": 2, "adam_params": {}}
        assert await status(client, KEYS[0], "optim_step", step) == 200
        load = {"model_id": model, "seq_id": 1, "path": saved.path, "optimizer": True}
        assert await status(client, KEYS[0], "load_weights", load) == 400


async def test_an_adapter_of_elsewhere_is_loaded_into_a_model_of_the_same_modules(tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [*FEED_FORWARD, *ATTENTION]}
    (tmp_path / "peft" / "adapter_config.json").write_bytes(orjson.dumps(described))
    async with serving(tmp_path, adapters={"mine": tmp_path / "peft"}) as (client, service):
        session = (await service.create_session(CreateSession(), digest(KEYS[0]).hex())).session_id
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert await status(client, KEYS[0], "create_model", create) == 200
        load = {
            "model_id": f"{session}:train:0",
            "seq_id": 1,
            "path": "tinker://import/weights/mine",
            "optimizer": False,
        }
        assert await status(client, KEYS[0], "load_weights", load) == 200
        record = service.store.model(f"{session}:train:0")
        assert record is not None
        assert (record.start_adapter, record.alpha) == (str(tmp_path / "peft"), 8)


async def test_loading_into_a_model_that_was_closed_is_held_to_the_quota(tmp_path: Path) -> None:
    owner = digest(KEYS[0]).hex()
    async with serving(tmp_path, quota={"models": 1}) as (client, service):
        session = (await service.create_session(CreateSession(), owner)).session_id
        names = [f"{session}:train:{number}" for number in range(2)]
        for name in names:
            service.store.write(ModelRecord(name, run_of(name), owner, 4, ATTENTION))
        saved = SavedRecord(names[0], "weights", "a", 1, 1)
        service.store.write(saved)
        assert await status(client, KEYS[0], "get_info", {"model_id": names[0]}) == 200
        load = {"model_id": names[1], "seq_id": 1, "path": saved.path, "optimizer": True}
        assert await status(client, KEYS[0], "load_weights", load) == 402
        assert [*service._models] == names[:1]


async def test_an_unloading_is_answered_after_a_new_start_of_the_service(tmp_path: Path) -> None:
    headers = {"X-API-Key": KEYS[0]}
    async with serving(tmp_path) as (client, service):
        session = (await service.create_session(CreateSession(), digest(KEYS[0]).hex())).session_id
        model = f"{session}:train:0"
        service.store.write(ModelRecord(model, run_of(model), digest(KEYS[0]).hex(), 4, ATTENTION))
        asked = await client.post("/api/v1/unload_model", json={"model_id": model}, headers=headers)
        body = {"request_id": (await asked.json())["request_id"]}
    async with serving(tmp_path) as (client, _):
        told = await client.post("/api/v1/retrieve_future", json=body, headers=headers)
        assert (told.status, (await told.json())["model_id"]) == (200, model)


async def test_only_known_keys_get_in_and_each_has_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        assert await status(client, "tml-wrong", "create_session", {}) == 401
        created = await client.post("/api/v1/create_session", json={}, headers={"X-API-Key": KEYS[0]})
        session = (await created.json())["session_id"]
        saved = SavedRecord(f"{session}:train:0", "sampler_weights", "one", 1, 1, "directory")
        service.store.write(saved)
        bodies = {
            "session_heartbeat": {"session_id": session},
            "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
        }
        for path, body in bodies.items():
            assert await status(client, KEYS[0], path, body) == 200
            assert await status(client, KEYS[1], path, body) == 404
        other = await client.post("/api/v1/create_session", json={}, headers={"X-API-Key": KEYS[1]})
        own = (await other.json())["session_id"]
        asked = {"session_id": own, "sampling_session_seq_id": 0, "model_path": saved.path}
        assert await status(client, KEYS[1], "create_sampling_session", asked) == 404
        assert await status(client, KEYS[1], "retrieve_future", {"request_id": f"{session}:train:0:1"}) == 404


async def test_one_model_whose_journal_is_broken_keeps_the_service_from_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        session = await service.create_session(CreateSession(), digest(KEYS[0]).hex())
        name = f"{session.session_id}:train:0"
        record = ModelRecord(name, run_of(name), session.owner, 1, [])
        service.store.write(record)
        items = service.store.run_directory(record.run_id) / "items"
        items.mkdir(parents=True)
        (items / "item_1").write_bytes(b"no frames")
        await asyncio.wait_for(service.start(), DEADLINE_SECONDS)
        assert await status(client, KEYS[0], "get_info", {"model_id": record.model_id}) == 422
        assert await status(client, KEYS[0], "session_heartbeat", {"session_id": session.session_id}) == 200


async def test_a_session_that_has_ended_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        created = await client.post("/api/v1/create_session", json={}, headers={"X-API-Key": KEYS[0]})
        session = (await created.json())["session_id"]
        assert await status(client, KEYS[0], f"sessions/{session}/finish", {}) == 200
        assert await status(client, KEYS[0], "session_heartbeat", {"session_id": session}) == 410


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("session_heartbeat", {"session_id": "../../etc"}, 404),
        ("session_heartbeat", {}, 422),
        ("optim_step", {"model_id": "none:train:0"}, 422),
        ("optim_step", {"model_id": "none:train:0", "seq_id": 1}, 404),
        ("retrieve_future", {"request_id": "a" * 10_000}, 404),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 404),
    ],
)
async def test_requests_that_mean_nothing_are_refused(tmp_path: Path, path: str, body: object, expected: int) -> None:
    async with serving(tmp_path) as (client, _):
        assert await status(client, KEYS[0], path, body) == expected


async def test_bodies_are_bounded_and_plain(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        headers = {"X-API-Key": KEYS[0], "Content-Type": "application/x-protobuf"}
        long = await client.post(
            "/api/v1/forward_backward", data=io.BytesIO(bytes(MAX_BODY_BYTES + 1)), headers=headers
        )
        assert long.status == 413
        spaces = io.BytesIO(b"{}" + b" " * TOKENS.size)
        assert (await client.post("/api/v1/create_session", data=spaces, headers={"X-API-Key": KEYS[0]})).status == 413
        packed = await client.post("/api/v1/forward_backward", data=b"x", headers=headers | {"Content-Encoding": "br"})
        assert packed.status in (400, 415)


@pytest.mark.parametrize(("text", "said"), [("", "no key"), ("tml-short", "key 1"), ("other-" + "a" * 20, "key 1")])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    with pytest.raises(UserError, match=r"tml-.*a line"):
        check_access(TinkerConfig(keys_file=file))
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        check_access(TinkerConfig(keys_file=file))
    file.write_text(f"# ours\n{KEYS[0]}\n{KEYS[1]} anna\n")
    assert check_access(TinkerConfig(keys_file=file)) == {digest(KEYS[0]): "", digest(KEYS[1]): "anna"}


@pytest.mark.parametrize(("names", "quotas"), [("a/b", ""), ("a b", ""), ("anna", "berta")])
def test_wrong_names_of_keys_are_refused(tmp_path: Path, names: str, quotas: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEYS[0]} {names}\n")
    with pytest.raises(UserError, match="name"):
        check_access(TinkerConfig(keys_file=file, quotas={quotas: QuotaConfig()} if quotas else {}))


def test_other_machines_need_keys() -> None:
    assert not check_access(TinkerConfig())
    with pytest.raises(UserError, match="keys_file"):
        check_access(TinkerConfig(host="0.0.0.0"))


async def test_no_request_keeps_the_service_from_starting_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        created = await client.post("/api/v1/create_session", json={}, headers={"X-API-Key": KEYS[0]})
        session = (await created.json())["session_id"]
        model = {"session_id": session, "base_model": "tiny", "lora_config": {"rank": 1}}
        sampler = {"session_id": session, "base_model": "tiny"}
        for number in (-1, 2**31, 10**80):
            asked = sampler | {"sampling_session_seq_id": number}
            assert await status(client, KEYS[0], "create_sampling_session", asked) == 422
            assert await status(client, KEYS[0], "create_model", model | {"model_seq_id": number}) == 422
        long = orjson.dumps(model | {"model_seq_id": 1, "user_metadata": {"note": "x" * MAX_RECORD_BYTES}})
        refused = await client.post("/api/v1/create_model", data=io.BytesIO(long), headers={"X-API-Key": KEYS[0]})
        assert refused.status == 422
        assert service.store.models() == []


async def test_a_body_of_endless_lists_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        for depth, expected in ((10_000, 422), (100_000, 413)):
            body = b'{"model_id": "none", "seq_id": 1, "more": ' + b"[" * depth + b"]" * depth + b"}"
            refused = await client.post("/api/v1/optim_step", data=body, headers={"X-API-Key": KEYS[0]})
            assert refused.status == expected


async def test_compressed_bodies_are_bounded_before_they_are_unpacked(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        message = MESSAGES["ForwardBackwardRequest"](model_id="none:train:0", seq_id=1).SerializeToString()
        packed = zstd.compress(message)
        unsized = zstd.compress(message, options={zstd.CompressionParameter.content_size_flag: 0})
        bomb = zstd.compress(bytes(MAX_BODY_BYTES + 1))
        headers = {"X-API-Key": KEYS[0], "Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
        wrong = [
            packed[:5] + bytes([packed[5] + more]) + packed[6:] for more in (1, -1)
        ]  # how many bytes it says to have
        wrong += [unsized, message, packed + b"x", packed + packed, packed[:-1]]
        for body, expected in ((packed, 404), (bomb, 413), *((each, 422) for each in wrong)):
            answer = await client.post("/api/v1/forward_backward", data=body, headers=headers)
            assert answer.status == expected, body[:100]
        other = await client.post("/api/v1/optim_step", data=packed, headers=headers)
        assert other.status == 415


async def test_one_keys_results_push_out_none_of_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.service.tinker.futures.MOST_RESULTS", 2)
    async with serving(tmp_path, max_pending=1) as (client, service):
        owners = [digest(key).hex() for key in KEYS]
        sessions = [await service.create_session(CreateSession(), owner) for owner in owners]
        await service.results.of(owners[1]).complete(f"{sessions[1].session_id}:train:0:1", answer(path="kept"))
        for index in range(5):
            await service.results.of(owners[0]).complete(f"{sessions[0].session_id}:train:0:{index}", answer())
        service.results.of(owners[0]).begin("pending")
        service.results.of(owners[1]).begin("also pending")
        body = {"request_id": f"{sessions[1].session_id}:train:0:1"}
        found = await client.post("/api/v1/retrieve_future", json=body, headers={"X-API-Key": KEYS[1]})
        assert (await found.json())["path"] == "kept"
        assert await status(client, KEYS[0], "retrieve_future", body) == 404


def test_of_two_saves_at_once_one_has_the_name(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)

    def kept(number: int) -> bool:
        try:
            return store.keep(SavedRecord("s1:train:0", "weights", "same", number, number), overwrite=False)
        except FileExistsError:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(kept, range(1, 40))) == 1


async def test_a_session_ends_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        session = await service.create_session(CreateSession(), digest(KEYS[0]).hex())
        for reason in ("errored", "success"):
            body = {"reason": {"type": reason}, "detail": None}
            assert await status(client, KEYS[0], f"sessions/{session.session_id}/finish", body) == 200
        ended = service.store.session(session.session_id)
        assert ended is not None
        assert ended.ending == {"reason": {"type": "errored"}, "detail": None}


async def test_a_model_is_opened_again_once_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    may_end = asyncio.Event()

    class Closing:
        saving: tuple[int, ...] = ()
        run = SimpleNamespace(updates=0)

        async def close(self) -> None:
            await may_end.wait()
            done.append("closed")

    async def opened(record: ModelRecord) -> None:
        done.append("opened")
        service._models[record.model_id] = cast(Any, Closing())

    async with serving(tmp_path) as (_, service):
        session = await service.create_session(CreateSession(), "")
        name = f"{session.session_id}:train:0"
        service.store.write(ModelRecord(name, run_of(name), "", 1, []))
        service._models[name] = cast(Any, Closing())
        monkeypatch.setattr(service, "_open", opened)
        closing = asyncio.create_task(service._shut(name))
        await asyncio.sleep(0)
        asked = asyncio.create_task(service.model(name, ""))
        await until(lambda: bool(service._opening[name]._waiters), "the model is asked for")
        may_end.set()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.gather(closing, asked)
        assert done == ["closed", "opened"]


async def test_one_keys_connections_keep_out_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.transport.http.listening.MOST_CONNECTIONS", 40)
    asked = "GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\nX-API-Key: {}\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []

    async def opened(key: str) -> tuple[str, str]:
        """The status of a request on a new connection that stays open, and the head of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(asked.format(key).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        return head.split()[1], head

    async with serving(tmp_path) as (_, service), asyncio.timeout(DEADLINE_SECONDS):
        app = Endpoints(service, set(map(digest, KEYS))).app()
        async with listening(app, "127.0.0.1", 0, None) as port:
            greedy = [await opened(KEYS[0]) for _ in range(60)]
            assert [status for status, _ in greedy].count("200") == 20
            assert {status for status, _ in greedy} == {"200", "429"}
            assert "Retry-After: 1" in greedy[-1][1]
            assert "Connection: close" in greedy[-1][1]
            assert [(await opened(KEYS[1]))[0] for _ in range(10)] == ["200"] * 10
            assert (await opened("tml-of-a-stranger-000000"))[0] == "401"
            for writer in writers:
                writer.close()
