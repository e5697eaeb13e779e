"""The kinds `math`, `exact` and `regex`, which compare a completion with an answer or a pattern.

Whatever may take long on hostile text runs in `processes.BoundedProcesses`. A completion that is over a limit there has the value
0 and the metric `over_limit`; an answer or a machine at fault fails the rollout.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Sequence

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.rewards.base import Attempt, Value
from counterpoint.environments.rewards.config import ExactConfig, MathConfig, RegexConfig
from counterpoint.environments.rewards.processes import BoundedProcesses, OverLimit
from counterpoint.environments.rewards.reasoning import answer_for

_PATIENCE = 30.0
"""Seconds of time for each second of processor time, and in any case: a busy machine must not change a reward."""

_MOST_MARKS = 1000
"""Combining characters on one letter. Text of people has some five."""
_MADE_OF_MARKS = "\u0f73\u0f75\u0f81"
"""Characters that are no marks, and of which each is taken apart into two."""

_OVER_LIMIT = Value(0.0, {"over_limit": 1.0})


def seconds_for(cpu_seconds: float) -> float:
    """Returns how long to wait for a process that may use `cpu_seconds`."""
    return _PATIENCE * (1 + cpu_seconds)


class _OfProcesses:
    bounds = (0.0, 1.0)
    columns = frozenset[str]()

    def __init__(self, name: str, processes: BoundedProcesses, cpu_seconds: float) -> None:
        self.name = name
        self.processes = processes
        self.cpu_seconds = cpu_seconds

    async def start(self, context: EnvironmentContext) -> None:
        """Nothing: the processes start when needed."""

    async def close(self) -> None:
        """Nothing: the rubric ends the processes."""

    async def _run(self, task: str, **arguments: object) -> dict[str, object]:
        return await self.processes.run(
            task, arguments, cpu_seconds=self.cpu_seconds, seconds=seconds_for(self.cpu_seconds)
        )


class MathReward(_OfProcesses):
    """Compares an answer by the library math-verify, as `mathematics.py` has it read."""

    def __init__(self, config: MathConfig, name: str, processes: BoundedProcesses) -> None:
        """Raises `ValueError` where the library is missing."""
        super().__init__(name, processes, config.cpu_seconds)
        self._config = config
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError('kind = "math" needs the library math-verify: pip install "counterpoint[math-verify]"')

    async def score(self, attempt: Attempt) -> Value:
        """See `RewardFunction`. Raises `ValueError` for an answer that cannot be read."""
        gold = attempt.example.answer
        try:
            answer = await self._compare(gold, attempt.completion)
        except OverLimit:
            await self._check(gold, attempt.example)
            return _OVER_LIMIT
        if "fault" in answer:
            raise ValueError(
                f"part {self.name!r}: answer {gold[:200]!r} of example {attempt.example.index}: {answer['fault']}"
            )
        return Value(float(bool(answer["equal"])), {"found": float(bool(answer["found"])), "over_limit": 0.0})

    async def _check(self, gold: str, example: Example) -> None:
        """Raises `ValueError` if the answer alone is over the limit: the completion is then not to blame."""
        try:
            await self._compare(gold, "")
        except OverLimit as error:
            raise ValueError(
                f"part {self.name!r}: answer {gold[:200]!r} of example {example.index} cannot be read: {error}"
            ) from error

    async def _compare(self, gold: str, text: str) -> dict[str, object]:
        config = self._config
        return await self._run(
            "mathematics", answer=gold, text=text, float_rounding=config.float_rounding, strict=config.strict
        )


class ExactReward(_OfProcesses):
    """Compares text after normalising it."""

    def __init__(self, config: ExactConfig, name: str, processes: BoundedProcesses) -> None:
        super().__init__(name, processes, config.cpu_seconds)
        self._config = config
        self.columns = frozenset[str]() if config.answers_column is None else frozenset({config.answers_column})

    async def score(self, attempt: Attempt) -> Value:
        """See `RewardFunction`."""
        text: object = answer_for(self._config.extract or "", attempt.completion)
        metrics = {}
        if self._config.extract is not None:
            try:
                text = (await self._run("search", pattern=self._config.extract, text=text))["match"]
            except OverLimit:
                return _OVER_LIMIT
            metrics = {"found": float(text is not None), "over_limit": 0.0}
        expected = {normalised(answer, self._config) for answer in self._answers(attempt.example)}
        return Value(float(isinstance(text, str) and normalised(text, self._config) in expected), metrics)

    def _answers(self, example: Example) -> Sequence[str]:
        column = self._config.answers_column
        if column is None:
            return [example.answer]
        answers = example.info.get(column)
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"part {self.name!r}: column {column!r} of example {example.index} is no list of texts")
        return answers


def normalised(text: str, config: ExactConfig) -> str:
    """Returns the text as `exact` compares it."""
    if not _has_endless_marks(text):
        text = unicodedata.normalize("NFC", text)
    if config.ignore_case:
        text = text.casefold()
    if config.ignore_punctuation:
        text = "".join(letter for letter in text if unicodedata.category(letter)[0] not in "PS")
    return " ".join(text.split()) if config.collapse_whitespace else text.strip()


def _has_endless_marks(text: str) -> bool:
    """Whether marks stand in a row that no text has. To sort them takes the square of their number, and cannot be stopped."""
    in_a_row = 0
    for letter in () if text.isascii() else text:
        in_a_row = in_a_row + 1 if unicodedata.combining(letter) or letter in _MADE_OF_MARKS else 0
        if in_a_row > _MOST_MARKS:
            return True
    return False


class RegexReward(_OfProcesses):
    """Searches a regular expression."""

    def __init__(self, config: RegexConfig, name: str, processes: BoundedProcesses) -> None:
        super().__init__(name, processes, config.cpu_seconds)
        self._config = config

    async def score(self, attempt: Attempt) -> Value:
        """See `RewardFunction`."""
        try:
            answer = await self._run("search", pattern=self._config.pattern, text=attempt.completion)
        except OverLimit:
            return _OVER_LIMIT
        return Value(float((answer["match"] is None) == self._config.absent), {"over_limit": 0.0})
