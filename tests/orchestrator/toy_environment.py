"""An environment for the daemon's tests, by import path: some turns, a reward by chance, and faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.data.load import load_rows
from counterpoint.orchestrator.step.advantages import AdvantageInputs, AdvantageOutputs, group_mean
from counterpoint.transport.records import Rollout


class Unusual(BaseException):
    """No `Exception`, as those that some test frameworks and debuggers raise."""


def leaving(inputs: AdvantageInputs) -> AdvantageOutputs:
    """An advantage function that leaves the program at every third example."""
    if inputs.rollouts[0].example_index % 3 == 0:
        raise SystemExit(3)
    return group_mean(inputs)


class Toy:
    """`fault` breaks the rollouts of every third example: `exception`, `nan`, `exit`, `gathered`, `interrupt`, `generator`,
    `unusual`, `slow`, `state`, `cancel`, `self-cancel`, `thread` or `stubborn`; with `hopeless` all fail at once; with `dull`
    every reward is the same. The first rollouts wait until `together` of them have begun."""

    def __init__(self, turns: int = 2, fault: str = "", group_scoring: bool = False, together: int = 0) -> None:
        self.group_scoring = group_scoring
        self._turns = turns
        self._fault = fault
        self._missing = together
        self._all_here = asyncio.Event()

    def __len__(self) -> int:
        return 50

    def example(self, index: int) -> Example:
        return Example(index, f"example {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        state["loop"] = type(asyncio.get_running_loop()).__module__
        if self._fault == "hopeless":
            raise ConnectionError("the sandbox\nis down")
        if self._fault == "broken":
            raise KeyError("always")
        self._missing -= 1
        if self._missing <= 0:
            self._all_here.set()
        await self._all_here.wait()
        turn = await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        for _ in range(self._turns - 1):
            turn = await model.generate(model.chat.extend(turn, [{"role": "user", "content": "go on"}]))
        state["answer"] = model.chat.decode(turn.completion_ids.tolist())
        if example.index % 3 == 0:
            await self._break(state)

    async def _break(self, state: dict[str, Any]) -> None:
        match self._fault:
            case "exception":
                raise KeyError("the environment is broken")
            case "exit":
                raise SystemExit(7)
            case "gathered":
                await asyncio.gather(self._leave(), asyncio.sleep(0))
            case "interrupt":
                raise KeyboardInterrupt
            case "generator":
                raise GeneratorExit
            case "unusual":
                raise Unusual("neither an exception nor an exit")
            case "slow":
                await asyncio.sleep(3600)
            case "state":
                state["handle"] = object()
            case "stubborn":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)
            case "thread":
                await asyncio.to_thread(threading.Event().wait)
            case "cancel":
                raise asyncio.CancelledError
            case "self-cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

    async def _leave(self) -> None:
        raise SystemExit(3)

    async def score(self, example: Example, rollout: Rollout) -> float:
        if self._fault == "always nan" or (self._fault == "nan" and example.index % 3 == 0):
            return float("nan")
        if self._fault == "always None":
            return None  # type: ignore[return-value]
        return self._chance(rollout)

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        return [self._chance(rollout) for rollout in rollouts]

    def _chance(self, rollout: Rollout) -> float:
        """Between 0 and 1, different for each rollout, so that no advantage is zero."""
        if self._fault == "dull":
            return 1.0
        digest = hashlib.sha256(rollout.rollout_id.encode()).digest()
        return int.from_bytes(digest[:4], "little") / 2**32


class SelfPlay(Toy):
    """White and black take a turn each, and an opponent speaks in between; what white wins, black loses."""

    def __init__(self, opponent: str) -> None:
        super().__init__()
        self._opponent = opponent

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        prompt = model.chat.start([{"role": "user", "content": example.prompt}])
        white = await model.player("white").generate(prompt)
        said = await model.opponent(self._opponent).generate(prompt)
        game = model.chat.extend(white, [{"role": "user", "content": model.chat.decode(said.completion_ids.tolist())}])
        await model.player("black").generate(game)

    async def score(self, example: Example, rollout: Rollout) -> Any:
        reward = self._chance(rollout)
        return {"white": reward, "black": 1 - reward}


class ScoredLate(Toy):
    """Scored as groups: the first one once the file `until` exists; of every fifth example's group one rollout fails."""

    def __init__(self, until: str) -> None:
        super().__init__(turns=1, group_scoring=True)
        self._until = Path(until)
        self._begun: Counter[int] = Counter()
        self._first: int | None = None

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        self._begun[example.index] += 1
        if example.index % 5 == 1 and self._begun[example.index] == 2:
            raise KeyError("one of a group")

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        if self._first is None:
            self._first = example.index
        while example.index == self._first and not self._until.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        return await super().score_group(example, rollouts)


class ToyOfFile(Toy):
    """A toy whose examples are the rows of a file."""

    def __init__(self, path: str) -> None:
        super().__init__(turns=1)
        self._rows = load_rows({"path": path})
        self.fingerprint = self._rows.fingerprint

    def __len__(self) -> int:
        return len(self._rows)


class Mortal(Toy):
    """A toy that kills its own process once, and leaves a file that says so."""

    def __init__(self, marker: str) -> None:
        super().__init__(turns=1)
        self._marker = Path(marker)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        if not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Unready(Toy):
    """A toy that needs a service: without it, it cannot be made (`when = "made"`) or cannot start."""

    def __init__(self, when: str, error: str) -> None:
        super().__init__(turns=1)
        self._error: OSError = {
            "refused": ConnectionRefusedError("the sandbox does not answer"),
            "absent": FileNotFoundError(2, "No such file", "rows.jsonl"),
        }[error]
        if when == "made":
            raise self._error

    async def start(self, context: EnvironmentContext) -> None:
        """See `Environment`."""
        raise self._error
