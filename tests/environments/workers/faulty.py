"""An environment that does what its example's number says: plays well, or breaks in one of many ways. Loaded by workers."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Score, Unavailable
from counterpoint.environments.reward import Reward
from counterpoint.environments.sampling import CallOverrides
from counterpoint.transport.records import Rollout

FAULTS = (
    "well", "raise", "nan", "text", "state", "exit", "interrupt", "hang", "unscored", "flood", "leave", "kill", "crash",
    "block", "hold", "fork", "leak", "socket", "forge", "overlap", "branch", "untrained", "stubborn", "cancel", "call", "orphan",
    "players", "unavailable", "constrained", "rewarded", "twice",
)  # fmt: skip


class Faulty:
    def __init__(self, group_scoring: bool = False, at_load: str = "", largest: int = 0) -> None:
        self.group_scoring = group_scoring
        if os.environ.get("CLUSTER_TEST_LEAVE"):
            print("no dataset", flush=True)
            os._exit(7)
        if at_load == "leave":
            os._exit(5)
        if at_load == "raise":
            raise KeyError("no such dataset")
        self._started = ""

    def __len__(self) -> int:
        return len(FAULTS)

    def example(self, index: int) -> Example:
        return Example(index, FAULTS[index], f"right {index}")

    async def start(self, context: EnvironmentContext) -> None:
        self._started = context.name

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        state["pid"], state["started"], state["long"] = os.getpid(), self._started, 2**70 + 1
        turn = await model.generate([1, 2, 3])
        state["turns"] = [turn.completion_ids.tolist()]
        await getattr(self, f"_{example.prompt}")(model, turn, state)

    async def _well(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        prompt = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist(), 9]
        turn = await model.generate(prompt)
        state["turns"].append(turn.completion_ids.tolist())

    async def _raise(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        raise KeyError("the environment is broken")

    async def _nan(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        state["reward"] = float("nan")

    async def _text(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        state["reward"] = "0.7"

    async def _state(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        state["handle"] = object()

    async def _exit(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        async def leave() -> None:
            raise SystemExit(3)

        await asyncio.gather(leave(), asyncio.sleep(0))

    async def _interrupt(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    async def _hang(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    async def _unscored(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        state["reward"] = None

    async def _flood(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        for _ in range(400):
            sys.stdout.write("x" * 65536 + "\n")

    async def _leave(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        print("I leave", flush=True)
        os._exit(3)

    async def _kill(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _crash(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        ctypes.string_at(0)

    async def _block(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 - the fault

    async def _hold(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")  # one call of C, which would take years

    async def _fork(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        children = [subprocess.Popen(["sleep", "3600"], start_new_session=True) for _ in range(20)]  # noqa: ASYNC220
        await asyncio.sleep(3600)
        del children

    async def _orphan(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        """Leaves a process behind, below no process of ours any more."""
        subprocess.run(["sh", "-c", "setsid sleep 3600 & echo $!"], check=True, stdout=subprocess.DEVNULL)  # noqa: ASYNC221

    async def _leak(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        kept = [b"x" * 2**20 for _ in range(450)]
        await asyncio.sleep(3600)
        del kept

    async def _socket(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        """Floods the worker's own socket."""
        wire = _worker()._wire
        while True:
            for _ in range(500):
                wire.send(b"", [4, 0.0])
            await asyncio.sleep(0)

    async def _forge(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        """Reports the end of a rollout that another worker plays."""
        for number in range(1, 100):
            _worker()._wire.send(b"", [8, number, None, [1.0], [[b"{}", b"{}", [], None]], False, None])
        await asyncio.sleep(3600)

    async def _overlap(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        turns = await asyncio.gather(*(model.generate([5, number]) for number in range(4)))
        state["turns"] = [each.prompt_ids.tolist() + each.completion_ids.tolist() for each in turns]

    async def _branch(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        first = [*turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
        for last in (7, 8, 9):
            turn = await model.generate([*first, last])
            state["turns"].append(turn.prompt_ids.tolist() + turn.completion_ids.tolist())

    async def _untrained(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        turn.leave_untrained(1)

    async def _constrained(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        await model.generate([5, 6], CallOverrides(json_schema="{}"))

    async def _stubborn(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                state["deaf"] = True

    async def _cancel(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        """Gives up a call of the model, and makes another."""
        try:
            async with asyncio.timeout(0.05):
                await model.generate([666])
        except TimeoutError:
            state["gave up"] = True
        turn = await model.generate([4])
        state["turns"].append(turn.completion_ids.tolist())

    async def _call(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        await model.generate([])

    async def _players(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        white = await model.player("white").generate([4, 5])
        said = await model.opponent("other").generate([6])
        game = [*white.prompt_ids.tolist(), *white.completion_ids.tolist(), *said.completion_ids.tolist()]
        black = await model.player("black").generate(game)
        state["players"] = [white.player, black.player]
        state["said"] = said.completion_ids.tolist()
        state["reward"] = {"white": 1.0, "black": -1.0}

    async def _rewarded(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        """Rewards turns beside one of an opponent, which has no number among them."""
        model.reward(0.5)
        await model.opponent("other").generate([6])
        white = await model.player("white").generate([4, 5])
        await model.player("black").generate([7])
        model.player("white").reward(-0.25)
        model.reward(0.125, 2)
        for other in (model.opponent("other"), model.player("black")):
            try:
                other.reward(1.0, white)
            except ValueError as error:
                state.setdefault("refused", []).append(str(error))
        state["reward"] = "sum"

    async def _twice(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        model.reward(0.5)
        model.reward(0.5, 0)

    async def _unavailable(self, model: Model, turn: Any, state: dict[str, Any]) -> None:
        raise Unavailable("the judge is down")

    async def score(self, example: Example, rollout: Rollout) -> Any:
        rollout.metrics["turns"] = len(rollout.turns)
        if rollout.state.get("reward", 1) is None:
            raise ZeroDivisionError("no score")
        if rollout.state.get("reward") == "sum":
            rollout.metrics["seen"] = float(rollout.turn_rewards.sum()) if rollout.turn_rewards is not None else -1.0
            return Reward()
        return rollout.state.get("reward", float(len(rollout.turns)))

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        for rollout in rollouts:
            rollout.metrics["of"] = len(rollouts)
            rollout.turns[0].leave_untrained(0, 1)
        if all(rollout.turn_rewards is not None for rollout in rollouts):
            return [Reward(turns=[0.5, 1.0, -0.25, 0.125]) for _ in rollouts]
        return [float(index) for index, _ in enumerate(rollouts)]


def _worker() -> Any:
    kind = sys.modules["__main__"]._Worker
    return next(each for each in gc.get_objects() if isinstance(each, kind))
