"""What a run has spent on a judge: requests, tokens and money, in a file that all processes of the run on one machine share.

A request is paid for before it is made, with the most that it may cost, and the difference is given back once the server says
what it cost. So requests at once never exceed the budget, and a killed process has spent rather too much than too little.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from counterpoint.environments.rewards.judge.config import BudgetConfig
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

_MAX_FILE_BYTES = 4096


class BudgetExhausted(RuntimeError):
    """The next request could exceed the budget."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one request, or of all."""

    requests: int = 0
    tokens: int = 0
    dollars: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.requests + other.requests, self.tokens + other.tokens, self.dollars + other.dollars)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.requests - other.requests, self.tokens - other.tokens, self.dollars - other.dollars)


class Budget:
    """Counts against the limits of one judge. The methods block: call them in a thread."""

    def __init__(self, config: BudgetConfig, path: Path | None) -> None:
        """Counts in the file at `path`; without one, for this process alone."""
        self._config = config
        self._path = path
        self._spent = Cost()
        self._lock = threading.Lock()

    def cost(self, requests: int, prompt_tokens: int, completion_tokens: int) -> Cost:
        """Returns what so many tokens cost."""
        config = self._config
        dollars = (
            prompt_tokens * config.dollars_per_million_prompt_tokens
            + completion_tokens * config.dollars_per_million_completion_tokens
        ) / 1e6
        return Cost(requests, prompt_tokens + completion_tokens, dollars)

    def pay(self, cost: Cost) -> None:
        """Counts a request before it is made. Raises `BudgetExhausted`, counting nothing, and `OSError`."""
        with self._shared() as spent:
            after = spent + cost
            for name in ("requests", "tokens", "dollars"):
                limit = getattr(self._config, name)
                if limit is not None and getattr(after, name) > limit:
                    raise BudgetExhausted(
                        f"the budget of {limit:g} {name} is exhausted: {getattr(spent, name):g} are spent, and the next request "
                        f"may take {getattr(cost, name):g}"
                    )
            self._store(after)

    def give_back(self, cost: Cost) -> None:
        """Takes back what was paid too much. Raises `OSError`."""
        with self._shared() as spent:
            self._store(spent - cost)

    def spent(self) -> Cost:
        """Returns what all processes have spent."""
        with self._shared() as spent:
            return spent

    @contextmanager
    def _shared(self) -> Iterator[Cost]:
        with self._lock:
            if self._path is None:
                yield self._spent
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield _read(self._path)
            finally:
                os.close(descriptor)

    def _store(self, spent: Cost) -> None:
        if self._path is None:
            self._spent = spent
        else:
            write_atomically(self._path, orjson.dumps(asdict(spent)), durable=False)


def _read(path: Path) -> Cost:
    try:
        found = read_json(path, _MAX_FILE_BYTES)
        spent = Cost(int(found["requests"]), int(found["tokens"]), float(found["dollars"]))
        if not math.isfinite(spent.dollars):
            raise ValueError("dollars is no finite number")
    except FileNotFoundError:
        return Cost()
    except (UntrustedFileError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not say what was spent on the judge ({error}); remove it to count anew"
        ) from error
    return spent
