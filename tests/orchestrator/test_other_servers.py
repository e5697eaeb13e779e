"""What is compared before a run uses stock servers, or a teacher's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import Completion, GenerateRequest, InferenceError, RequestRefused, ServerFailure
from counterpoint.inference.pool.calls import ignores_temperature
from counterpoint.inference.pool.holder import Vetting
from counterpoint.orchestrator.other_servers import check_sampling, check_stock_servers, compare_tokenizers
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.run.changes import apply
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Alternatives
from tests.orchestrator.toy_model import make_toy_model

URL = "http://a:1"


class Stock:
    """A pool of one stock server, and its client."""

    url = URL

    def __init__(self, chat: Chat, *, ignores: bool = False, error: Exception | None = None) -> None:
        self.chat, self.ignores, self.error = chat, ignores, error
        self.other: dict[str, str] = {}
        self.asked: list[str] = []

    async def vet(self, vetting: Vetting) -> None:
        client: Any = self
        self.vetting = partial(vetting, client)
        await self.vetting()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request.model)
        return answered(request, [3.0, 1.0, 0.5, 0.0, -1.0, -2.0], is_raw=self.ignores)

    async def detokenize(self, token_ids: list[int]) -> str:
        if self.error is not None:
            raise self.error
        text = self.chat.transcribe([token_ids])[0]
        for own, theirs in self.other.items():
            text = text.replace(own, theirs)
        return text


def answered(request: GenerateRequest, logits: list[float], *, is_raw: bool) -> Completion:
    scaled = np.asarray(logits) / (1.0 if is_raw else request.sampling.temperature)
    values = (scaled - np.log(np.exp(scaled).sum())).astype(np.float32)
    count = request.sampling.alternatives
    top = Alternatives(np.arange(count, dtype=np.int32)[None], values[None, :count])
    return Completion(np.asarray([0], np.int32), values[:1], "length", routed_experts=None, alternatives=top)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_toy_model(tmp_path_factory.mktemp("stock") / "model"))


def config_of(directory: Path, protocol: str = "openai", **values: Any) -> RunConfig:
    environments = [{"name": "toy", "kind": "reverse-text", "sampling": values.pop("own", {})}]
    inference, lora = {"protocol": protocol}, {"rank": 2}
    return RunConfig(
        output_dir=directory,
        model="m",
        environments=environments,
        inference=inference,
        training={"lora": lora},
        **values,
    )


@pytest.mark.parametrize(
    ("error", "expected"), [(ServerFailure("it is down"), InferenceError), (RequestRefused("no"), ConfigurationError)]
)
async def test_a_server_that_is_down_at_the_start_is_no_bad_configuration(
    chat: Chat, error: Exception, expected: type[Exception]
) -> None:
    with pytest.raises(expected, match=f"teacher: its tokenizer cannot be compared .*: {error}") as raised:
        await compare_tokenizers(Stock(chat, error=error).detokenize, chat, "teacher", "take another")
    assert type(raised.value) is expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"sampling": {"temperature": 0.6}}, "temperature = 0.6"),
        ({"sampling": {"top_p": 0.9}}, "top_p = 0.9"),
        ({"own": {"top_k": 5}}, "top_k = 5"),
    ],
)
async def test_a_stock_server_in_another_mode_is_refused_with_the_flag(
    chat: Chat, tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    config = config_of(tmp_path, **values)
    with pytest.raises(ConfigurationError, match=f"{URL}.*{named}.*--logprobs-mode processed_logprobs"):
        await check_stock_servers(Stock(chat, ignores=True), lambda: config, chat)
    await check_stock_servers(Stock(chat), lambda: config, chat)


async def test_at_temperature_1_the_mode_is_only_told(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Stock(chat, ignores=True)
    config = config_of(tmp_path, served_model="theirs")
    ignoring = await check_stock_servers(pool, lambda: config, chat)
    assert pool.asked == ["theirs", "theirs"]
    [record] = [record for record in caplog.records if "--logprobs-mode" in record.getMessage()]
    assert record.levelname == "WARNING"
    with pytest.raises(ConfigurationError, match=f"{URL} .*temperature = 0.6"):
        check_sampling(ignoring, apply(config, {"sampling.temperature": 0.6}))
    config = apply(config, {"sampling.temperature": 0.6})
    with pytest.raises(ConfigurationError, match=r"temperature = 0.6"):
        await pool.vetting()  # as it comes back
    assert not ignoring, "it is out of service"
    pool.ignores = False
    await pool.vetting()
    check_sampling(ignoring, config)


async def test_a_stock_server_that_reads_tokens_otherwise_is_refused(chat: Chat, tmp_path: Path) -> None:
    pool = Stock(chat)
    pool.other = {"A": "\u0120"}
    with pytest.raises(ConfigurationError, match="PreTrainedTokenizerFast"):
        await check_stock_servers(pool, lambda: config_of(tmp_path), chat)
    await check_stock_servers(pool, lambda: config_of(tmp_path, protocol="binary"), chat)


@pytest.mark.parametrize(("logits", "knows"), [([3.0, 1.0, 0.5, 0.0, -1.0, -2.0], True), ([0.0] * 6, False)])
@pytest.mark.parametrize("is_raw", [True, False])
async def test_the_mode_is_known_by_two_temperatures(logits: list[float], knows: bool, is_raw: bool) -> None:
    class Client:
        async def generate(self, request: GenerateRequest) -> Completion:
            return answered(request, logits, is_raw=is_raw)

    client: Any = Client()
    assert await ignores_temperature(client, "m") is (is_raw and knows)
