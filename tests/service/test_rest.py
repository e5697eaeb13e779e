"""The SDK's REST client reads and deletes what a service keeps, as its own methods do."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyrage
import pytest
import tinker
from tinker import types

from counterpoint.service.keys import digest
from counterpoint.service.records.ledger import Used
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import (
    LossRecord,
    ModelRecord,
    SamplerRecord,
    SavedRecord,
    SessionRecord,
    run_of,
)
from counterpoint.service.tinker import app
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.service import ATTENTION, Service
from counterpoint.service.tinker.weights import external, retention
from counterpoint.transport.files.atomic import STABLE, remove_directory
from tests.service.serving import KEYS, serving
from tests.support.polling import DEADLINE_SECONDS, until

OWNERS = [digest(key).hex() for key in KEYS]


def a_model(store: RecordStore, number: int, owner: str, created: float = 1.0) -> ModelRecord:
    """A model of a session of its own."""
    session = SessionRecord(f"s{number}", owner, user_metadata={"purpose": f"no {number}"}, display_name=f"Run {number} of mine",
                      created=created)  # fmt: skip
    name = f"{session.session_id}:train:0"
    record = ModelRecord(
        name, run_of(name), owner, 4, ATTENTION, user_metadata={"renderer_name": "role_colon"}, created=created
    )
    store.write(session)
    store.write(record)
    return record


def a_state(directory: Path, model: ModelRecord, name: str, step: int, **values: Any) -> SavedRecord:
    """A saved state, also on the disk."""
    place = directory / "trainer" / model.run_id / "saved" / f"step_{step}"
    if step:
        place.mkdir(parents=True, exist_ok=True)
        (place / STABLE).touch()
    return SavedRecord(model.model_id, "weights", name, step, step, created=float(step), **values)


def published(directory: Path, model: ModelRecord, number: int) -> Path:
    """Weights for samplers, on the disk."""
    link = directory / f"run_{model.run_id}" / "published" / f"s{number}"
    place = link.with_name(f".{link.name}.1")
    place.mkdir(parents=True)
    (place / STABLE).touch()
    (place / "adapter.bin").write_bytes(bytes(100))
    link.symlink_to(place.name)
    return link


@asynccontextmanager
async def rest(directory: Path) -> AsyncIterator[tuple[tinker.RestClient, Any, Service]]:
    async with serving(directory) as (client, service):
        made = asyncio.to_thread(tinker.RestClient, base_url=str(client.make_url("")), api_key=KEYS[0])
        found = await made
        yield found, client, service
        await answered(found.holder.run_coroutine_threadsafe(found.holder.aclose()).future())


async def answered(future: Any) -> Any:
    return await asyncio.to_thread(future.result)


@pytest.mark.slow
async def test_the_rest_client_reads_runs_checkpoints_and_sessions(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, _, service):
        store = service.store
        models = [a_model(store, number, OWNERS[number == 3], number) for number in range(4)]
        store.write(a_state(tmp_path, models[1], "one", 1, user_metadata={"batch": "7"}, size=5))
        store.write(SavedRecord(models[1].model_id, "sampler_weights", "two", 2, 2, "somewhere", created=2.0))
        store.write(SamplerRecord("s1:sample:0", OWNERS[0]))
        page = await answered(client.list_training_runs(limit=2))
        assert [each.training_run_id for each in page.training_runs] == ["s2:train:0", "s1:train:0"]
        assert (page.cursor.total_count, page.cursor.limit) == (3, 2)
        assert len((await answered(client.list_training_runs(limit=2, offset=2))).training_runs) == 1
        run = await answered(client.get_training_run_by_tinker_path("tinker://s1:train:0/weights/one"))
        assert (run.base_model, run.lora_rank, run.user_metadata) == ("tiny", 4, {"renderer_name": "role_colon"})
        assert run.last_checkpoint.checkpoint_id == "weights/one"
        assert run.last_sampler_checkpoint.tinker_path == "tinker://s1:train:0/sampler_weights/two"
        listed = (await answered(client.list_checkpoints("s1:train:0"))).checkpoints
        assert [each.checkpoint_type for each in listed] == ["sampler", "training"]
        assert (listed[1].user_metadata, listed[1].size_bytes, listed[1].expires_at) == ({"batch": "7"}, 5, None)
        assert len((await answered(client.list_user_checkpoints())).checkpoints) == 2
        info = await answered(client.get_weights_info_by_tinker_path("tinker://s1:train:0/weights/one"))
        assert (info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed) == (4, True, False, False)
        assert (await answered(client.list_sessions())).sessions == ["s2", "s1", "s0"]
        session = await answered(client.get_session("s1"))
        assert (session.training_run_ids, session.sampler_ids) == (["s1:train:0"], ["s1:sample:0"])
        assert session.user_metadata == {"purpose": "no 1"}
        assert (await answered(client.get_sampler("s1:sample:0"))).base_model == "tiny"
        theirs = a_state(tmp_path, models[3], "one", 1)
        store.write(theirs)
        for hidden in (
            client.get_training_run("s3:train:0"),
            client.get_session("s3"),
            client.list_checkpoints("s3:train:0"),
            client.get_weights_info_by_tinker_path(theirs.path),
            client.delete_checkpoint_from_tinker_path(theirs.path),
            client.set_checkpoint_ttl_from_tinker_path(theirs.path, 1),
        ):
            with pytest.raises(tinker.NotFoundError):
                await answered(hidden)
        assert store.saved(theirs.path) == theirs


async def test_external_weights_are_fetched_by_signed_urls_of_each_file(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, http, service):
        model, theirs = a_model(service.store, 0, OWNERS[0]), a_model(service.store, 1, OWNERS[1])
        link = published(tmp_path, model, 3)
        for name in external.FILES:
            (link / name).write_bytes(name.encode())
        (link / "probe.json").write_bytes(b"{}")
        identity = pyrage.x25519.Identity.generate()
        plain = SavedRecord(model.model_id, "external_weights", "out", 3, 1, str(link))
        secret = msgspec.structs.replace(plain, name="secret", recipients=[str(identity.to_public())])
        for record in (plain, secret, SavedRecord(theirs.model_id, "external_weights", "out", 3, 1, str(link))):
            service.store.write(record)
        found = await answered(client.get_external_weights_urls(plain.path))
        assert sorted(found.urls) == sorted(external.FILES)
        for name, url in found.urls.items():
            async with http.session.get(url) as response:
                assert (response.status, await response.read()) == (200, name.encode())
        one = found.urls[external.FILES[0]]
        for given, scheme in (("https", "https"), ("http", "http"), ("javascript", "http")):
            asked = f"/api/v1/training_runs/{model.model_id}/checkpoints/external_weights/out/external_weights_urls"
            async with http.get(asked, headers={"X-API-Key": KEYS[0], "X-Forwarded-Proto": given}) as response:
                assert {url.partition(":")[0] for url in (await response.json())["urls"].values()} == {scheme}
        changed = (
            one.replace(external.FILES[0], "probe.json"),
            one.replace(external.FILES[0], external.FILES[1]),
            one.replace("s0:train:0", "s1:train:0"),
            one.replace("expires=1", "expires=2"),
            one.replace("expires=", "expires=x"),
            one.partition("?")[0],
        )
        for url in changed:
            async with http.session.get(url) as response:
                assert response.status == 403, url
        encrypted = await answered(client.get_external_weights_urls(secret.path))
        for name, url in encrypted.urls.items():
            async with http.session.get(url) as response:
                assert pyrage.decrypt(await response.read(), [identity]) == name.removesuffix(external.AGE).encode()
        with pytest.raises(tinker.NotFoundError):
            await answered(client.get_external_weights_urls("tinker://s1:train:0/external_weights/out"))
        await answered(client.delete_checkpoint_from_tinker_path(plain.path))
        async with http.session.get(one) as response:
            assert response.status == 404


async def test_one_key_cannot_take_all_threads_by_files_that_are_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, most, may_go = [0], [0], threading.Event()

    def opened(*given: Any) -> Any:
        opening[0] += 1
        most[0] = max(most[0], opening[0])
        may_go.wait(DEADLINE_SECONDS)
        opening[0] -= 1
        return external.open_file(*given)

    monkeypatch.setattr(app, "open_file", opened)
    async with rest(tmp_path) as (client, http, service):
        model = a_model(service.store, 0, OWNERS[0])
        link = published(tmp_path, model, 3)
        for name in external.FILES:
            (link / name).write_bytes(name.encode())
        key = str(pyrage.x25519.Identity.generate().to_public())
        saved = SavedRecord(model.model_id, "external_weights", "out", 3, 1, str(link), recipients=[key])
        service.store.write(saved)
        url = next(iter((await answered(client.get_external_weights_urls(saved.path))).urls.values()))

        async def status() -> int:
            async with http.session.get(url) as response:
                await response.read()
                return int(response.status)

        fetching = [asyncio.create_task(status()) for _ in range(app.MOST_FETCHED + 3)]
        try:
            await until(lambda: sum(each.done() for each in fetching) == 3, "the refusals")
        finally:
            may_go.set()
        assert sorted(await asyncio.gather(*fetching)) == [200] * app.MOST_FETCHED + [429] * 3
        assert most == [1]


@pytest.mark.parametrize(
    "recipients", [["age1x"], ["ssh-rsa x"], ["\0"], [str(pyrage.x25519.Identity.generate().to_public())] * 11]
)
def test_recipients_that_are_none_are_refused(recipients: list[str]) -> None:
    with pytest.raises(BadRequest, match="age_encryption_recipients"):
        external.check_recipients(recipients)


async def test_a_key_sees_what_it_has_used(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, _, service):
        service.config.price.prompt = 2.0
        for number, owner in enumerate(OWNERS):
            await service.store.ledger.count(owner, f"s{number}:train:0:1", Used(trained=5, prompt=10**6, seconds=1.0))
        today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        window = {"starting_on": today - timedelta(days=3), "ending_before": today + timedelta(days=3)}
        with warnings.catch_warnings(action="ignore"):
            data = (await answered(client.get_billing_usage(**window))).data
            storage = (await answered(client.get_current_checkpoint_storage_usage())).data
        assert [(each.event_info.type, each.event_info.token_count, each.estimated_cost_usd) for each in data] == [
            ("training", 5, None),
            ("sampling_prefill", 10**6, 2.0),
        ]
        assert storage == []


async def test_a_project_is_a_label_of_sessions_by_which_the_ledger_counts(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, _, service):
        session = (await service.create_session(CreateSession(project_id="one"), OWNERS[0])).session_id
        with pytest.raises(BadRequest, match="project_id"):
            await service.create_session(CreateSession(project_id="../one"), OWNERS[0])
        models = [a_model(service.store, number, OWNERS[0], float(number)) for number in (1, 2)]
        service.store.write(a_state(tmp_path, models[0], "a", 1, size=3))
        count = service.store.ledger.count
        await count(OWNERS[0], f"{session}:sample:0:1", Used(sampled=1))
        await answered(client.assign_session_project(session, "two"))
        await answered(client.assign_session_project("s1", "two"))
        await count(OWNERS[0], f"{session}:sample:0:2", Used(sampled=2))
        store = RecordStore(tmp_path / "service")  # as another process finds it
        assert store.session("s1") is not None
        await store.ledger.count(OWNERS[0], f"{models[0].model_id}:1", Used(trained=4))
        [day] = RecordStore(tmp_path / "service").ledger.days().values()
        assert day == {f"{OWNERS[0]}/one": Used(sampled=1), f"{OWNERS[0]}/two": Used(sampled=2, trained=4)}
        runs = (await answered(client.list_training_runs(project_id="two"))).training_runs
        assert [each.training_run_id for each in runs] == ["s1:train:0"]
        with warnings.catch_warnings(action="ignore"):
            found = await answered(client.search_sessions(types.SessionSearchRequest(project_ids=["two"])))
            storage = (await answered(client.get_current_checkpoint_storage_usage("two"))).data
        assert {(each.session_id, each.project_id) for each in found.sessions} == {(session, "two"), ("s1", "two")}
        assert [(each.project_id, each.size_bytes) for each in storage] == [("two", 3)]


async def test_sessions_are_searched(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, _, service):
        for number in range(4):
            a_model(service.store, number, OWNERS[number == 3], number)
        one = service.store.session("s1")
        assert one is not None
        service.store.write(msgspec.structs.replace(one, finished=True, ending={"reason": {"type": "errored"}}))

        async def found(**values: Any) -> list[str]:
            with warnings.catch_warnings(action="ignore"):
                page = await answered(client.search_sessions(types.SessionSearchRequest(**values)))
                names = [each.session_id for each in page.sessions]
                if page.next_cursor is not None:
                    names += await found(**values | {"cursor": page.next_cursor})
            return names

        assert await found() == await found(limit=1) == ["s2", "s1", "s0"]
        assert await found(user_metadata={"purpose": "no 2"}) == ["s2"]
        assert await found(display_name="mine 0", session_id="s1") == ["s1", "s0"]
        assert await found(statuses=[types.ActiveSessionStatusQuery()]) == ["s2", "s0"]
        assert await found(statuses=[types.ClientFinishedSessionStatusQuery(reasons=["errored"])]) == ["s1"]


@pytest.mark.slow
async def test_weights_are_deleted_from_the_disk_once_nothing_needs_them(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, _, service):
        store = service.store
        model, other, third = (a_model(store, number, OWNERS[0]) for number in range(3))
        states = [a_state(tmp_path, model, name, step) for name, step in (("one", 1), ("same", 1), ("two", 2))]
        links = [published(tmp_path, model, number) for number in (3, 4)]
        shown = [
            SavedRecord(model.model_id, "sampler_weights", f"w{number}", number, 2, str(link))
            for number, link in zip((3, 4), links, strict=True)
        ]
        for record in (*states, *shown):
            store.write(record)
        store.write(SamplerRecord(f"{other.model_id.partition(':')[0]}:sample:0", OWNERS[0], "a", str(links[0])))
        store.write(msgspec.structs.replace(third, start_run=model.run_id, start_step=2))
        kept = tmp_path / "trainer" / model.run_id / "saved"
        for record in (*states[1:], *shown):
            await answered(client.delete_checkpoint_from_tinker_path(record.path))
            with pytest.raises(tinker.NotFoundError):
                await answered(client.delete_checkpoint_from_tinker_path(record.path))
        await service.sweep()
        assert (kept / "step_1").exists(), "it has another name"
        assert (kept / "step_2").exists(), "a model is to begin with it"
        assert links[0].exists(), "a sampler uses it"
        assert not links[1].is_symlink()
        assert not links[1].with_name(".s4.1").exists()
        assert [each.checkpoint_id for each in (await answered(client.list_user_checkpoints())).checkpoints] == [
            "weights/one"
        ]
        assert not store.keep(shown[0], overwrite=False) or store.saved(shown[0].path) is None, "it came back"
        (tmp_path / "trainer" / third.run_id / "copies" / "step_0").mkdir(parents=True)
        await service.finish_session("s1", OWNERS[0], {})
        await service.sweep()
        assert not links[0].is_symlink()
        assert not (kept / "step_2").exists()
        assert (kept / "step_1").exists()


@pytest.mark.slow
async def test_weights_whose_time_is_over_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rest(tmp_path) as (client, _, service):
        model = a_model(service.store, 0, OWNERS[0])
        record = a_state(tmp_path, model, "one", 1)
        service.store.write(record)
        for refused in (0, -1, 10**12):
            with pytest.raises(tinker.UnprocessableEntityError):
                await answered(client.set_checkpoint_ttl_from_tinker_path(record.path, refused))
        await answered(client.set_checkpoint_ttl_from_tinker_path(record.path, 3600))
        (listed,) = (await answered(client.list_checkpoints(model.model_id))).checkpoints
        assert listed.expires_at is not None
        monkeypatch.setattr("counterpoint.service.records.store.time.time", lambda: listed.expires_at.timestamp() + 1)
        with pytest.raises(tinker.NotFoundError):
            await answered(client.get_weights_info_by_tinker_path(record.path))
        await service.sweep()
        assert not (tmp_path / "trainer" / model.run_id / "saved" / "step_1").exists()
        assert service.store.all_saved(model.model_id) == []


async def test_a_state_is_not_removed_while_another_save_may_name_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, service):
        model = a_model(service.store, 0, OWNERS[0])
        record = a_state(tmp_path, model, "one", 1)
        service.store.write(record)
        service.store.delete(record)

        class Saving:
            saving = (2,)
            run = SimpleNamespace(updates=0)

            async def close(self) -> None:
                pass

        service._models[model.model_id] = Saving()  # type: ignore[assignment]
        await service.sweep()
        assert (tmp_path / "trainer" / model.run_id / "saved" / "step_1").exists()
        await service._shut(model.model_id)  # such as for its silence: it names the state when it is opened again
        await service.sweep()
        assert (tmp_path / "trainer" / model.run_id / "saved" / "step_1").exists()
        await service.finish_session("s0", OWNERS[0], {})
        await service.sweep()
        assert not (tmp_path / "trainer" / model.run_id / "saved" / "step_1").exists()


@pytest.mark.slow
async def test_what_is_not_served_is_refused_at_once(tmp_path: Path) -> None:
    async with rest(tmp_path) as (client, raw, service):
        model = a_model(service.store, 0, OWNERS[0])
        service.store.write(a_state(tmp_path, model, "one", 1))
        refusals: list[Callable[[], Any]] = [
            lambda: client.publish_checkpoint_from_tinker_path("tinker://s0:train:0/weights/one"),
            lambda: client.export_session_trace("s0"),
        ]
        for refused in refusals:
            with pytest.raises(tinker.BadRequestError, match="not served"):
                await answered(refused())
        headers = {"X-API-Key": KEYS[0]}
        assert (await raw.get("/api/v1/auth/apikey/me", headers=headers)).status == 200

        def broken() -> None:
            raise ZeroDivisionError

        service.store.models = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(tinker.UnprocessableEntityError, match="service failed"):
            await answered(client.list_training_runs())


async def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (_, service):
        models = [a_model(service.store, number, OWNERS[0]) for number in range(3)]
        items = [service.store.run_directory(each.run_id) / "items" for each in models]
        for number, each in enumerate(items):
            each.mkdir(parents=True)
            await service.sessions.end(await service.sessions.any(f"s{number}", OWNERS[0]), {})

        def remove(path: Path) -> None:
            if path == items[1]:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            remove_directory(path)

        with monkeypatch.context() as patched:
            patched.setattr(retention, "remove_directory", remove)
            await service.sweep()
        assert [each.exists() for each in items] == [False, True, False]
        now = time.time()
        monkeypatch.setattr(
            "counterpoint.service.tinker.weights.retention.time.time", lambda: now + 2 * retention.LOOK_SECONDS
        )
        await service.sweep()
        assert not items[1].exists()


async def test_an_ended_model_is_looked_at_ever_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (_, service):
        model = a_model(service.store, 0, OWNERS[0])
        await service.sessions.end(await service.sessions.any("s0", OWNERS[0]), {})
        left, began, looked = tmp_path / "trainer" / model.run_id / "checkpoints" / "step_4", time.time(), []
        for minute in range(3 * 24 * 60):
            monkeypatch.setattr(
                "counterpoint.service.tinker.weights.retention.time.time",
                lambda minute=minute: began + 60.0 * minute + 1,
            )
            left.mkdir(parents=True, exist_ok=True)
            retention._end_directories(service.store, tmp_path)
            if not left.exists():
                looked.append(minute)
        assert looked[:4] == [0, 1, 3, 7]
        assert max(after - before for before, after in pairwise(looked)) == 24 * 60
        assert len(looked) < 16


async def test_what_ends_with_a_session_leaves_the_disk(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, service):
        store = service.store
        ended, other = (a_model(store, number, OWNERS[0]) for number in (0, 1))
        for model in (ended, other):
            session = model.model_id.partition(":")[0]
            store.write(SamplerRecord(f"{session}:sample:0", OWNERS[0]))
            store.write(LossRecord(f"{session}:loss:0", msgspec.Raw(b"{}")))
            items = store.run_directory(model.run_id) / "items"
            items.mkdir(parents=True)
            (items / "item_3").write_bytes(b"an item")
            for number in (3, 4):
                record = SavedRecord(model.model_id, "snapshot", f"s{number}", number, number, f"{tmp_path}/none")
                store.write(record)
                if number == 4 or model is other:
                    store.delete(record)
            for kept in ("checkpoints/step_4", "copies/step_0", "saved/step_3"):
                place = tmp_path / "trainer" / model.run_id / kept
                place.mkdir(parents=True)
                (place / "STABLE").touch()
        removed_in_part = tmp_path / "trainer" / ended.run_id / "checkpoints/step_2"
        (removed_in_part / "state").mkdir(parents=True)
        # The session ends, and the process before it has removed anything.
        await service.sessions.end(await service.sessions.any("s0", OWNERS[0]), {})
        for _ in "ab":
            await service.sweep()

        def left(model: ModelRecord) -> list[str]:
            session = model.model_id.partition(":")[0]
            found = [path.name for path in store.run_directory(model.run_id).rglob("*") if path.is_file()]
            found += [each.sampler_id for each in store.samplers(session)]
            found += [f"deleted {each.number}" for each in store.deleted(model.model_id)]
            return [*found, f"{session}:loss:0"] if store.loss(f"{session}:loss:0") else found

        def steps(model: ModelRecord) -> list[str]:
            own = tmp_path / "trainer" / model.run_id
            return sorted(str(path.relative_to(own)) for path in own.glob("*/step_*"))

        assert await asyncio.to_thread(steps, ended) == ["saved/step_3"], "nothing goes on with the others"
        assert await asyncio.to_thread(steps, other) == ["checkpoints/step_4", "copies/step_0", "saved/step_3"]
        assert await asyncio.to_thread(left, ended) == []
        assert await asyncio.to_thread(left, other) == ["item_3", "s1:sample:0", "deleted 3", "s1:loss:0"]


async def test_a_session_that_was_left_without_a_word_ends(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        left, goes_on = (a_model(service.store, number, OWNERS[0]) for number in (0, 1))
        long_ago = time.time() - 8 * 86_400
        service.store.change("UPDATE sessions SET heard = ?", long_ago)
        await service.sessions.live("s1", OWNERS[0])

        def goes() -> list[bool]:
            found = [service.store.session(name) for name in ("s0", "s1")]
            return [each is not None and not each.finished for each in found]

        await service._end_abandoned()
        assert goes() == [True, True], "their clients may not know yet that the service was started again"
        service.sessions._started -= 1000
        await service._end_abandoned()
        assert goes() == [False, True]
        body = {"sampling_session_id": "s0:sample:0", "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}}
        assert (await client.post("/api/v1/asample", json=body, headers={"X-API-Key": KEYS[0]})).status == 410
        assert {each.model_id for each in service.models(OWNERS[0])} == {left.model_id, goes_on.model_id}
        assert service.models(OWNERS[1]) == []
        assert [each.model_id for each in service.models(OWNERS[0], "s1")] == [goes_on.model_id]
