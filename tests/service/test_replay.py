"""Data get the routing of the samples whose tokens they have: found, bounded, of nobody else, and the same after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from counterpoint.run.items import decode_item
from counterpoint.service.journal import Journal
from counterpoint.service.keys import digest
from counterpoint.service.shared_calls import SharedCalls
from counterpoint.service.tinker.models import Request
from counterpoint.service.tinker.replay import SAMPLE_BYTES, Routings
from counterpoint.transport.messages import Answered
from counterpoint.transport.records import Int32Array, RoutingArray, Turn
from tests.service.serving import KEYS, serving
from tests.service.test_rest import a_model
from tests.support.polling import until

MARK = 50
"""Each sample of these tests has routing of a number of its own in each row."""


def routing(rows: int, mark: int) -> RoutingArray:
    return np.full((rows, 2, 2), mark, np.uint8)


Sampled = tuple[list[int], list[int]]

SAMPLES = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
    max_size=12,
)


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.slow
@given(SAMPLES, st.lists(st.integers(0, 2), min_size=2, max_size=10))
def test_the_longest_common_beginning_is_found(samples: list[Sampled], datum: list[int]) -> None:
    """Against a search of all samples. A sample whose prompt has another one's tokens comes after it."""
    routings = Routings(2**20)
    samples.sort(key=lambda each: len(each[0]))
    for number, (prompt, completion) in enumerate(samples):
        rows = routing(len(prompt) + len(completion) - 1, number)
        routings.note(f"s1:sample:0:{number}:0", np.array(prompt, np.int32), np.array(completion, np.int32), rows)
    found = routings.find("s1", np.array(datum))
    wholes = [(prompt + completion, len(prompt)) for prompt, completion in samples]
    shared = [min(common(whole, datum), len(whole) - 1, len(datum) - 1) for whole, _ in wholes]
    is_sampled = any(common(whole, datum) > begins for whole, begins in wholes)
    if not is_sampled:
        assert found is None
        return
    assert found is not None
    assert len(found) == max(shared)
    assert shared[int(found[0, 0, 0])] == max(shared)
    assert routings.find("s2", np.array(datum)) is None
    routings.forget("s1")
    assert (routings.bytes_held, routings.find("s1", np.array(datum))) == (0, None)


@pytest.mark.parametrize(("datum", "rows"), [([0, 1, 0, 1], 3), ([0, 1, 0, 3], 3), ([0, 1, 0, 2], 3), ([0, 1], 1)])
def test_the_only_sample_is_found_on_either_side_of_a_datum(datum: list[int], rows: int) -> None:
    routings = Routings(2**20)
    routings.note("s1:sample:0:0:0", np.array([0], np.int32), np.array([1, 0, 2], np.int32), routing(3, 7))
    found = routings.find("s1", np.array(datum))
    assert found is not None
    assert found.tolist() == routing(rows, 7).tolist()


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 5))
def test_the_oldest_make_room(tokens: list[int], most: int) -> None:
    """Each sample has the prompt 7, and a token of its own."""
    size = SAMPLE_BYTES + 8 + 4
    routings, held = Routings(most * size), dict[int, int]()
    for number, token in enumerate(tokens):
        routings.note(
            f"s1:sample:0:{token}:0", np.array([7], np.int32), np.array([token], np.int32), routing(1, number)
        )
        held.pop(token, None)
        held[token] = number
        held = dict(list(held.items())[-most:])
        assert routings.bytes_held == len(held) * size
        for each in range(10):
            found = routings.find("s1", np.array([7, each]))
            assert (None if found is None else found[0, 0, 0]) == held.get(each)


def test_of_equal_samples_the_named_one_counts() -> None:
    routings, tokens = Routings(2**20), (np.array([1], np.int32), np.array([2, 3], np.int32))
    for session, number in (("s1", 0), ("s1", 1), ("s2", 2)):
        answer = np.full((9, 2, 2), number, np.uint8)
        routings.note(f"{session}:sample:0:{number}:0", *tokens, answer[:2])
    for names, mark in (([], 1), (["s1:sample:0:0:0"], 0), (["s2:sample:0:2:0", "nobody's"], 1)):
        found = routings.find("s1", np.array([1, 2, 3]), names)
        assert found is not None
        assert found[0, 0, 0] == mark
        assert found.base is not None
        assert found.base.nbytes == found.nbytes, "the whole answer is held"


class Servers:
    """Servers of a mixture of experts, whose routing says how many samples there were before."""

    def __init__(self) -> None:
        self.count = 0
        self.calls = SharedCalls()
        self.calls.resize(8)

    def forget(self, adapter: Any, affinity: str) -> None:
        pass

    async def sample(
        self, adapter: Any, prompt: Int32Array, sampling: Any, affinity: str, key: str, on_cut: Any
    ) -> Turn:
        self.count += 1
        tokens = np.array([self.count, 9], np.int32)
        rows = routing(len(prompt) + 1, MARK + self.count)
        return Turn(prompt, tokens, np.array([-0.5, -0.25], np.float32), 0, "stop", routed_experts=rows)


def datum_of(tokens: list[int]) -> types.Datum:
    """A datum of the prompt 5, 6 and what was sampled, as the cookbook makes it."""
    values = {"logprobs": [0.0, *[-0.5] * (len(tokens) - 2)], "advantages": [0.0, *[1.0] * (len(tokens) - 2)]}
    columns = {name: np.array(each, np.float32) for name, each in values.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64), **columns},
    )


async def sample(client: Any, key: str, session: str, seq_id: int) -> str:
    """Has one sample made; returns the id of its sequence."""
    headers, body = {"X-API-Key": key}, {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    await client.post("/api/v1/create_sampling_session", json=body, headers=headers)
    asked = {"sampling_session_id": f"{session}:sample:0", "seq_id": seq_id, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
    told = await client.post("/api/v1/asample", json={**asked, "sampling_params": {"max_tokens": 2}}, headers=headers)
    promised = await told.json()
    await client.post("/api/v1/retrieve_future", json={"request_id": promised["request_id"]}, headers=headers)
    return str(promised["sample_sequence_ids"][0])


async def send(
    client: Any, key: str, model_id: str, seq_id: int, data: list[types.Datum], loss: Any = "importance_sampling"
) -> int:
    """Sends a contribution as the SDK does."""
    asked = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss),
        model_id=model_id,
        seq_id=seq_id,
    )
    body = forward_backward_request_to_proto(asked).SerializeToString()
    headers = {"X-API-Key": key, "Content-Type": "application/x-protobuf"}
    answer = await client.post("/api/v1/forward_backward", data=body, headers=headers)
    return int(answer.status)


async def test_a_contribution_has_the_routing_of_its_samples_and_keeps_it_through_a_kill(tmp_path: Path) -> None:
    async with serving(tmp_path, Servers(), has_experts=True) as (client, service):
        model = a_model(service.store, 1, digest(KEYS[0]).hex())
        ids = [await sample(client, KEYS[0], "s1", number) for number in range(2)]
        stranger = a_model(service.store, 2, digest(KEYS[1]).hex())
        data = [datum_of([5, 6, 1, 9]), datum_of([5, 6, 2, 9, 3]), datum_of([5, 6, 4, 9])]
        named = [types.SampledProvenanceSpan(sequence_id=ids[0], offset=0, length=3)]
        data.append(data[0].with_provenance(model_input=named, loss_fn_inputs=named))
        for key, one in ((KEYS[0], model), (KEYS[1], stranger)):
            assert await send(client, key, one.model_id, 1, data) == 200
        found = [chunks_of(tmp_path, each.run_id) for each in (model, stranger)]
        assert found == [[(3, MARK + 1), (3, MARK + 2), None, (3, MARK + 1)], []]
        assert service.replays.counts["routing_missing"] == 2 + 4
    async with serving(tmp_path, Servers(), has_experts=True) as (client, service):
        await service.start()
        await until(lambda: model.model_id in service._models, "the model")
        assert chunks_of(tmp_path, model.run_id) == found[0]
        assert service.replays.counts["routing_missing"] == 0, "what is journalled is not looked for again"


def journal_of(directory: Path, run_id: str) -> Journal:
    return Journal(directory / "service" / "models" / run_id / "items", run_id, 2**20)


def chunks_of(directory: Path, run_id: str) -> list[tuple[int, int] | None]:
    """The rows of routing of each datum of a run's first item, and the mark of the first."""
    ask, _ = journal_of(directory, run_id).read_item(1)
    assert ask.batch is not None
    return [(len(chunk[0]), int(chunk[0][0, 0, 0])) if chunk else None for chunk in ask.batch.routed_experts]


async def test_strict_replay_refuses_what_has_no_routing_and_says_so_also_after_a_kill(tmp_path: Path) -> None:
    owner, results = digest(KEYS[0]).hex(), []
    for is_anew in (False, True):
        async with serving(tmp_path, Servers(), has_experts=True, strict_replay=True) as (client, service):
            if is_anew:
                await service.start()
            else:
                model = a_model(service.store, 1, owner)
                await sample(client, KEYS[0], "s1", 1)
                data = [datum_of([5, 6, 1, 9]), datum_of([5, 6, 4, 9])]
                for seq_id, each in enumerate((data, data[:1]), 1):
                    assert await send(client, KEYS[0], model.model_id, seq_id, each) == 200
            (refused, note), (taken, _) = [journal_of(tmp_path, model.run_id).read_item(each) for each in (1, 2)]
            assert (refused.batch, decode_item(refused.header).spoils) == (None, True)
            assert taken.batch is not None
            asked = service._models[model.model_id]._asked
            results.append(
                (await asked(msgspec.msgpack.decode(note, type=Request), refused).result(1, Answered(1, 0))).body
            )
    assert results[0] == results[1]
    assert b"datum 1 (1 of 2)" in results[0]


async def test_strict_replay_refuses_a_named_sample_without_routing_whatever_the_loss(tmp_path: Path) -> None:
    """Such as what a client computes a custom loss of: it has neither log-probabilities nor advantages."""
    owner = digest(KEYS[0]).hex()
    named = [types.SampledProvenanceSpan(sequence_id="s1:sample:0:7:0", offset=0, length=3)]
    plain = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 4]),
        loss_fn_inputs={"target_tokens": np.array([6, 4, 9], np.int64)},
    )
    data = [plain, plain.with_provenance(model_input=named, loss_fn_inputs=named)]
    async with serving(tmp_path, Servers(), has_experts=True, strict_replay=True) as (client, service):
        model = a_model(service.store, 1, owner)
        for seq_id, each in enumerate(data, 1):
            assert await send(client, KEYS[0], model.model_id, seq_id, [each], "cross_entropy") == 200
        found = [journal_of(tmp_path, model.run_id).read_item(each)[0].batch for each in (1, 2)]
        assert [each is None for each in found] == [False, True]


async def test_the_routing_of_a_dense_model_is_never_missed(tmp_path: Path) -> None:
    async with serving(tmp_path, Servers(), strict_replay=True) as (client, service):
        model = a_model(service.store, 1, digest(KEYS[0]).hex())
        assert await send(client, KEYS[0], model.model_id, 1, [datum_of([5, 6, 4, 9])]) == 200
        assert chunks_of(tmp_path, model.run_id) == []
