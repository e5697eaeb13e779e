"""The reward function `judge`: fills the prompt, looks into the cache, asks, and reads the score."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from weakref import WeakValueDictionary

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.rewards.base import Attempt, Value
from counterpoint.environments.rewards.judge.budget import Budget, BudgetExhausted
from counterpoint.environments.rewards.judge.cache import AnswerCache, JudgeAnswer, key_of
from counterpoint.environments.rewards.judge.client import JudgeClient, JudgeFailed
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.judge.only_number import NoScore
from counterpoint.environments.rewards.judge.score import score_of
from counterpoint.environments.rewards.processes import BoundedProcesses
from counterpoint.environments.rewards.template import Template

logger = logging.getLogger(__name__)

_END_OF_COMPLETION = re.compile(r"</(?=\s*completion)", re.IGNORECASE)
_RECORDED = 2000
"""Characters of an answer in the rollout's state."""


class JudgeReward:
    """Scores completions by one judge. Equal requests are made once: the others wait for its answer."""

    def __init__(self, config: JudgeConfig, name: str, processes: BoundedProcesses) -> None:
        """Raises `ValueError` if the API key cannot be read."""
        self._config = config
        self._name = name
        self._processes = processes
        self._prompt = Template(config.prompt, "prompt")
        self.columns = self._prompt.fields - {"prompt", "answer", "completion", "least", "most"}
        self._client = JudgeClient(config)
        self._budget = Budget(config.budget, None)
        self._cache: AnswerCache | None = None
        if config.cache_directory is not None:
            self._use_cache(config)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._has_warned = False

    async def start(self, context: EnvironmentContext) -> None:
        """Puts budget and cache into the environment's directory, where all of its processes find them."""
        directory = context.directory / "judge" / self._name
        self._budget = Budget(self._config.budget, directory / "budget.json")
        if self._config.cache_directory is None:
            self._use_cache(self._config.model_copy(update={"cache_directory": directory / "cache"}))

    @property
    def bounds(self) -> tuple[float, float]:
        """See `RewardFunction`."""
        fallback = self._config.fallback or 0.0
        return min(0.0, fallback), max(1.0, fallback)

    async def score(self, attempt: Attempt) -> Value:
        """See `RewardFunction`. Raises `JudgeFailed` and `BudgetExhausted`, which name the part."""
        began = time.monotonic()
        messages = self._messages(attempt)
        try:
            answer, value, cached = await self._answer(messages)
        except BudgetExhausted as error:
            self._warn(error)
            if self._config.fallback is None:
                raise BudgetExhausted(f"part {self._name!r}: {error}") from None
            return Value(self._config.fallback, {"fallback": 1.0})
        except JudgeFailed as error:
            raise JudgeFailed(f"part {self._name!r}: {error}") from None
        recorded = attempt.state.setdefault("judge", {})
        if isinstance(recorded, dict):
            recorded[self._name] = {"value": value, "answer": answer.text[:_RECORDED], "model": answer.model}
        seconds = time.monotonic() - began
        return Value(value, {"fallback": 0.0, "cached": float(cached), "seconds": seconds})

    async def close(self) -> None:
        """See `RewardFunction`."""
        await self._client.close()

    def _use_cache(self, config: JudgeConfig) -> None:
        if config.cache_entries and config.cache_directory is not None:
            self._cache = AnswerCache(config.cache_directory, config.cache_entries)

    def _messages(self, attempt: Attempt) -> list[dict[str, str]]:
        example, config = attempt.example, self._config
        values = {
            **example.info,
            "prompt": example.prompt,
            "answer": example.answer,
            "completion": _END_OF_COMPLETION.sub("<_/", attempt.completion),
            "least": f"{config.least:g}",
            "most": f"{config.most:g}",
        }
        content = self._prompt.fill(values, f"part {self._name!r}: example {example.index}")
        messages = [{"role": "user", "content": _valid(content)}]
        return [{"role": "system", "content": config.system}, *messages] if config.system is not None else messages

    async def _answer(self, messages: list[dict[str, str]]) -> tuple[JudgeAnswer, float, bool]:
        """Returns an answer, its value, and whether it was in the cache."""
        key = key_of({"format": 1, "base_url": self._config.base_url} | self._client.request(messages))
        cache = self._cache
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if cache is not None and (kept := await asyncio.to_thread(cache.get, key)) is not None:
                try:
                    return kept, await self._value(kept.text), True
                except NoScore:  # kept under another pattern or range
                    pass
            answer, value = await self._client.ask(messages, self._budget, self._value)
            if cache is not None:
                await asyncio.to_thread(cache.put, key, answer)
            return answer, value, False

    async def _value(self, text: str) -> float:
        return await score_of(text, self._config, self._processes)

    def _warn(self, error: BudgetExhausted) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("judge %r: %s; rollouts now %s", self._name, error, self._consequence())

    def _consequence(self) -> str:
        return "fail" if self._config.fallback is None else f"get its fallback, {self._config.fallback:g}"


def _valid(text: str) -> str:
    """Returns the text as UTF-8 can have it: a completion may hold half a character."""
    return text.encode(errors="replace").decode()
