"""The SDK's sampling client against servers that answer at once: what it may ask for, and what it gets."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tinker
from tinker import types

from counterpoint.inference.base import SamplingParameters
from counterpoint.service.keys import digest
from counterpoint.service.records.ledger import Used, day_now
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import SamplerRecord, SavedRecord
from counterpoint.service.samplers import Metered
from counterpoint.service.shared_calls import SharedCalls
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.models import NEWEST
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.samples.prompts import PromptPlaces, Targets, Tensor
from counterpoint.service.tinker.samples.sampling import Chunk, Parameters, Prompt, SampleRequest, prompt_of
from counterpoint.service.tinker.service import Service
from counterpoint.transport.records import Alternatives, Turn
from tests.service.serving import KEYS, serving
from tests.service.test_rest import a_model, answered
from tests.support.polling import DEADLINE_SECONDS, until

pytestmark = pytest.mark.slow

HEADERS = {"X-API-Key": KEYS[0]}

PROMPT = types.ModelInput.from_ints([5, 6, 7])


class Servers:
    """Servers whose completions are one token long, and that hold back those of token 9, and of names that end with `held`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, SamplingParameters, str]] = []
        self.ended = 0
        self.held: tuple[str, ...] = ()
        self.forgotten: list[tuple[Any, str]] = []
        self.calls = SharedCalls()
        self.calls.resize(64)

    def forget(self, adapter: Any, affinity: str) -> None:
        self.forgotten.append((adapter, affinity.rpartition("-")[0]))

    async def sample(
        self, adapter: Any, prompt: Any, sampling: SamplingParameters, affinity: str, key: str, on_cut: Any
    ) -> Turn:
        self.asked.append((adapter, sampling, affinity))
        if prompt[-1] == 9 or affinity.endswith(self.held):
            try:
                await asyncio.Event().wait()
            finally:
                on_cut(2)
                self.ended += 1
        count = sampling.alternatives
        top = np.array([[1, 2, 3][:count]], np.int32), np.array([[-0.5, -1.0, -math.inf][:count]], np.float32)
        found = Alternatives(*top) if count else None
        return Turn(prompt, np.array([1], np.int32), np.array([-0.5], np.float32), 0, "stop", alternatives=found)

    async def score(self, tokens: Any, start: int, affinity: str) -> Any:
        return -np.arange(start, len(tokens), dtype=np.float32)


@asynccontextmanager
async def sampling(directory: Path, **values: Any) -> AsyncIterator[tuple[Any, Servers, Service, Any]]:
    """A sampling client, the servers, and the service."""
    servers = Servers()
    async with serving(directory, servers, **values) as (raw, service):

        def made() -> Any:
            client = tinker.ServiceClient(base_url=str(raw.make_url("")), api_key=KEYS[0])
            return client, client.create_sampling_client(base_model="tiny").result()

        client, sampler = await asyncio.to_thread(made)
        yield sampler, servers, service, raw
        await asyncio.to_thread(client.close("success").result)


def parameters(**values: Any) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=4, **values)


@pytest.mark.parametrize("flags", [[], ["sample_use_retrieve_futures"]])
async def test_samples_come_with_all_that_was_asked_for(tmp_path: Path, flags: list[str]) -> None:
    async with sampling(tmp_path, client_flags=flags) as (sampler, servers, service, _):
        many = [sampler.sample(PROMPT, 3, parameters(temperature=0.7)) for _ in range(20)]
        for each in many:
            assert [list(one.tokens) for one in (await answered(each)).sequences] == [[1]] * 3
        assert len({affinity for _, _, affinity in servers.asked}) == 60
        assert {group for _, group in servers.forgotten} == {each.rpartition("-")[0] for _, _, each in servers.asked}
        asked = sampler.sample(PROMPT, 1, parameters(stop=[]), topk_sample_logprobs=3)
        (sequence,) = (await answered(asked)).sequences
        assert sequence.topk_logprobs == [[(1, -0.5), (2, -1.0)]]
        assert servers.asked[-1][1].ignore_eos
        for stop, texts, ids in (("a", ["a"], []), (["a", "b"], ["a", "b"], []), ([3], [], [3]), (None, [], [])):
            await answered(sampler.sample(PROMPT, 1, parameters(stop=stop)))
            given = servers.asked[-1][1]
            assert (given.stop, given.stop_token_ids, given.ignore_eos) == (texts, ids, False)
        assert await answered(sampler.compute_logprobs(PROMPT)) == [None, -1.0, -2.0]
        assert await answered(sampler.compute_logprobs(PROMPT, 1)) == [None, None, -2.0]
        if flags:
            futures = service.results.of(digest(KEYS[0]).hex())
            await until(lambda: not futures._held, "the results that the client has are dropped")


async def test_the_ledger_counts_a_sample_once_when_its_client_is_told(tmp_path: Path) -> None:
    owner = digest(KEYS[0]).hex()
    async with sampling(tmp_path) as (sampler, _, service, raw):
        await answered(sampler.sample(PROMPT, 2, parameters()))
        assert RecordStore(tmp_path / "service").ledger.days()[day_now()] == {owner: Used(prompt=3, sampled=2)}
        chunk = {"type": "encoded_text", "tokens": [5, 6, 7, 8]}
        body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 7, "prompt": {"chunks": [chunk]},
                "sampling_params": {}}  # fmt: skip
        ids = [
            (await (await raw.post("/api/v1/asample", json=body, headers=HEADERS)).json())["request_id"] for _ in "ab"
        ]
        futures = service.results.of(owner)
        await until(lambda: ids[0] in futures._held, "the sample")
        assert service.store.ledger.today(owner) == 10
        assert RecordStore(tmp_path / "service").ledger.today(owner) == 5
        for request_id in ids:
            await raw.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers=HEADERS)
        assert RecordStore(tmp_path / "service").ledger.today(owner) == 10


def of(rows: list[list[int]]) -> types.TensorData:
    return types.TensorData.from_numpy(np.array(rows, np.int64))


async def test_the_places_of_a_prompt_have_what_is_asked_of_them(tmp_path: Path) -> None:
    """The servers' scores are the place, negative; all they sample is 1."""
    async with sampling(tmp_path) as (sampler, servers, _, _):
        found = await answered(sampler.sample(PROMPT, 1, parameters(), topk_prompt_logprobs=3))
        assert found.topk_prompt_logprobs == [None, [(1, -0.5), (2, -1.0)], [(1, -0.5), (2, -1.0)]]
        last = sampler.sample(PROMPT, 1, parameters(), True, topk_prompt_logprobs=1, prompt_logprobs_last_n=1)
        assert (await answered(last)).topk_prompt_logprobs == [None, None, [(1, -0.5)]]
        dense = of([[7, -1], [8, 9]])
        sparse = types.TensorData(
            data=[7, 8], dtype="int64", shape=[2, 3], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[0, 2]
        )
        for given, expected in ((dense, [[-1.0, 0.0], [-2.0, -2.0]]), (sparse, [[-1.0, 0.0, 0.0], [0.0, 0.0, -2.0]])):
            told = await answered(sampler.sample(PROMPT, 1, parameters(), target_prompt_logprobs=given))
            assert told.target_prompt_logprobs.tolist() == expected
            assert told.target_prompt_logprobs.sparse_col_indices == given.sparse_col_indices
        for temperature, expected in ((1.0, [[-0.5] * 3] * 2), (0.5, [[-1.0] * 3, [-2.0] * 3])):
            servers.asked.clear()
            asked = parameters(temperature=temperature, seed=1)
            drawn = (await answered(sampler.sample(PROMPT, 1, asked, prompt_alt_tokens_k=3))).prompt_alt_tokens
            assert (drawn.tokens.tolist(), drawn.logprobs.tolist()) == ([[1] * 3] * 2, expected)
            assert len({given.seed for _, given, _ in servers.asked}) == 1 + 2 * 3


async def test_the_ledger_counts_what_the_servers_tell_of_a_prompt(tmp_path: Path) -> None:
    async with sampling(tmp_path) as (sampler, _, service, _):
        for sampled, asked in (
            (1 + 2, {"topk_prompt_logprobs": 3}),
            (1 + 1, {"topk_prompt_logprobs": 3, "prompt_logprobs_last_n": 1, "include_prompt_logprobs": True}),
            (1 + 3, {"target_prompt_logprobs": of([[7, -1], [8, 9]])}),
            (1 + 4, {"prompt_alt_tokens_k": 2}),
        ):
            before = service.store.ledger.today(digest(KEYS[0]).hex())
            await answered(sampler.sample(PROMPT, 1, parameters(), **asked))
            assert service.store.ledger.today(digest(KEYS[0]).hex()) - before == 3 + sampled, asked


async def test_tokens_at_the_places_of_an_adapters_prompt_are_scored_by_its_trainer() -> None:
    asked: list[Any] = []

    async def score(prompt: Any, targets: Any) -> Any:
        asked.append(targets.tolist())
        return -targets.astype(np.float32) - np.arange(len(targets), dtype=np.float32)[:, None] / 10

    prompt = np.array([5, 6, 7], np.int32)
    places = PromptPlaces(Metered(cast(Any, Servers()), "a"), ("a", Path()), prompt, score, "a", lambda each, _: each)
    given = Tensor([7, -1, 8], shape=[2, 3], sparse_crow_indices=[0, 2, 3], sparse_col_indices=[0, 2, 1])
    targets = Targets(given, 3)
    values = await places.log_probabilities(targets.places, targets.ids)
    assert asked == [[[7, 0], [8, 0]]]
    assert values[[0, 2]].tolist() == pytest.approx([-7.0, -8.1])
    drawn = (await places.draws(2, 0.5))[1]
    assert drawn.ravel().tolist() == pytest.approx([-1.0, -1.0, -1.1, -1.1])


@pytest.mark.parametrize(
    "given",
    [
        Tensor([1], dtype="float32", shape=[1, 1]),
        Tensor([1], shape=[1]),
        Tensor([1, 2, 3], shape=[2, 1]),
        Tensor([1, -2], shape=[2, 1]),
        Tensor([1], shape=[2, 2], sparse_crow_indices=[0, 1, 1]),
        Tensor([1], shape=[2, 2], sparse_crow_indices=[0, 2, 1], sparse_col_indices=[0]),
        Tensor([1], shape=[2, 2], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[2]),
        Tensor([1] * 3, shape=[2, 2], sparse_crow_indices=[0, 3, 3], sparse_col_indices=[0, 1, 1]),
    ],
)
def test_targets_that_do_not_fit_a_prompt_are_refused(given: Tensor) -> None:
    with pytest.raises(BadRequest, match="target_prompt_logprobs"):
        Targets(given, 3)


async def test_what_the_servers_cannot_do_is_refused_in_words(tmp_path: Path) -> None:
    async with sampling(tmp_path) as (sampler, _, _, _):
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("seed", lambda: sampler.sample(PROMPT, 1, parameters(seed=2**63))),
            ("topk_prompt_logprobs", lambda: sampler.sample(PROMPT, 1, parameters(), topk_prompt_logprobs=21)),
            ("calls", lambda: sampler.sample(PROMPT, 1, parameters(), prompt_alt_tokens_k=5000)),
            (
                "target_prompt",
                lambda: sampler.sample(PROMPT, 1, parameters(), target_prompt_logprobs=of([[1], [2], [3]])),
            ),
            ("topk_sample_logprobs", lambda: sampler.sample(PROMPT, 1, parameters(), topk_sample_logprobs=99)),
            ("prompt_logprobs_last_n", lambda: sampler.compute_logprobs(PROMPT, 3)),
            ("num_samples", lambda: sampler.sample(PROMPT, 0, parameters())),
        ]
        for said, ask in refused:
            with pytest.raises(tinker.RequestFailedError, match=said):
                await answered(ask())


async def test_each_sample_of_a_request_has_a_seed_of_its_own_and_the_same_each_time(tmp_path: Path) -> None:
    async with sampling(tmp_path) as (sampler, servers, _, _):
        for seed in (7, 7, -(2**63)):
            await answered(sampler.sample(PROMPT, 3, parameters(seed=seed)))
        first, again, other = ([given.seed for _, given, _ in servers.asked[at : at + 3]] for at in (0, 3, 6))
        assert first == again
        assert len({*first, *other}) == 6
        await answered(sampler.sample(PROMPT, 1, parameters()))
        assert servers.asked[-1][1].seed == 0


def test_what_is_refused_names_what_there_is_instead() -> None:
    asked = SampleRequest("s1:sample:0", 1, Prompt([Chunk(tokens=[1, 2])]), Parameters(), record_stability_info=True)
    with pytest.raises(BadRequest, match="stable_reinforce"):
        prompt_of(asked, 64)


async def test_a_sample_that_its_client_gives_up_ends_at_the_servers(tmp_path: Path) -> None:
    async with sampling(tmp_path) as (sampler, servers, service, raw):
        asked = sampler.sample(types.ModelInput.from_ints([9]), 2, parameters())
        await until(lambda: len(servers.asked) == 2, "two samples")
        body = {"request_id": f"{sampler._sampling_session_id}:0"}
        other = await raw.post("/api/v1/cancel_future", json=body, headers={"X-API-Key": KEYS[1]})
        assert (other.status, servers.ended) == (404, 0)
        pending = service.results.of(digest(KEYS[0]).hex())._pending
        # Before it polls, the SDK tells nobody that it gives up.
        await until(lambda: any(bool(each._waiters) for each in pending.values()), "the client polls")
        asked.future().cancel()
        await until(lambda: servers.ended == 2, "the samples have ended")


async def test_the_samples_of_a_session_end_beside_each_other(tmp_path: Path) -> None:
    """A server that does not answer takes seconds to end each of them."""

    class Slow(Servers):
        def __init__(self) -> None:
            super().__init__()
            self.ending = asyncio.Barrier(3)

        async def sample(self, *given: Any) -> Turn:
            self.asked.append(given[:3])
            try:
                await asyncio.Event().wait()
            finally:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await self.ending.wait()
            raise AssertionError

    async with serving(tmp_path, servers := Slow()) as (client, service):
        owner = digest(KEYS[0]).hex()
        session = (await service.create_session(CreateSession(), owner)).session_id
        service.store.write(SamplerRecord(f"{session}:sample:0", owner))
        body = {
            "sampling_session_id": f"{session}:sample:0",
            "prompt": {"chunks": [{"tokens": [5]}]},
            "sampling_params": {},
        }
        for number in range(3):
            await client.post("/api/v1/asample", json=body | {"seq_id": number}, headers=HEADERS)
        await until(lambda: len(servers.asked) == 3, "three samples")
        await service.finish_session(session, owner, {})
        assert not service.results.pending


async def test_what_was_sampled_of_a_request_that_is_cancelled_or_fails_counts(tmp_path: Path) -> None:
    owner = digest(KEYS[0]).hex()
    async with sampling(tmp_path) as (sampler, servers, service, raw):
        servers.held = ("-1",)
        sampler.sample(PROMPT, 5, parameters())
        await until(lambda: len(servers.asked) == 5, "five samples")
        body = {"request_id": f"{sampler._sampling_session_id}:0"}
        await raw.post("/api/v1/cancel_future", json=body, headers=HEADERS)
        assert service.store.ledger.today(owner) == 3 + 4 + 2
        refused = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, parameters(), target_prompt_logprobs=types.TensorData(
            data=[1, 2, 3], dtype="int64", shape=[3, 1]))  # fmt: skip
        with pytest.raises(Exception, match="target_prompt_logprobs"):
            await answered(refused)
        assert service.store.ledger.today(owner) == 3 + 4 + 2, "nothing was asked of the servers"


async def test_further_clients_of_a_sampler_have_numbers_of_their_own(tmp_path: Path) -> None:
    async with sampling(tmp_path) as (sampler, servers, _, _):
        await answered(sampler.sample(PROMPT, 1, parameters()))
        for number in (1, 2):
            again = await asyncio.to_thread(pickle.loads, pickle.dumps(sampler))
            await answered(again.sample(PROMPT, 1, parameters()))
            assert servers.asked[-1][2].endswith(f".{number}000000000-0")
        await answered(again.holder.run_coroutine_threadsafe(again.holder.aclose()).future())


async def test_a_sampler_in_flight_follows_its_model_and_ends_with_its_session(tmp_path: Path) -> None:
    servers = Servers()
    async with serving(tmp_path, servers) as (client, service):
        model = a_model(service.store, 1, digest(KEYS[0]).hex())
        service.store.write(SamplerRecord("s1:sample:0", model.owner, follows=model.model_id))
        headers, seen = {"X-API-Key": KEYS[0]}, []
        for number in (1, 2):
            record = SavedRecord(model.model_id, "inflight", NEWEST, number, number, f"published/s{number}")
            service.store.keep(record, overwrite=True)
            body = {"sampling_session_id": "s1:sample:0", "seq_id": number, "prompt": {"chunks": [{"tokens": [5]}]}}
            asked = await client.post("/api/v1/asample", json=body | {"sampling_params": {}}, headers=headers)
            assert asked.status == 200, await asked.text()
            await until(lambda: len(servers.asked) == number, "a sample")  # noqa: B023 - it ends before the next round
            seen.append(servers.asked[-1][0])
        assert seen == [(f"{model.run_id}.s{number}", Path(f"published/s{number}")) for number in (1, 2)]
        assert [each.number for each in service.store.deleted(model.model_id)] == [1]
        await service.finish_session("s1", model.owner, {})
        body["seq_id"] = 3
        ended = await client.post("/api/v1/asample", json=body | {"sampling_params": {}}, headers=headers)
        assert ended.status == 410
