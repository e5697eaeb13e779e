"""Compares servers of others with the run before their use: a teacher's tokenizer, and stock servers' sampling.

Servers of our own read tokens as the run does, and return the log-probabilities that the trainer needs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from counterpoint.environments.chat import Chat
from counterpoint.environments.sampling import SHAPING, SamplingConfig
from counterpoint.inference.base import InferenceError, RequestRefused
from counterpoint.inference.clients.client import ServerClient
from counterpoint.inference.pool.calls import ignores_temperature
from counterpoint.inference.pool.holder import Vetting
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.loop_health.watchdog import awaiting

logger = logging.getLogger(__name__)

COMPARED_AT_ONCE = 4096
"""Token ids in one request for their texts."""

MODE = "--logprobs-mode processed_logprobs"
"""vLLM's flag for the log-probabilities of the distribution that it samples from. Its default is those at temperature 1, of all
tokens."""


IGNORES = "answers log-probabilities at temperature 1 of all tokens, whatever is sampled (vLLM's default)"

Detokenize = Callable[[list[int]], Awaitable[str]]
"""Returns the text of token ids, by a server's tokenizer. Raises `InferenceError`."""


class StockPool(Protocol):
    """The part of `inference.pool.pool.Served` that asks stock servers."""

    async def vet(self, vetting: Vetting) -> None:
        """Asks each server, also later ones before they serve. Raises as `vetting` for those that are there."""


async def check_stock_servers(pool: StockPool, config: Callable[[], RunConfig], chat: Chat) -> set[str]:
    """Raises `ConfigurationError` if a run's stock servers answer log-probabilities or text that it cannot train on.

    One that joins later, or is started anew, takes no requests then. `config` returns the configuration in force. Returns the
    servers that ignore the temperature, and keeps this set up to date (`check_sampling`). Raises `InferenceError` if they do
    not answer.
    """
    ignoring, run = set[str](), config()

    async def check(client: ServerClient) -> None:
        ignoring.discard(client.url)
        try:
            if await ignores_temperature(client, run.served_model or run.model):
                check_sampling([client.url], config())
                ignoring.add(client.url)
                logger.warning(
                    "%s %s. They are right as the run samples. An agent that sets a temperature of its own would be trained with "
                    "wrong ones: start it with %s", client.url, IGNORES, MODE,
                )  # fmt: skip
        except RequestRefused as error:
            said = "Which log-probabilities %s answers cannot be told; %s is needed: %s"
            logger.warning(said, client.url, MODE, error)
        await check_reading(client.detokenize, chat, client.url)

    if run.inference.protocol == "openai":
        with awaiting("what stock servers answer at two temperatures, and how they read tokens", "inference"):
            await pool.vet(check)
    return ignoring


async def check_reading(detokenize: Detokenize, chat: Chat, name: str) -> None:
    """Raises `ConfigurationError` if a stock server reads a token otherwise than the run: as `compare_tokenizers`."""
    advice = (
        'give the servers the model\'s directory with "tokenizer_class": "PreTrainedTokenizerFast" in its '
        "tokenizer_config.json, so that vLLM reads tokenizer.json as it is, or use servers of `counterpoint inference`"
    )
    await compare_tokenizers(detokenize, chat, name, advice)


def check_sampling(ignoring: Collection[str], config: RunConfig) -> None:
    """Raises `ConfigurationError` if a run samples as servers that ignore the temperature have no log-probabilities for."""
    plain = SamplingConfig()
    for environment in config.environments if ignoring else ():
        sampling = config.sampling_of(environment)
        if shaping := [name for name in SHAPING if getattr(sampling, name) != getattr(plain, name)]:
            given = ", ".join(f"{name} = {getattr(sampling, name)}" for name in shaping)
            raise ConfigurationError(
                f"{', '.join(ignoring)} {IGNORES}; the run samples for environment {environment.name!r} with {given}, and would "
                f"train on other ratios than it has: start the server with {MODE}, or leave {' and '.join(shaping)} out"
            )


async def compare_tokenizers(detokenize: Detokenize, chat: Chat, name: str, advice: str) -> None:
    """Raises `ConfigurationError` unless every token id of the run's tokenizer stands for the same text at the servers.

    `name` is the servers' key or one server's address, and `advice` says what the user can do. Raises `InferenceError` if they
    do not answer.

    Does not compare spaces: some tokenizers remove those before punctuation when they decode.
    """
    for first in range(0, chat.vocabulary, COMPARED_AT_ONCE):
        ids = list(range(first, min(first + COMPARED_AT_ONCE, chat.vocabulary)))
        own = (await in_thread(chat.transcribe, [ids]))[0].replace(" ", "")  # a server may join a run that trains
        try:
            theirs = (await detokenize(ids)).replace(" ", "")
        except InferenceError as error:
            what = f"{name}: its tokenizer cannot be compared with the run's, token ids {ids[0]} to {ids[-1]}: {error}"
            raise (ConfigurationError if isinstance(error, RequestRefused) else InferenceError)(what) from error
        if own != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), min(len(own), len(theirs))
            )
            raise ConfigurationError(
                f"{name}: its tokenizer is not the run's: between the token ids {ids[0]} and {ids[-1]} the run's reads "
                f"{own[at : at + 20]!r} where that of {name} reads {theirs[at : at + 20]!r}; {advice}"
            )
