"""Finds the rewards of single turns in an episode of the library, whose traces have none: their rewards are of the whole.

A reward of a trace that is called `turn/N` is that of the agent's answer N, from 0. OpenEnv gives a reward for each step, of
which the library's taskset records the sum alone: here each is noted when the step is made, as that of the newest answer. What is
left of a trace's reward is its last answer's, so that its turns add up to it.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from counterpoint.environments.verifiers_library.policy_client import Seat
from counterpoint.transport.records import Turn

OF_TURN = re.compile(r"turn/(0|[1-9][0-9]{0,8})")
"""The name of a turn's reward."""

_WATCHED = "_counterpoint_notes_rewards"

_note: ContextVar[Callable[[float], None]] = ContextVar("_note")


class NoSuchTurn(ValueError):
    """A reward of a trace names an answer that the agent has not given, or that is no turn of the policy."""


def turn_rewards(traces: Sequence[Any], seats: Mapping[str, Seat]) -> list[tuple[Turn, float]]:
    """Returns the rewards of the turns of these traces; none if no reward is a single turn's. Raises `NoSuchTurn`."""
    answers = [_answers(trace, seats[trace.id]) for trace in traces]
    played = [(trace, [turn for turn in own if turn is not None]) for trace, own in zip(traces, answers, strict=True)]
    found = [_named(trace, len(own)) or _stepped(own, seats[trace.id]) for trace, own in played]
    if not any(found):
        return []
    for trace, all_answers in zip(traces, answers, strict=True):
        if None in all_answers:  # the answers after it would have the rewards of others
            raise NoSuchTurn(
                f"agent {trace.agent.name!r}: answer {all_answers.index(None)} is no turn of the policy, so the numbers of "
                "`turn/N` name other answers than the environment meant"
            )
    for (trace, own), given in zip(played, found, strict=True):
        if own:
            last, rest = len(own) - 1, trace.reward - math.fsum(given.values())
            given[last] = given.get(last, 0.0) + rest
    return [
        (own[index], reward) for (_, own), given in zip(played, found, strict=True) for index, reward in given.items()
    ]


def note_steps(seats: Mapping[str, Seat]) -> None:
    """Notes, for the rest of this task, the reward of each step of OpenEnv with the newest turn of `seats`."""

    def note(reward: float) -> None:
        for seat in reversed(list(seats.values())):
            if seat.turns:
                seat.steps.append((seat.turns[-1], reward))
                return

    _note.set(note)


def watch_openenv(env: object) -> None:
    """Lets each step of an OpenEnv client tell its reward to the episode that makes it, if `env` is the library's for OpenEnv."""
    if not type(env).__module__.startswith("verifiers.v1.tasksets.openenv"):
        return
    client = importlib.import_module("openenv").GenericEnvClient
    if getattr(client, _WATCHED, False):
        return
    step = client.step

    @functools.wraps(step)
    async def told(*given: Any, **named: Any) -> Any:
        result = await step(*given, **named)
        if (note := _note.get(None)) is not None and result.reward is not None:
            note(float(result.reward))
        return result

    client.step = told
    setattr(client, _WATCHED, True)


def _answers(trace: Any, seat: Seat) -> list[Turn | None]:
    """Returns the turns that are the agent's answers in a trace, in order; None for an answer that is no turn of the policy.

    An answer that was rewritten is known by its place.
    """
    known = {id(seat.messages[id(turn)]): turn for turn in seat.turns if id(turn) in seat.messages}
    answers = [node.message for node in trace.nodes if node.sampled]
    unchanged = {id(message) for message in answers}
    rewritten = iter([turn for message, turn in known.items() if message not in unchanged])
    return [known.get(id(message)) or next(rewritten, None) for message in answers]


def _named(trace: Any, answers: int) -> dict[int, float]:
    """Returns the rewards that a trace has for its answers, by their numbers."""
    found = {}
    for name, reward in trace.rewards.items():
        if (match := OF_TURN.fullmatch(name)) is not None:
            if (index := int(match[1])) >= answers:
                raise NoSuchTurn(f"reward {name!r}: agent {trace.agent.name!r} has given {answers} answers")
            found[index] = float(reward.value)
    return found


def _stepped(answers: Sequence[Turn], seat: Seat) -> dict[int, float]:
    """Returns the rewards of OpenEnv's steps by the numbers of the answers that made them."""
    places, found = {id(turn): index for index, turn in enumerate(answers)}, dict[int, float]()
    for turn, reward in seat.steps:
        if (index := places.get(id(turn))) is not None:
            found[index] = found.get(index, 0.0) + reward
    return found
