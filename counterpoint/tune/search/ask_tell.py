"""Any optimizer with `ask()` and `tell()` as a searcher.

Its state is the list of what it was asked and told; a restored one is a new optimizer, with the same seed, that is asked and told
the same again. One that answers otherwise then is no longer the same search, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.json_values import as_json
from counterpoint.tune.result import Result
from counterpoint.tune.search.searcher import Searcher, objectives, values_in


class AskTellSearch(Searcher):
    """Suggests what `optimizer.ask()` returns and tells it `optimizer.tell(asked, value)`, or a list of values for several.

    The space is the optimizer's own.

    Args:
        optimizer: The object; its answers depend on nothing but its seed and what it is told.
        metric: The metric, or several.
        mode: `min` or `max` for each.
        optimizer_mode: Which of them the optimizer itself looks for; values are negated where it differs.
        config_of: Makes a configuration of what `ask` returned; by default that itself, or its `params` or `value`, if a dict.
        batch: Tells so many at once, as a list of pairs (as `cmaes` wants it); None tells each alone.

    Raises:
        TuneError: The optimizer has no `ask` and `tell`.
    """

    def __init__(
        self,
        optimizer: Any,
        metric: str | list[str] | None = None,
        mode: str | list[str] | None = None,
        optimizer_mode: str = "min",
        config_of: Callable[[Any], dict[str, Any]] | None = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(metric, mode)
        if not (callable(getattr(optimizer, "ask", None)) and callable(getattr(optimizer, "tell", None))):
            raise TuneError(f"{type(optimizer).__name__} has no ask() and tell(); AskTellSearch needs both")
        self._optimizer = optimizer
        self._optimizer_mode = optimizer_mode
        self._config_of = config_of or _config_of
        self._batch = batch
        self._asked: dict[str, Any] = {}  # what was asked and not told
        self._waiting: list[tuple[Any, Any]] = []  # of the batch
        self._history: list[list[Any]] = []

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Asks for a configuration."""
        config = self._ask(trial_id)
        self._history.append(["ask", trial_id, config])
        return config

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Tells the values. A trial that failed, or has no finite number, is not told."""
        if trial_id not in self._asked:
            return
        values = None if error else values_in(self, result)
        self._history.append(["tell", trial_id, values])
        self._tell(trial_id, values)

    def state(self) -> dict[str, Any]:
        """What it was asked and told."""
        return {"history": [list(one) for one in self._history]}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Asks and tells the same again. Raises `TuneError` if the optimizer is another one."""
        for kind, trial_id, value in state["history"]:
            if kind == "tell":
                self._tell(trial_id, value)
            elif (config := self._ask(trial_id)) != value:
                raise TuneError(
                    f"{type(self._optimizer).__name__} asked for {config} where it had asked for {value}: it is not the "
                    "optimizer of the experiment that is resumed. Give a new one with the same seed and settings"
                )
        self._history = [list(one) for one in state["history"]]

    def _ask(self, trial_id: str) -> dict[str, Any]:
        asked = self._optimizer.ask()
        self._asked[trial_id] = asked
        config: dict[str, Any] = as_json(self._config_of(asked), "what ask() returned")
        return config

    def _tell(self, trial_id: str, values: list[float] | None) -> None:
        asked = self._asked.pop(trial_id)
        if values is None:
            return
        signed = [
            value if mode == self._optimizer_mode else -value
            for value, (_, mode) in zip(values, objectives(self), strict=True)
        ]
        told = signed[0] if len(signed) == 1 else signed
        if self._batch is None:
            self._optimizer.tell(asked, told)
            return
        self._waiting.append((asked, told))
        if len(self._waiting) >= self._batch:
            batch, self._waiting = self._waiting, []
            self._optimizer.tell(batch)


def _config_of(asked: Any) -> dict[str, Any]:
    for candidate in (asked, getattr(asked, "params", None), getattr(asked, "value", None)):
        if isinstance(candidate, dict):
            return candidate
    raise TuneError(
        f"ask() returned a {type(asked).__name__}; pass config_of, which makes a configuration (a dict) of it"
    )
