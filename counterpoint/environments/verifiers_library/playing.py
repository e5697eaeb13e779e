"""Plays episodes of a library environment on the library's loop, and reads what they gave: rewards, metrics, errors.

The library's interception server keeps one model client for each endpoint. The stage puts `PolicyClient` there for an endpoint
that does not exist, so that all agents without an endpoint of their own reach the policy, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import subprocess as local_runtime

from counterpoint.environments.base import Model
from counterpoint.environments.verifiers_library.own_loop import on_loop
from counterpoint.environments.verifiers_library.policy_client import PolicyClient, Seat
from counterpoint.environments.verifiers_library.turn_rewards import (
    OF_TURN,
    NoSuchTurn,
    note_steps,
    turn_rewards,
    watch_openenv,
)
from counterpoint.transport.records import Turn

POLICY = vf.TrainClientConfig(base_url="http://policy.invalid/v1", api_key_var="COUNTERPOINT_HAS_NO_KEY")
"""The endpoint that stands for the policy. Of the library's two kinds this one returns whole answers, also to a program that
streams."""

_LONGEST_ERROR = 2000


class LibraryServing:
    """The serving resources of one environment of the library. Lives on one loop."""

    def __init__(self, env: Any, trained: frozenset[str]) -> None:
        self._env = env
        self._trained = trained
        # The library's environment for one run of one agent; any other may give several runs their own rewards.
        self._has_players = type(env) is not vf.SingleAgentEnv
        self._client = PolicyClient()
        self._context = vf.ModelContext(model="policy", client=POLICY)
        self._resources = AsyncExitStack()
        self._playing: set[asyncio.Task[Any]] = set()

    async def open(self, directory: Path) -> None:
        """Starts the resources. What the library writes for programs on this machine goes below `directory`."""
        watch_openenv(self._env)
        local_runtime.CACHE_DIR = directory
        local_runtime.SubprocessRuntime.scripts_dir = str(directory / "scripts")
        async with AsyncExitStack() as starting:
            await starting.enter_async_context(self._env.serving())
            server = self._env._interception
            if not isinstance(getattr(server, "clients", None), dict):
                raise RuntimeError(
                    f"verifiers {_release()} is not known: its interception server keeps no clients by endpoint"
                )
            server.clients[POLICY.model_dump_json()] = self._client
            self._resources = starting.pop_all()

    async def close(self) -> None:
        """Ends them, and the episodes that still play, before the servers that these wait for."""
        for task in self._playing:
            task.cancel()
        if self._playing:
            await asyncio.wait(self._playing)
        await self._resources.aclose()

    async def play(self, task: Any, model: Model, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        """Plays one episode and returns what the rollout keeps of it; `model` works on `loop`. Raises `EpisodeFailed`."""
        ours = asyncio.current_task()
        assert ours is not None
        self._playing.add(ours)
        try:
            return await self._play(task, model, loop)
        finally:
            self._playing.discard(ours)

    async def _play(self, task: Any, model: Model, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        seats: dict[str, Seat] = {}
        players: dict[str, str] = {}
        runs: Counter[str] = Counter()

        def sit(trace: Any) -> None:
            player = model
            if self._has_players and self._is_trained(trace):
                name = trace.agent.name
                runs[name] += 1
                players[trace.id] = name if runs[name] == 1 else f"{name}-{runs[name]}"
                player = model.player(players[trace.id])
            seats[trace.id] = self._client.open(trace.id, player, loop)

        note_steps(seats)
        try:
            episode = await self._env.run_episode(task, self._context, on_trace=sit)
        finally:
            for identity in seats:
                self._client.close_seat(identity)
        if not self._env.complete(episode):
            raise EpisodeFailed(_what_failed(episode))
        trained = [trace for trace in episode.traces if self._is_trained(trace)]
        said = {id(node.message) for trace in trained for node in trace.nodes if node.sampled}
        if not _leave_untrained_but(said, seats.values()):
            raise EpisodeFailed("no agent that is trained called the model")
        result = _result(episode, trained, players)
        try:
            await on_loop(loop, _give(model, turn_rewards(trained, seats)))
        except NoSuchTurn as error:
            raise EpisodeFailed(str(error)) from error
        return result

    def _is_trained(self, trace: Any) -> bool:
        if not trace.agent.trainable or trace.agent.config.client != POLICY:
            return False
        return not self._trained or trace.agent.name in self._trained


class EpisodeFailed(Exception):
    """An episode that the library does not take as a valid result."""


def _leave_untrained_but(said: set[int], seats: Iterable[Seat]) -> bool:
    """Leaves untrained what is not among the messages `said` (by their `id()`) of the runs that are trained.

    That is an untrainable agent's turn, one of an attempt that was given up, and one that the environment rewrote or never
    received. Returns whether a turn is trained.
    """
    any_trained = False
    for seat in seats:
        for turn in seat.turns:
            if id(seat.messages.get(id(turn))) in said:
                any_trained = True
            else:
                turn.leave_untrained()
    return any_trained


async def _give(model: Model, rewards: Iterable[tuple[Turn, float]]) -> None:
    for turn, reward in rewards:
        model.reward(reward, turn)


def _result(episode: Any, trained: list[Any], players: Mapping[str, str]) -> dict[str, Any]:
    for trace in trained:
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise EpisodeFailed(
                f"agent {trace.agent.name!r} was not scored: {', '.join(missing)} did not run ({_stop(trace)})"
            )
    return {
        "reward": {players[trace.id]: trace.reward for trace in trained} if players else trained[0].reward,
        "metrics": _metrics(episode, trained),
        "stop": [_stop(trace) for trace in trained],
        "agents": [trace.agent.name for trace in episode.traces],
    }


def _metrics(episode: Any, trained: list[Any]) -> dict[str, float]:
    """Rewards before their weights, but for those of turns, metrics, and how runs ended: means over the runs of an agent.

    Of an episode with several agents they are named by agent.
    """
    values: dict[str, list[float]] = {}
    for trace in episode.traces:
        prefix = f"{trace.agent.name}/" if len({each.agent.name for each in episode.traces}) > 1 else ""
        given = {name: each for name, each in trace.rewards.items() if each is not None and not OF_TURN.fullmatch(name)}
        rewards = {f"reward/{name}": reward.score for name, reward in given.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        ends = {"turns": trace.num_turns, "truncated": trace.is_truncated, "timed_out": trace.is_timeout}
        for name, value in (ends | rewards | metrics).items():
            values.setdefault(f"{prefix}{name}", []).append(float(value))
    return {name: sum(given) / len(given) for name, given in values.items()}


def _stop(trace: Any) -> str:
    return str(trace.stop_condition or "the agent ended")


def _what_failed(episode: Any) -> str:
    """The library's errors, newest last, each with the agent it is of."""
    found = [f"{error.type}: {error.message}" for error in episode.errors]
    for trace in episode.traces:
        found += [f"agent {trace.agent.name!r}: {error.type}: {error.message}" for error in trace.errors]
    return "; ".join(found)[-_LONGEST_ERROR:] or "the episode failed and gives no reason"


def _release() -> str:
    from importlib.metadata import version

    return version("verifiers")
