"""Answers that no model can give take their server out, whichever protocol they come by; the request is made elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    InferenceError,
    RequestRefused,
    SamplingParameters,
    Scores,
)
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.model_facts import AnswerBounds, read_bounds
from counterpoint.inference.pool import calls
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.transport.records import Alternatives
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until

SAMPLING = SamplingParameters(temperature=1.0, max_tokens=3)
PROMPT = np.array([7, 8, 9], dtype=np.int32)
BOUNDS = AnswerBounds(vocabulary=100, experts=8, routing=(2, 2))


@asynccontextmanager
async def pool_of(*urls: str, **settings: Any) -> AsyncIterator[Served]:
    defaults = {"health_interval_seconds": 3600, "startup_timeout_seconds": 60, "request_timeout_seconds": 60}
    pool = InferencePool(PoolConfig(urls=list(urls), **(defaults | settings))).model("a-model", bounds=BOUNDS)
    try:
        await pool.start()
        await until(lambda: all(status.state == "serving" for status in pool.status()), "all servers")
        yield pool
    finally:
        await pool.release()


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


LIES: dict[str, dict[str, Any]] = {
    "an id beyond the vocabulary": {"token_ids": integers(5, 100, 5)},
    "a negative id": {"token_ids": integers(5, -1, 5)},
    "a positive log-probability": {"log_probabilities": floats(-1, 0.5, -1)},
    "NaN": {"log_probabilities": floats(-1, np.nan, -1)},
    "minus infinity": {"log_probabilities": floats(-1, -np.inf, -1)},
    "infinity": {"log_probabilities": floats(-1, np.inf, -1)},
    "more tokens than asked for": {"token_ids": integers(5, 5, 5, 5), "log_probabilities": floats(-1, -1, -1, -1)},
    "an expert that the model has not": {"routed_experts": np.full((5, 2, 2), 8, dtype=np.uint8)},
    "routing of another number of layers": {"routed_experts": np.zeros((5, 3, 2), dtype=np.uint8)},
    "routing of another number of tokens": {"routed_experts": np.zeros((4, 2, 2), dtype=np.uint8)},
    "alternatives that nobody asked for": {"alternatives": Alternatives(np.zeros((1, 0), np.int32), floats())},
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_wrong_answer_takes_its_server_out_at_once(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    async with FakeServer() as liar, FakeServer() as good, pool_of(liar.url, good.url) as pool:
        complete = liar._complete

        async def lying(asked: GenerateRequest) -> Completion:
            return replace(await complete(asked), **LIES[lie])

        monkeypatch.setattr(liar, "_complete", lying)
        turn = await pool.generate(PROMPT, SAMPLING, affinity="a")
        assert turn.server == good.url
        assert {status.url: status.state for status in pool.status()} == {liar.url: "out", good.url: "serving"}
        assert len(liar.asked) == 1
        assert pool.status()[0].reason.startswith("it gave a wrong answer: ")


async def test_a_server_that_has_lied_loads_and_proves_its_weights_before_it_serves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeServer() as server, pool_of(server.url, health_interval_seconds=0.02) as pool:
        await pool.update(weight_update(4))
        complete = server._complete
        lies = iter([True])

        async def lying_once(asked: GenerateRequest) -> Completion:
            return replace(await complete(asked), **(LIES["NaN"] if next(lies, False) else {}))

        monkeypatch.setattr(server, "_complete", lying_once)
        turn = await pool.generate(PROMPT, SAMPLING, affinity="a")
        assert turn.completion_ids.tolist() == [4, 4, 4]
        assert server.versions == [4, 4]


@pytest.mark.parametrize("values", [[0.5] * 2, [np.nan] * 2, [-np.inf] * 2, [-1], [-1] * 3, []])
async def test_scores_that_are_no_log_probabilities_take_their_server_out(
    monkeypatch: pytest.MonkeyPatch, values: list[float]
) -> None:
    """Nor do those of another number of tokens than were asked for."""
    async with FakeServer() as liar, FakeServer() as good, pool_of(liar.url, good.url) as pool:
        monkeypatch.setattr("tests.support.fake_inference.wire.encode_scores", encode_with(floats(*values), liar))
        scores = await pool.score(integers(1, 2, 3), 1, affinity="a")
        assert scores.tolist() == pytest.approx([-0.02, -0.03])
        assert [status.state for status in pool.status()] == ["out", "serving"]


def encode_with(values: np.ndarray, liar: FakeServer) -> Any:
    """Encodes scores as a server does; the first ones, which are those of `liar`, as `values`."""
    from counterpoint.inference.wire import encode_scores

    def encode(scores: Scores) -> bytes:
        first = len(liar.scored) == 1 and not wrong
        wrong.append(first)
        return encode_scores(replace(scores, log_probabilities=values) if first else scores)

    wrong: list[bool] = []
    return encode


@pytest.mark.parametrize("outside", [-1, 100])
async def test_a_prompt_of_ids_that_the_model_has_not_is_refused_before_it_is_sent(outside: int) -> None:
    async with FakeServer() as server, pool_of(server.url) as pool:
        with pytest.raises(RequestRefused, match=str(outside)):
            await pool.generate(integers(7, outside), SAMPLING, affinity="a")
        assert not server.asked
        assert pool.status()[0].state == "serving"


@dataclass
class StockServer:
    """A stock server that answers every request with `choice`."""

    choice: dict[str, Any]
    asked: int = 0
    url: str = ""
    _runner: web.AppRunner = field(init=False)

    async def __aenter__(self) -> StockServer:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.post("/v1/completions", self._complete)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"choices": [self.choice]})


def choice(token_ids: object = (5, 5, 5), log_probabilities: object = (-1.0, -1.0, -1.0)) -> dict[str, Any]:
    return {
        "token_ids": token_ids,
        "logprobs": {"token_logprobs": log_probabilities},
        "finish_reason": "length",
    }


@pytest.mark.parametrize(
    "lie",
    [
        choice(token_ids=[5, 100, 5]),
        choice(token_ids=[5, -1, 5]),
        choice(log_probabilities=[-1.0, 0.5, -1.0]),
        choice(log_probabilities=[-1.0, -1.0]),
    ],
)
async def test_a_stock_server_that_lies_is_taken_out(lie: dict[str, Any]) -> None:
    async with (
        StockServer(lie) as liar,
        StockServer(choice()) as good,
        pool_of(liar.url, good.url, protocol="openai") as pool,
    ):
        turn = await pool.generate(PROMPT, SAMPLING, affinity="a")
        assert turn.server == good.url
        assert (liar.asked, pool.status()[0].state) == (1, "out")


@pytest.mark.parametrize(
    "malformed",
    [
        choice(token_ids=[5, 5.7, 5]),
        choice(token_ids=["5", "5", "5"]),
        choice(token_ids=[True, True, True]),
        choice(token_ids=[[5], [5], [5]]),
        choice(token_ids=[5, 2**40, 5]),
        choice(token_ids=None),
        [],
        choice(log_probabilities=["-1", "-1", "-1"]),
        choice(log_probabilities=[None, None, None]),
        choice(log_probabilities=[[-1.0], [-1.0], [-1.0]]),
    ],
)
async def test_numbers_of_a_stock_server_are_not_made_of_what_are_none(malformed: Any) -> None:
    async with StockServer(malformed) as server, pool_of(server.url, protocol="openai", max_retries=0) as pool:
        with pytest.raises(InferenceError, match="log-probabilities"):
            await pool.generate(PROMPT, SAMPLING, affinity="a")


@pytest.mark.parametrize(
    "rows", [None, [None, None, None], [{}], [{"token_id:5": None}] * 3, [{"token_id:x": -1.0}] * 3]
)
async def test_probable_tokens_of_a_stock_server_that_are_none(rows: object) -> None:
    malformed = choice()
    malformed["logprobs"]["top_logprobs"] = rows
    async with StockServer(malformed) as server, pool_of(server.url, protocol="openai", max_retries=0) as pool:
        with pytest.raises(InferenceError):
            await pool.generate(PROMPT, SAMPLING.replaced(alternatives=1), affinity="a")


ROW = {"token_id:5": -0.5, "token_id:7": -1.5, "token_id:1": -2.5}


@pytest.mark.parametrize(
    ("left_out", "asked"),
    [
        ([{"token_id:5": -0.5}] * 3, 2),
        ([{"token_id:5": -0.5, "token_id:0": -9999.0}] * 3, 1),
        ([{"token_id:5": -0.5, "token_id:0": -9999.0}] * 3, 2),
        ([{"token_id:0": -9999.0}] * 3, 1),
        ([ROW, {"token_id:5": -0.5, "token_id:0": -9999.0}, ROW], 2),
        ([ROW, ROW, {"token_id:5": -0.5}], 2),
    ],
)
async def test_probable_tokens_that_a_stock_server_has_left_out_are_asked_for_again(left_out: Any, asked: int) -> None:
    """As it does beside requests for given tokens: nothing is wrong with it, nor are these the most probable ones."""
    answers = [left_out, left_out, left_out, [ROW] * 3]

    class Forgetful(StockServer):
        async def _complete(self, request: web.Request) -> web.Response:
            if (await request.json())["max_tokens"] == 1:  # what the pool asks, to see whether it is well
                return web.json_response({"choices": [choice([5], [-0.5])]})
            self.choice["logprobs"]["top_logprobs"] = answers[self.asked]
            return await super()._complete(request)

    async with Forgetful(choice()) as server, pool_of(server.url, protocol="openai") as pool:
        turn = await pool.generate(PROMPT, SAMPLING.replaced(alternatives=asked), affinity="a")
        assert turn.alternatives is not None
        assert turn.alternatives.token_ids_TK.tolist() == [[5, 7][:asked]] * 3
        assert (server.asked, pool.status()[0].state) == (4, "serving")


@pytest.mark.parametrize("row", [{"token_id:5": 0.0, "token_id:9": -9999.0}, ROW])
async def test_probable_tokens_of_a_cut_distribution_may_have_no_probability(row: dict[str, float]) -> None:
    answer = choice()
    answer["logprobs"]["top_logprobs"] = [row] * 3
    async with StockServer(answer) as server, pool_of(server.url, protocol="openai") as pool:
        turn = await pool.generate(PROMPT, SAMPLING.replaced(alternatives=2), affinity="a")
        assert (turn.server, server.asked) == (server.url, 1)


async def test_a_long_routing_is_checked_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CHECK_IN_THREAD_BYTES", 0)
    off_the_loop: list[str] = []
    check = Completion.check

    def checking(self: Completion, request: GenerateRequest, bounds: AnswerBounds) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            off_the_loop.append("yes")
        check(self, request, bounds)

    monkeypatch.setattr(Completion, "check", checking)
    async with FakeServer() as server, pool_of(server.url, max_retries=0) as pool:
        with pytest.raises(InferenceError, match="expert"):  # of the fake: the number of the row, from 0 to 250
            await pool.generate(np.arange(10, dtype=np.int32), SAMPLING, affinity="a")
    assert off_the_loop


def test_bounds_are_those_of_the_text_model(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    assert read_bounds(tmp_path, 50) == AnswerBounds(50)
    text = {"vocab_size": 60, "num_experts": 4, "num_hidden_layers": 3, "num_experts_per_tok": 2}
    path.write_bytes(orjson.dumps(text))
    assert read_bounds(tmp_path, 50) == AnswerBounds(60, 4, (3, 2))
    path.write_bytes(orjson.dumps({"vocab_size": 1, "text_config": text}))
    assert read_bounds(tmp_path) == AnswerBounds(60, 4, (3, 2))
    path.write_bytes(orjson.dumps({"text_config": {"num_hidden_layers": 3}}))
    assert read_bounds(tmp_path, 50) == AnswerBounds(50)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_bounds(tmp_path)
