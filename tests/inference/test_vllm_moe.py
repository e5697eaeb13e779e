"""A real vLLM with our plugin, a mixture of experts, full weights: what it answers is what Hugging Face computes."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from counterpoint.inference import delta, wire
from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    InferenceError,
    Probe,
    RequestRefused,
    SamplingParameters,
    ServerFailure,
    WeightsNotSeen,
    WeightUpdate,
)
from counterpoint.inference.checkpoint import BASE, DELTA
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.inference.sent_weights import OFFER_PATH, SEND_PATH, WeightOffer, opened
from counterpoint.transport.records import Float32Array, Int32Array, Turn
from perf.gpu.jobs import PAUSED
from tests.support.fake_inference import CLAIM
from tests.support.polling import until
from tests.support.tiny_model import END, log_probabilities, misshape, routing
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 0.004
"""Between vLLM's log-probabilities and Hugging Face's, both in float32."""

PROMPT = np.arange(5, 50, dtype=np.int32)
LONG = SamplingParameters(temperature=1.0, max_tokens=400)
GREEDY = SamplingParameters(temperature=0.01, max_tokens=24)

DECIDED_PROMPT = np.arange(6, 51, dtype=np.int32)
DECIDED = GREEDY.replaced(max_tokens=6)
"""Six tokens after this prompt are the same whenever they are sampled: at each, the best logit leads by 0.3, 30 temperatures."""


def update_to(server: ServerProcess, version: int) -> WeightUpdate:
    directory = server.directories[version]
    return WeightUpdate(version, directory, Probe.read(directory / "probe.json"), None)


@asynccontextmanager
async def binary_client(server: ServerProcess) -> AsyncIterator[BinaryClient]:
    async with HttpSessions(PoolConfig()) as connections:
        yield BinaryClient(server.url, connections)


@asynccontextmanager
async def pool_at(server: ServerProcess, version: int = 0, send: bool = False) -> AsyncIterator[Served]:
    config = PoolConfig(urls=[server.url], probe_tolerance=TOLERANCE, max_retries=0, send_weights=send, take_over=True)
    pool = InferencePool(config).model(server.config.model)
    try:
        await pool.start()
        await pool.update(update_to(server, version))
        yield pool
    finally:
        await pool.release()


def request(
    server: ServerProcess, sampling: SamplingParameters, start: int = 0, prompt: Int32Array = PROMPT
) -> GenerateRequest:
    return GenerateRequest(server.config.model, prompt, sampling, start)


def disagreement(
    server: ServerProcess, version: int, turn: Turn | Completion, prompt: Int32Array, temperature: float
) -> Float32Array:
    """Returns each completion token's distance from the log-probability that Hugging Face computes."""
    tokens = turn.completion_ids if isinstance(turn, Turn) else turn.token_ids
    expected = log_probabilities(server.models[version], np.concatenate([prompt, tokens]), temperature)[
        len(prompt) - 1 :
    ]
    difference: Float32Array = np.abs(expected - turn.log_probabilities)
    return difference


async def test_log_probabilities_are_those_at_the_sampling_temperature(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        for temperature in (0.5, 1.0, 1.5):
            sampling = SamplingParameters(temperature=temperature, max_tokens=24, stop_token_ids=(END,))
            turn = await pool.generate(PROMPT, sampling, affinity="a")
            assert disagreement(moe_server, 0, turn, PROMPT, temperature).max() < TOLERANCE


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        free = await pool.generate(DECIDED_PROMPT, DECIDED, affinity="a")
        stop = int(free.completion_ids[3])
        first = free.completion_ids.tolist().index(stop)
        ended = await pool.generate(DECIDED_PROMPT, DECIDED.replaced(stop_token_ids=(stop,)), affinity="a")
    assert (ended.finish_reason, ended.completion_ids.tolist()) == ("stop", free.completion_ids[: first + 1].tolist())


@pytest.mark.promise("vLLM computes with the weights that were proven, and its routing is the trainer's")
async def test_routing_is_what_the_model_chose_for_every_token_but_the_last(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        turn = await pool.generate(PROMPT, GREEDY, affinity="a")
    tokens = np.concatenate([turn.prompt_ids, turn.completion_ids])
    assert turn.routed_experts is not None
    assert turn.routed_experts.dtype == np.uint8
    assert turn.routed_experts.shape == (len(tokens) - 1, 2, 2)
    expected = routing(moe_server.models[0], tokens)[:-1]
    assert (np.sort(turn.routed_experts, axis=-1) == expected).all()


async def test_turns_return_only_the_routing_that_the_caller_lacks(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        first = await pool.generate(PROMPT, GREEDY, affinity="a")
        extended = np.concatenate([PROMPT, first.completion_ids, PROMPT[:7]])
        assert first.routed_experts is not None
        have = len(first.routed_experts)
        second = await pool.generate(extended, GREEDY, affinity="a", routed_experts_start=have)
    assert second.routed_experts is not None
    assert second.routed_experts_start == have == len(PROMPT) + len(first.completion_ids) - 1
    joined = np.concatenate([first.routed_experts, second.routed_experts])
    expected = routing(moe_server.models[0], np.concatenate([extended, second.completion_ids]))[:-1]
    assert (np.sort(joined, axis=-1) == expected).all()


async def test_a_group_is_prefilled_once_with_the_routing_of_every_token(moe_server: ServerProcess) -> None:
    """Also where all its requests are prefilled in one step of the engine; and nothing is shared with older weights."""
    prompt = np.tile(PROMPT, 7)[:300].astype(np.int32)
    rollouts = 8
    async with pool_at(moe_server) as pool:
        for version in (0, 1):
            await pool.update(update_to(moe_server, version))
            calls = [
                pool.generate(prompt, GREEDY.replaced(temperature=1.0), affinity=f"7-{index}")
                for index in range(rollouts)
            ]
            turns = await asyncio.gather(*calls)
            cached = sorted(turn.cached_tokens or 0 for turn in turns)
            block = cached[-1]
            assert block >= 128, "full blocks of the prompt are shared"
            assert cached == [0] + [block] * (rollouts - 1)
            for turn in turns:
                assert disagreement(moe_server, version, turn, prompt, 1.0).max() < TOLERANCE
                assert turn.routed_experts is not None
                expected = routing(moe_server.models[version], np.concatenate([prompt, turn.completion_ids]))[:-1]
                assert (np.sort(turn.routed_experts, axis=-1) == expected).all()


async def test_the_json_path_gives_the_same_arrays(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server), HttpSessions(PoolConfig()) as connections:
        for start in (0, 30):
            wanted = request(moe_server, DECIDED, start, DECIDED_PROMPT)
            client = BinaryClient(moe_server.url, connections)
            binary = await client.generate(wanted)
            about = await client.identify()
            assert binary.origin is not None
            assert (binary.origin.instance, binary.origin.last) == (about.instance, about.weights)
            assert binary.echo == wanted.echo
            stock = OpenAIClient(moe_server.url, connections)
            assert (await stock.identify()).instance == moe_server.url
            json = await stock.generate(wanted)
            assert json.token_ids.tolist() == binary.token_ids.tolist()
            assert json.token_ids.dtype == binary.token_ids.dtype
            assert json.finish_reason == binary.finish_reason
            np.testing.assert_allclose(json.log_probabilities, binary.log_probabilities, atol=1e-5)
            assert json.routed_experts is not None
            assert binary.routed_experts is not None
            assert json.routed_experts.dtype == binary.routed_experts.dtype
            assert (json.routed_experts == binary.routed_experts).all()
        assert (
            Probe.read(moe_server.directories[0] / "probe.json").mismatch(
                (await stock.probe(moe_server.config.model, PROBE_TOKENS)).log_probabilities, TOLERANCE
            )
            is None
        )


def first_after(server: ServerProcess, turn: Turn) -> float:
    """Returns the first completion token's log-probability by version 1, after cached tokens by version 0."""
    tokens = torch.tensor(np.append(turn.prompt_ids, turn.completion_ids[0]).astype(np.int64))[None]
    with torch.no_grad():
        cached = server.models[0](tokens[:, : turn.cached_tokens], use_cache=True).past_key_values
        logits = server.models[1](tokens[:, turn.cached_tokens : -1], past_key_values=cached).logits[0, -1]
    return float(logits.float().log_softmax(-1)[tokens[0, -1]])


@pytest.mark.promise("vLLM computes with the weights that were proven, and its routing is the trainer's")
async def test_weights_change_under_requests_in_flight(moe_server: ServerProcess) -> None:
    """Each request goes on from what it has computed, by the new weights; a request that begins afterwards is wholly theirs: the
    prefix that it shares with the others is not served stale."""
    async with pool_at(moe_server) as pool:
        async with kept_busy(moe_server, pool) as turns:
            turns.clear()
            await pool.update(update_to(moe_server, 1))
            after = await pool.generate(PROMPT, LONG, affinity="after")
        assert after.policy_version == 1
        assert disagreement(moe_server, 1, after, PROMPT, 1.0).max() < TOLERANCE
        switched = 0
        for turn in turns:
            by_old = disagreement(moe_server, 0, turn, PROMPT, 1.0) < TOLERANCE
            by_new = disagreement(moe_server, 1, turn, PROMPT, 1.0) < TOLERANCE
            # The client labels a turn when it sends the request, and a load may overtake the request on its way to the engine.
            # It then shares the prefix that the old weights have computed.
            if not by_new[0] and not by_old[0] and turn.cached_tokens:
                by_old[0] = abs(first_after(moe_server, turn) - turn.log_probabilities[0]) < TOLERANCE
            assert by_new[0] or (turn.policy_version == 0 and by_old[0]), "a token is older than its turn's label"
            switched += turn.policy_version == 0 and not by_old.all()
            assert turn.routed_experts is not None
            assert len(turn.routed_experts) == len(PROMPT) + len(turn.completion_ids) - 1
        assert switched > 0


async def test_no_request_is_prefilled_again_after_a_load(moe_server: ServerProcess) -> None:
    """If it were, the new weights would route its tokens anew, and the rows of routing that it returns would not be those
    that its later log-probabilities were computed with."""
    async with pool_at(moe_server) as pool:
        before = await metric(moe_server, "num_preemptions_total")
        async with kept_busy(moe_server, pool):
            await pool.update(update_to(moe_server, 1))
        assert await metric(moe_server, "num_preemptions_total") == before


async def test_what_the_server_computes_with_has_the_digest_of_what_was_published(moe_server: ServerProcess) -> None:
    """Through fused and packed kernels, layer by layer; the tied output layer's kernel included."""
    async with binary_client(moe_server) as client:
        for version in (1, 0):
            update = update_to(moe_server, version)
            held = await client.load(update, CLAIM)
            assert held.dtype == "float32"
            assert held.layers == update.probe.digests["float32"]
            assert held.layers.keys() == {"", "0", "1"}


@pytest.mark.promise("vLLM computes with the weights that were proven, and its routing is the trainer's")
async def test_a_server_is_refused_for_one_bit_that_no_answer_shows(moe_server: ServerProcess, tmp_path: Path) -> None:
    """As one with the weights of the step before, of which a small step leaves hardly any unchanged."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(moe_server.directories[0], tmp_path / "almost")
    tensors = load_file(tmp_path / "almost" / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"].view(torch.int32)[5, 7] ^= 1
    save_file(tensors, tmp_path / "almost" / "model.safetensors", metadata={"format": "pt"})
    async with pool_at(moe_server) as pool:
        with pytest.raises(InferenceError, match=r"accepted version 0 .*: 1 of 3 .*: layer 1$"):
            await pool.update(replace(update_to(moe_server, 0), directory=tmp_path / "almost"))


def as_changes(server: ServerProcess, directory: Path, flip: int = 0, base_of: Path | None = None) -> Path:
    """Version 1 as what changed from version 0, published; `flip` is added to one changed element's bits.

    `base_of`: a copy of version 0, if not its directory.
    """
    before, after = server.directories[:2]
    directory.mkdir()
    delta.link_base(base_of or before, directory)
    new = delta.open_bits(after / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    changed = ((each, bits ^ np.uint32(flip) if each == name else bits) for each, bits in new.items())
    base = delta.open_bits(directory / BASE / "model.safetensors")
    assert delta.write_delta(directory / DELTA, base, changed, 1 << 30)
    for file in ("config.json", "probe.json", "STABLE"):
        shutil.copyfile(after / file, directory / file)
    return directory


async def test_weights_that_come_as_what_changed_are_loaded_and_proven(
    moe_server: ServerProcess, tmp_path: Path
) -> None:
    """Whatever the server holds: the directory has the base. One wrong bit is refused, and so is what does not fit."""
    directory = as_changes(moe_server, tmp_path / "step_1")
    wrong = as_changes(moe_server, tmp_path / "wrong", flip=1)
    broken = as_changes(moe_server, tmp_path / "broken")
    content = (broken / DELTA).read_bytes()
    (broken / DELTA).write_bytes(content[:-1000])
    async with pool_at(moe_server, 0) as pool:
        for _ in range(2):
            await pool.update(replace(update_to(moe_server, 1), directory=directory))
            turn = await pool.generate(PROMPT, GREEDY.replaced(temperature=1.0), affinity="a")
            assert disagreement(moe_server, 1, turn, PROMPT, 1.0).max() < TOLERANCE
        with pytest.raises(InferenceError, match=r"delta\.safetensors.*truncated"):
            await pool.update(replace(update_to(moe_server, 1), directory=broken))
        with pytest.raises(InferenceError, match=r"accepted version 1 .*: layer 1$"):
            await pool.update(replace(update_to(moe_server, 1), directory=wrong))


async def answer_to(server: ServerProcess, offer: WeightOffer) -> object:
    async with aiohttp.ClientSession(server.url) as session, session.post(OFFER_PATH, data=offer.encode()) as response:
        return await response.json()


async def test_weights_that_are_sent_are_loaded_and_proven(moe_server: ServerProcess, tmp_path: Path) -> None:
    """Whole and as what changed, whose base comes once. One wrong bit is refused; a client that is killed harms nobody."""
    changed = as_changes(moe_server, tmp_path / "changed")
    wrong = as_changes(moe_server, tmp_path / "wrong", flip=1)
    log = moe_server.config.log_file
    assert log is not None
    async with pool_at(moe_server, 0, send=True) as pool:
        for directory, version in ((moe_server.directories[1], 1), (changed, 2), (changed, 3)):
            probe = replace(update_to(moe_server, 1).probe, version=version)
            await pool.update(WeightUpdate(version, directory, probe, None))
            turn = await pool.generate(PROMPT, GREEDY.replaced(temperature=1.0), affinity="a")
            assert disagreement(moe_server, 1, turn, PROMPT, 1.0).max() < TOLERANCE
        with opened(WeightUpdate(4, changed, probe, None), CLAIM) as (offer, _):
            assert await answer_to(moe_server, offer) == {
                "holds": ["base/model.safetensors"],
            }
        with pytest.raises(InferenceError, match=r"accepted version 4 .*: layer 1$"):
            await pool.update(WeightUpdate(4, wrong, probe, None))
        _, writer = await asyncio.open_connection(moe_server.config.host, moe_server.config.port)
        begun = WeightOffer(1, None, CLAIM, {"model.safetensors": 1 << 20}).preamble() + bytes(1000)
        writer.write(f"POST {SEND_PATH} HTTP/1.1\r\nHost: server\r\nContent-Length: {1 << 21}\r\n\r\n".encode() + begun)
        await writer.drain()
        writer.close()
        await pool.update(update_to(moe_server, 0))
        turn = await pool.generate(PROMPT, GREEDY.replaced(temperature=1.0), affinity="a")
        assert disagreement(moe_server, 0, turn, PROMPT, 1.0).max() < TOLERANCE
        said = "hung up before its weights had come whole"
        await until(lambda: said in log.read_text(), f"the server to log that a client {said}")


async def test_weights_go_back_and_forth(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        for version in (1, 0, 1, 0):
            await pool.update(update_to(moe_server, version))
            turn = await pool.generate(PROMPT, GREEDY.replaced(temperature=1.0), affinity="a")
            assert turn.policy_version == version
            assert disagreement(moe_server, version, turn, PROMPT, 1.0).max() < TOLERANCE
    # Of rotary embeddings and a tied head, which no checkpoint holds, vLLM would say so at every load.
    assert moe_server.config.log_file is not None
    log = moe_server.config.log_file.read_text()
    assert "Failed to load weights" not in log
    assert re.search(rf"INFO .* Version 1 is loaded; {PAUSED.pattern}", log), "what we log is in vLLM's log"


@pytest.mark.promise("vLLM computes with the weights that were proven, and its routing is the trainer's")
async def test_a_wrong_probe_takes_the_server_out_and_says_so(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        probe = replace(update_to(moe_server, 1).probe, digests={})
        wrong = replace(update_to(moe_server, 0), probe=probe, version=7)
        with pytest.raises(InferenceError, match="version 7 and failed its probe"):
            await pool.update(wrong)
        (status,) = pool.status()
        assert (status.state, status.version) == ("out", None)
        await pool.update(update_to(moe_server, 0))
        assert pool.status()[0].state == "serving"


async def test_weights_of_another_shape_are_refused_and_the_server_lives(
    moe_server: ServerProcess, tmp_path: Path
) -> None:
    misshape(moe_server.directories[0], tmp_path / "step_8")
    async with pool_at(moe_server), binary_client(moe_server) as client:
        bad = replace(update_to(moe_server, 0), version=8, directory=tmp_path / "step_8")
        with pytest.raises(RequestRefused, match=r"422.*q_proj\.weight .*\[63, 64\], \[64, 64\]"):
            await client.load(bad, CLAIM)
        with pytest.raises(RequestRefused, match="no STABLE marker"):
            await client.load(replace(bad, directory=tmp_path), CLAIM)
        with pytest.raises(WeightsNotSeen, match=f"it has no {tmp_path}/elsewhere"):
            await client.load(replace(bad, directory=tmp_path / "elsewhere" / "step_8"), CLAIM)
        completion = await client.generate(request(moe_server, GREEDY.replaced(temperature=1.0)))
        assert disagreement(moe_server, 0, completion, PROMPT, 1.0).max() < TOLERANCE


async def test_requests_that_make_no_sense_are_refused_and_harm_nobody(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server), binary_client(moe_server) as client:
        wanted = request(moe_server, GREEDY)
        with pytest.raises(ServerFailure, match=r"404.*neither the base model nor a loaded adapter"):
            await client.generate(replace(wanted, model="stranger"))
        with pytest.raises(RequestRefused, match="token ids must be from 0 to 259"):
            await client.generate(replace(wanted, prompt_ids=np.array([1, 260], dtype=np.int32)))
        with pytest.raises(RequestRefused, match="a prompt of 512 tokens leaves no room"):
            await client.generate(replace(wanted, prompt_ids=np.ones(512, dtype=np.int32)))
        with pytest.raises(RequestRefused, match="413"):
            await client.generate(replace(wanted, prompt_ids=np.ones(50_000, dtype=np.int32)))
        async with aiohttp.ClientSession() as session:
            for body, status in ((b"\x81", 400), (b"", 400)):
                async with session.post(moe_server.url + wire.GENERATE_PATH, data=body) as response:
                    assert response.status == status
            for path in (wire.PROBE_PATH, wire.UPDATE_PATH):
                async with session.post(moe_server.url + path, data=b'{"model": 3}') as response:
                    assert response.status == 400
        assert len((await client.generate(wanted)).token_ids) == GREEDY.max_tokens


async def test_cancelling_a_request_aborts_it_in_the_engine(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server) as pool:
        tasks = [asyncio.create_task(generate_for_ever(pool, str(index))) for index in range(16)]
        await running_at(moe_server, lambda running: running >= 12)
        before = await metric(moe_server, "generation_tokens_total")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await running_at(moe_server, lambda running: running == 0)
        written = await metric(moe_server, "generation_tokens_total") - before
    # Not aborted, they would have had half of their tokens still to write, on average.
    assert written < len(tasks) * LONG.max_tokens / 4


async def test_a_request_that_is_cancelled_says_how_much_it_has_sampled(moe_server: ServerProcess) -> None:
    counted: list[int] = []
    async with pool_at(moe_server) as pool:
        before = await metric(moe_server, "generation_tokens_total")
        tasks = [
            asyncio.create_task(pool.generate(PROMPT, LONG, affinity=str(index), on_cut=counted.append))
            for index in range(4)
        ]
        while await metric(moe_server, "generation_tokens_total") < before + 8:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await running_at(moe_server, lambda running: running == 0)
        written = await metric(moe_server, "generation_tokens_total") - before
    cut = [each for each in ended if isinstance(each, asyncio.CancelledError)]
    whole = sum(len(each.completion_ids) for each in ended if isinstance(each, Turn))
    assert len(counted) == len(cut) > 0
    assert 0 < sum(counted) + whole <= written, "what the engine still sends when it is cut is not known"


async def generate_for_ever(pool: Served, affinity: str) -> None:
    """One request after the other, so that however slow the machine, one is in flight."""
    while True:
        await pool.generate(PROMPT, LONG, affinity=affinity)


@asynccontextmanager
async def kept_busy(server: ServerProcess, pool: Served) -> AsyncIterator[list[Turn]]:
    """Twelve requests in flight, once six run. Yields their turns; when the block ends, those in flight are waited for."""
    turns: list[Turn] = []
    ending = asyncio.Event()

    async def generate(affinity: str) -> None:
        while not ending.is_set():
            turns.append(await pool.generate(PROMPT, LONG, affinity=affinity))

    async with asyncio.TaskGroup() as tasks:
        for index in range(12):
            tasks.create_task(generate(str(index)))
        await running_at(server, lambda running: running >= 6)
        yield turns
        ending.set()


async def running_at(server: ServerProcess, enough: Callable[[float], bool]) -> None:
    """Returns when the number of requests that the engine says it runs is enough."""
    async with asyncio.timeout(60):
        while not enough(await metric(server, "num_requests_running")):  # noqa: ASYNC110  (it is another process's)
            await asyncio.sleep(0.005)


async def metric(server: ServerProcess, name: str) -> float:
    """What vLLM says of itself."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as response:
        text = await response.text()
    found = re.search(rf"^vllm:{name}\{{.*\}} ([0-9.e+]+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])
