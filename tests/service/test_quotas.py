"""What a key may use: refusals in words, after which nothing is begun, and the SDK waits or ends as it should."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.run.items import encode_item
from counterpoint.service.config import PriceConfig, QuotaConfig, TinkerConfig
from counterpoint.service.journal import Journal
from counterpoint.service.keys import digest
from counterpoint.service.records import ledger
from counterpoint.service.records import store as store_module
from counterpoint.service.records.database import Database
from counterpoint.service.records.ledger import Ledger, Used
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import ModelRecord, SamplerRecord, SavedRecord, encoded
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.datums import tokens_of
from counterpoint.service.tinker.futures import FutureResult, Futures, TooMany
from counterpoint.service.tinker.models import Request
from counterpoint.service.tinker.proto import MESSAGES
from counterpoint.service.tinker.refusals import OverQuota
from counterpoint.service.tinker.tenants import SMALL_BYTES, Reserved, Tenants, cost
from counterpoint.transport.messages import Ask
from tests.service.serving import KEYS, serving
from tests.service.test_fuzz import message
from tests.service.test_models import Run, model_of
from tests.service.test_rest import OWNERS, a_model, a_state, answered, published
from tests.service.test_sampling import PROMPT, Servers, parameters, sampling
from tests.support.polling import DEADLINE_SECONDS, until

pytestmark = pytest.mark.slow


async def asked(client: Any, path: str, body: object, key: int = 0) -> tuple[int, Any]:
    response = await client.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": KEYS[key]})
    return response.status, await response.json()


def test_a_keys_quotas_are_its_own_and_else_those_of_all(tmp_path: Path) -> None:
    config = TinkerConfig(
        quota=QuotaConfig(models=2, disk_bytes=5), quotas={"anna": QuotaConfig(models=3, tokens_per_day=7)}
    )
    tenants = Tenants(config, {digest(KEYS[0]): "anna"}, Ledger(Database(tmp_path / "records.db")))
    assert tenants.quota(OWNERS[0]) == QuotaConfig(models=3, tokens_per_day=7, disk_bytes=5)
    assert tenants.quota(OWNERS[1]) == QuotaConfig(models=2, disk_bytes=5)
    assert tenants.name(OWNERS[1]) == f"key-{OWNERS[1][:8]}"


def test_use_has_a_price() -> None:
    price = PriceConfig(trained=2, forward=1, prompt=0.5, sampled=4, second=0.01)
    assert cost(Used(10**6, 10**6, 10**6, 10**6, 100), price) == pytest.approx(8.5)


async def test_a_further_model_is_refused_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, quota={"models": 1}) as (client, service):
        lora = {"rank": 4}
        sessions = [(await service.create_session(CreateSession(), owner)).session_id for owner in OWNERS]
        body = {"session_id": sessions[0], "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        assert [(await asked(client, "create_model", body))[0] for _ in "ab"] == [200, 200], "it is the same"
        status, said = await asked(client, "create_model", body | {"model_seq_id": 1})
        assert (status, "anna has 1 models open" in said["detail"]) == (403, True)
        assert len(service.store.models()) == 1
        assert (await asked(client, "create_model", body | {"session_id": sessions[1]}, key=1))[0] == 200

        def create() -> None:
            made = tinker.ServiceClient(base_url=str(client.make_url("")), api_key=KEYS[0])
            try:
                made.create_lora_training_client(base_model="tiny", rank=4).result()
            finally:
                made.close("success").result()

        with pytest.raises(tinker.PermissionDeniedError, match=r"tinker\.quota\.models"):
            await asyncio.to_thread(create)
        silent = a_model(service.store, 7, OWNERS[0])
        status, _ = await asked(client, "get_info", {"model_id": silent.model_id})
        assert status == 402, "its client was silent, and waits now"
        await service.finish_session(sessions[0], OWNERS[0], {})
        assert service.open_models(OWNERS[0]) == 0
        assert (await asked(client, "get_info", {"model_id": silent.model_id}))[0] == 200


async def test_models_that_come_back_at_once_keep_to_the_quota(tmp_path: Path) -> None:
    async with serving(tmp_path, quota={"models": 1}) as (client, service):
        models = [a_model(service.store, number, OWNERS[0]).model_id for number in (1, 2, 3)]
        told = await asyncio.gather(*(asked(client, "get_info", {"model_id": each}) for each in models))
        assert sorted(status for status, _ in told) == [200, 402, 402]
        closed = next(each for each in models if each not in service._models)
        status, _ = await asked(client, "retrieve_future", {"request_id": f"{closed}:create"})
        assert status == 402, "nobody remembers that it was made"
        session, _, number = closed.rpartition(":train:")
        body = {"session_id": session, "model_seq_id": int(number), "base_model": "tiny", "lora_config": {"rank": 5}}
        assert (await asked(client, "create_model", body))[0] == 422, "it is another"
        assert service.open_models(OWNERS[0]) == 1


async def test_the_sdk_waits_for_the_next_day_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sampling(tmp_path, quota={"tokens_per_day": 11}) as (sampler, servers, _, raw):
        for _ in "ab":
            await answered(sampler.sample(PROMPT, 1, parameters()))
        waits = sampler.sample(PROMPT, 1, parameters())
        body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 9,
                "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {"max_tokens": 4}}  # fmt: skip
        status, said = await asked(raw, "asample", body)
        assert (status, "anna has used 8 tokens today" in said["detail"]) == (402, True)
        assert len(servers.asked) == 2
        monkeypatch.setattr(ledger, "day_now", lambda: "2999-01-01")
        assert [list(each.tokens) for each in (await answered(waits)).sequences] == [[1]]


async def test_a_request_waits_for_the_next_day_unless_others_that_were_taken_need_it(tmp_path: Path) -> None:
    async with serving(tmp_path, quota={"tokens_per_day": 5}) as (client, service):
        session = (await service.create_session(CreateSession(), OWNERS[0])).session_id
        model = f"{session}:train:0"
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert (await asked(client, "create_model", body))[0] == 200

        async def offer(kind: str, number: int) -> int:
            if kind == "optim_step":
                body = {"model_id": model, "seq_id": number, "adam_params": {}}
                return (await asked(client, kind, body))[0]
            message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=number).SerializeToString()
            headers = {"X-API-Key": KEYS[0], "Content-Type": "application/x-protobuf"}
            response = await client.post("/api/v1/forward_backward", data=message, headers=headers)
            return int(response.status)

        assert await offer("forward_backward", 2) == 200
        await service.store.ledger.count(OWNERS[0], "s0:train:0:1", Used(trained=5))
        assert await offer("forward_backward", 3) == 402
        assert await offer("forward_backward", 1) == 200, "the second waits for it"
        assert await offer("forward_backward", 1) == 200, "it is known"
        assert await offer("forward_backward", 3) == 402
        assert await offer("optim_step", 4) == 402, "the third waits"
        assert await offer("optim_step", 3) == 200


async def test_what_requests_may_still_use_is_kept_for_them(tmp_path: Path) -> None:
    """Sixty requests of eight times 300 tokens at once, with a quota of 2,500 tokens a day: one is taken, then the next."""
    async with serving(tmp_path, servers := Servers(), quota={"tokens_per_day": 2500}) as (client, service):
        session = (await service.create_session(CreateSession(), OWNERS[0])).session_id
        service.store.write(SamplerRecord(f"{session}:sample:0", OWNERS[0]))
        servers.held = ("",)
        body = {"sampling_session_id": f"{session}:sample:0", "prompt": {"chunks": [{"tokens": [5]}]},
                "sampling_params": {"max_tokens": 300}, "num_samples": 8}  # fmt: skip
        told = await asyncio.gather(*(asked(client, "asample", body | {"seq_id": number}) for number in range(60)))
        assert sorted(status for status, _ in told) == [200, *[429] * 59]
        [taken] = [said["request_id"] for status, said in told if status == 200]
        assert (await asked(client, "asample", body | {"seq_id": 90, "num_samples": 9}))[0] == 403, "never"
        assert (await asked(client, "asample", body | {"seq_id": int(taken.rpartition(":")[2])}))[0] == 200, "the same"
        message = MESSAGES["ForwardBackwardRequest"](model_id="none", seq_id=1)
        message.data.add().model_input.add().encoded_text.tokens = bytes(4 * 100)
        assert tokens_of(message) == 100
        await until(lambda: len(servers.asked) == 8, "its samples")
        await asked(client, "cancel_future", {"request_id": taken})
        assert service.store.ledger.today(OWNERS[0]) == 1 + 8 * 2, "its prompt, and what was sampled"
        assert (await asked(client, "asample", body | {"seq_id": 91}))[0] == 200
        await service.finish_session(session, OWNERS[0], {})


@pytest.mark.parametrize("number", [1, 2])
async def test_a_repetition_and_a_new_start_give_nothing_back_of_what_is_kept(tmp_path: Path, number: int) -> None:
    """The first request is an item of the run; the second waits for it."""
    quota, model = {"tokens_per_day": 1000}, ""

    async def offer(client: Any, number: int, tokens: int) -> int:
        asked = MESSAGES["ForwardBackwardRequest"].FromString(message())
        datum = asked.data.pop()
        del asked.data[:]
        asked.data.extend([datum] * (tokens // 2))
        asked.model_id, asked.seq_id = model, number
        headers = {"X-API-Key": KEYS[0], "Content-Type": "application/x-protobuf"}
        response = await client.post("/api/v1/forward_backward", data=asked.SerializeToString(), headers=headers)
        return int(response.status)

    async with serving(tmp_path, quota=quota) as (client, service):
        session = (await service.create_session(CreateSession(), OWNERS[0])).session_id
        model = f"{session}:train:0"
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert (await asked(client, "create_model", body))[0] == 200
        assert [await offer(client, number, tokens) for tokens in (900, 2)] == [200, 200], "the second is known"
        assert await offer(client, 3, 200) == 429
    async with serving(tmp_path, quota=quota) as (client, service):
        await service.start()
        assert await offer(client, 3, 200) == 429


async def test_nothing_is_kept_for_requests_without_a_quota(tmp_path: Path) -> None:
    async with sampling(tmp_path) as (sampler, _, service, _):
        for _ in range(3):
            await answered(sampler.sample(PROMPT, 1, parameters()))
        assert not service.tenants.tokens._amounts


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(1, 50), st.sampled_from(["note", "close"])),
        max_size=60,
    )
)
def test_reserved_is_what_open_requests_may_use(events: list[tuple[str, int, int, str]]) -> None:
    reserved, amounts = Reserved(), dict[tuple[str, str], int]()
    for owner, number, amount, what in events:
        name = str(number)
        if what == "close":
            amounts.pop((owner, name), None)
            reserved.end(owner, name)
        else:
            reserved.note(owner, name, amount)
            amounts[owner, name] = amount
        with reserved.held(owner, 7):
            for each in "ab":
                wanted = sum(count for (whose, _), count in amounts.items() if whose == each)
                assert reserved.of(each) == wanted + 7 * (each == owner)


async def test_a_save_over_the_quota_keeps_its_place_and_saves_nothing(tmp_path: Path) -> None:
    run = Run()
    run.headers.append(None)  # type: ignore[arg-type]  # the first may be journalled, too
    model = model_of(tmp_path, run)
    await model.start()
    await model.offer(Request("save_weights", 1, b'{"model_id": "", "seq_id": 1}', "there is no room"))
    await until(lambda: "s1:train:0:1" in model._futures._held, "the refusal")
    told = await model._futures.fetch("s1:train:0:1", 1)
    assert told is not None
    assert b"there is no room" in told.body
    assert not run.headers[1].saves
    await model.close()
    model._futures.close()


async def test_the_disk_is_counted_by_owner_and_place(tmp_path: Path) -> None:
    async with serving(tmp_path, quota={"disk_bytes": 150_000}) as (_, service):
        store, tenants = service.store, service.tenants
        models = [a_model(store, number, OWNERS[number]) for number in (0, 1)]
        for name in ("one", "same"):
            store.write(a_state(tmp_path, models[0], name, 1, size=100_000))
        store.write(a_state(tmp_path, models[1], "other", 1, size=7))
        link = published(tmp_path, models[0], 3)
        shown = SavedRecord(models[0].model_id, "sampler_weights", "shown", 3, 1, str(link), size=50_000)
        store.write(shown)
        for number, size in ((0, 150_000), (1, 7)):
            model, saved = models[number], store.all(SavedRecord, "model_id = ?", models[number].model_id, noted=True)
            [session] = store.noted(store.sessions(OWNERS[number]))
            records = sum(len(encoded(each)) for each in (session, model, *saved))
            assert store.bytes_held()[OWNERS[number]] == size + records
        await service.sweep()
        with pytest.raises(OverQuota, match=r"tinker\.quota\.disk_bytes"):
            tenants.reserve_disk(OWNERS[0], "x", models[0], "save_weights_for_sampler", 0)
        with pytest.raises(OverQuota):
            tenants.writing(OWNERS[0], SMALL_BYTES + 1).__enter__()
        with tenants.writing(OWNERS[0], SMALL_BYTES):
            pass
        tenants.reserve_disk(OWNERS[1], "x", models[1], "save_weights_for_sampler", 0)
        store.delete(shown)
        await service.sweep()
        with pytest.raises(OverQuota):  # what such a save weighs is known
            tenants.reserve_disk(OWNERS[0], "x", models[0], "save_weights", 0)


async def test_saves_at_once_keep_to_the_quota_of_bytes(tmp_path: Path) -> None:
    """The first says what one weighs; then as many as fit, however many are asked for at once."""
    opened, config = set[str](), TinkerConfig(quota=QuotaConfig(disk_bytes=1000))
    tenants = Tenants(config, {}, Ledger(Database(tmp_path / "records.db")))
    model = ModelRecord("s1:train:0", "s1_train_0", "", 4, ["q_proj"])

    def reserve(name: str, *, is_due: bool = False) -> str:
        try:
            tenants.reserve_disk("", name, model, "save_weights", 20, is_due=is_due)
        except (OverQuota, TooMany) as error:
            return type(error).__name__
        opened.add(name)
        return ""

    assert [reserve(name) for name in "abc"] == ["", "TooMany", "TooMany"]
    assert reserve("d", is_due=True) == ""
    tenants.saved(model, 280, is_state=True)
    for name in opened:
        tenants.ended("", name)
    assert [reserve(name) for name in "efgh"] == ["", "", "OverQuota", "OverQuota"]
    for name in "ef":
        tenants.ended("", name)
        tenants.saved(model, 280, is_state=True)
    assert reserve("i") == "OverQuota"
    assert tenants.disk[""] == 840


async def test_what_is_written_while_the_disk_is_looked_at_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the look has passed its place already, or the file is not there yet: else the quota is open for a minute."""
    async with serving(tmp_path, quota={"disk_bytes": 2_500_000}) as (client, service):
        noted = {"user_metadata": {"text": "x" * 900_000}, "tags": [], "sdk_version": "0"}
        looked, may_end, may_write = threading.Event(), threading.Event(), threading.Event()
        write = service.store.write

        def slowly(record: Any) -> None:
            assert may_write.wait(DEADLINE_SECONDS)
            write(record)

        held = service.store.bytes_held

        def looks() -> Counter[str]:
            found = held()
            looked.set()
            assert may_end.wait(DEADLINE_SECONDS)
            return found

        monkeypatch.setattr(service.store, "bytes_held", looks)
        monkeypatch.setattr(service.store, "write", slowly)
        before = asyncio.create_task(asked(client, "create_session", noted))
        await until(lambda: service.tenants.disk[OWNERS[0]] > 0, "it counts, and is not on the disk")
        sweeping = asyncio.create_task(service.sweep())
        assert await asyncio.to_thread(looked.wait, DEADLINE_SECONDS)
        may_write.set()
        assert (await before)[0] == 200
        assert (await asked(client, "create_session", noted))[0] == 200
        may_end.set()
        await sweeping
        assert (await asked(client, "create_session", noted))[0] == 403
        await service.sweep()
        assert service.tenants.disk == held(), "the next look has what is there"


def test_a_request_that_ends_gives_back_what_it_kept_however_it_ends(tmp_path: Path) -> None:
    ended: list[str] = []
    futures = Futures(10, 1000, ended.append)
    for name in ("one", "two", "s1:train:0:3"):
        futures.begin(name)
    asyncio.run(futures.complete("one", FutureResult(b"")))
    futures.cancel("two")
    futures.cancel_all("s1:train:0")
    assert ended == ["one", "two", "s1:train:0:3"]
    futures.close()


async def test_a_model_that_is_opened_again_keeps_nothing_for_what_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, journal = Reserved(), Journal(tmp_path / "items", "s1_train_0", 1000)
    futures = Futures(10, 1000, lambda name: kept.end("", name))

    class Answering(Run):
        async def begin(self, header: Any, batch: Any, note: bytes) -> int:
            journal.write_item(Ask(1, encode_item(header), batch), note)
            return 1

    def opened() -> Any:
        model = model_of(tmp_path, Answering())
        model._futures.close()
        model._futures = futures
        monkeypatch.setattr(model._context.tenants, "reserve_tokens", kept.note)
        return model

    first = opened()
    await first.start()
    await first.offer(Request("forward_backward", 1, message()))
    await until(lambda: not futures.pending, "a result")
    await first.close()
    again = opened()
    await again.start()
    assert (kept.of(""), futures.pending) == (0, 0), "nothing would ever give it back"
    await again.close()
    futures.close()


async def test_a_request_that_is_not_taken_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, quota={"tokens_per_day": 1000}) as (_, service):
        record = a_model(service.store, 1, OWNERS[0])
        with pytest.raises(ValueError, match="without gaps"):
            await service.offer("forward_backward", record.model_id, 2**30, b"", OWNERS[0], 900)
        assert service.tenants.tokens.of(OWNERS[0]) == 0


async def test_what_clients_note_counts_and_is_not_read_for_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, quota={"disk_bytes": 3_000_000}) as (client, service):
        noted = {"user_metadata": {"text": "x" * 900_000}, "tags": [], "sdk_version": "0"}
        codes = [(await asked(client, "create_session", noted | {"project_id": "p"}))[0] for _ in range(5)]
        assert codes == [200, 200, 200, 403, 403]
        status, made = await asked(client, "create_session", {"tags": [], "sdk_version": "0"})
        assert status == 200, "else its owner could delete nothing"
        session = made["session_id"]
        lora = {"base_model": "tiny", "lora_config": {"rank": 4}}
        body = {"session_id": session, "model_seq_id": 0} | lora | {"user_metadata": noted["user_metadata"]}
        assert (await asked(client, "create_model", body))[0] == 403
        loss = {"session_id": session, "custom_loss_seq_id": 0, "inputs": ["x" * 500_000], "graph": {}}
        assert (await asked(client, "create_custom_loss", loss))[0] == 403
        assert service.store.bytes_held()[OWNERS[0]] < 3_000_000
        headers = {"X-API-Key": KEYS[0]}
        first = await (await client.get("/api/v1/sessions", headers=headers)).json()
        read = list[int]()
        rows = service.store.database.rows

        def noting(query: str, *values: Any) -> Any:
            found = rows(query, *values)
            read.extend(1 for each in found if "user_metadata" in query and "x" * 1000 in str(each["user_metadata"]))
            return found

        monkeypatch.setattr(service.store.database, "rows", noting)
        again = await (await client.get("/api/v1/sessions", headers=headers)).json()
        assert (again, len(first["sessions"]), read) == (first, 4, [])
        _, found = await asked(client, "sessions/search", {"limit": 2})
        assert len(read) <= 3, "only what is shown"
        assert [len(each["user_metadata"] or {}) for each in found["sessions"]] == [0, 1]
        _, found = await asked(client, "sessions/search", {"user_metadata": noted["user_metadata"], "limit": 2})
        assert len(found["sessions"]) == 2
        assert found["next_cursor"] is not None
        other = found["sessions"][0]["session_id"]
        await service.assign_project(other, OWNERS[0], "q")
        shown = await (await client.get(f"/api/v1/sessions/{other}", headers=headers)).json()
        assert shown["user_metadata"] == noted["user_metadata"], "a change keeps it"
        assert all(each.user_metadata is None for each in service.sessions._known.values())


def test_a_list_has_what_was_noted_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordStore(tmp_path)
    models = [a_model(store, number, "") for number in range(3)]
    size = len(encoded(models[0]))
    monkeypatch.setattr(store_module, "LISTED_BYTES", 2 * size)
    assert [each.user_metadata is not None for each in store.noted(store.models())] == [True, True, False]
    assert store.noted([models[0]]) == [models[0]]
    changed = msgspec.structs.replace(models[0], rank=8)
    store.write(changed)
    assert sorted(each.rank for each in store.models()) == [4, 4, 8], "what is written is seen"
