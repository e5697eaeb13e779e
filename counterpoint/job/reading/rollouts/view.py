"""One rollout for people: its record in parts of bounded length, with everything in it as plain text.

A model, an environment or a guest wrote it. What could steer a terminal or turn the writing direction is escaped
(`transport/printable.py`); the page then sets it as text, never as HTML.
"""

from __future__ import annotations

from typing import Any

import orjson

from counterpoint.job.reading.rollouts.line_index import Outcome
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, finite_number, whole_number
from counterpoint.job.reading.rollouts.selection import Placed
from counterpoint.transport.config import Config
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.printable import clipped, printable

MAX_PARTS = 2_000
"""Turns of a rollout that are shown, and pairs of a table."""

ANSWER_CHARACTERS = 4 * 2**20
"""The characters of all texts of one rollout together."""


BEGINNING = 160
"""Characters of a completion in a list."""


class RolloutEntry(Config):
    """One rollout in a list."""

    step: int
    """The step of the rollout."""
    number: int
    """Its line in the step's file, from 0."""
    rollout_id: str
    """Unique in its run; empty if its line is too long to be read for a list."""
    environment: str
    """The environment's name."""
    example_index: int | None
    """The example's index in its environment."""
    group_id: int | None
    """The group's number."""
    reward: float | None
    """None if it failed."""
    advantage: float | None
    """None if it has none."""
    outcome: Outcome
    """What became of it."""
    reason: str
    """Why it failed, which filter caught it, or why its group was dropped; empty for others."""
    turns: int
    """The number of model calls."""
    completion_tokens: int
    """What the model wrote, in all turns."""
    players: list[str]
    """Its players, if it has several."""
    versions: list[int]
    """The oldest and the newest policy version of its turns."""
    servers: list[str]
    """The servers that answered, at most four."""
    answer: str
    """The beginning of the right answer; empty if its example has none."""
    beginning: str
    """The beginning of its last completion."""


class Text(Config):
    """A text that somebody else wrote, safe to be shown as text."""

    text: str
    """The text, or its beginning and its end."""
    characters: int
    """The characters of the whole text."""
    left_out: int
    """Characters of its middle that are left out."""


class TurnView(Config):
    """One model call."""

    player: str
    """The player whose turn it is; empty in a rollout with one player."""
    prompt: Text | None
    """The part of the prompt that is new since the turn that it extends; None if no text was recorded."""
    completion: Text | None
    """What the model wrote; None if no text was recorded."""
    prompt_tokens: int | None
    """The tokens of the whole prompt."""
    cached_tokens: int | None
    """How many of these the server had in its prefix cache."""
    completion_tokens: int | None
    """What the model wrote."""
    untrained_tokens: int | None
    """How many of these the environment left out of training."""
    policy_version: int | None
    """The weights that wrote it."""
    temperature: float | None
    """The temperature at sampling."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    server: str
    """The server that answered."""
    reward: float | None
    """The reward of this turn; None if no turn of the rollout has one."""
    advantage: float | None
    """The advantage of this turn; None if all turns have the rollout's."""


class OpponentTurnView(Config):
    """A call of another policy, which is not trained."""

    opponent: str
    """The name of the opponent."""
    before: int
    """The number of turns before it."""
    completion: Text
    """The text that the model wrote."""


class Pair(Config):
    """A name and a value, as text."""

    name: str
    """What the value is called."""
    value: str
    """The value, as JSON; its end may be left out."""


class Parts(Config):
    """What the record holds."""

    rollout_id: str
    """Unique in its run."""
    answer: Text | None
    """The right answer of its example; None if it has none."""
    error: Text | None
    """Why it failed; None if it did not."""
    filtered_by: str | None
    """The filter that caught it; None if none did."""
    dropped: str | None
    """Why its group was dropped after it was finalized; None if it was not."""
    turns: list[TurnView]
    """The model's calls, in order."""
    turns_left_out: int
    """How many more turns it has."""
    opponent_turns: list[OpponentTurnView]
    """The calls of other policies, in order."""
    player_rewards: list[Pair]
    """The reward of each player that has one of its own."""
    player_advantages: list[Pair]
    """The advantage of each."""
    metrics: list[Pair]
    """What the environment measured."""
    state: list[Pair]
    """The columns of its state that are recorded."""


class _Budget:
    """Shares the characters of one answer among its texts."""

    def __init__(self, most_each: int) -> None:
        self._each, self._left = most_each, ANSWER_CHARACTERS

    def text(self, value: object) -> Text | None:
        if not isinstance(value, str):
            return None
        characters = len(value)
        most = min(self._each, self._left)
        left_out = max(0, len(value) - most)
        self._left -= len(value) - left_out
        if left_out:
            head, tail = value[: most - most // 2], value[len(value) - most // 2 :]
            value = f"{head}\n[... {left_out} characters left out ...]\n{tail}"
        return Text(text=printable(value), characters=characters, left_out=left_out)


def entry_of(placed: Placed, record: RolloutRecord | None) -> RolloutEntry:
    """Returns the entry of a row; without its record, what the index has of it."""
    step, row = placed
    turns = [] if record is None else record.turns
    versions = [version for turn in turns if type(version := turn.get("policy_version")) is int]
    completion = turns[-1].get("completion") if turns else None
    answer = None if record is None else record.fields.get("answer")
    return RolloutEntry(
        step=step,
        number=row.number,
        rollout_id="" if record is None else name_of(record.rollout_id),
        environment=row.environment,
        example_index=row.example_index,
        group_id=row.group_id,
        reward=row.reward,
        advantage=row.advantage,
        outcome=row.outcome,
        reason=""
        if record is None
        else name_of(clipped(record.error or record.filtered_by or record.dropped or "", 200)),
        turns=row.turns,
        completion_tokens=row.completion_tokens,
        players=list(row.players),
        versions=[min(versions), max(versions)] if versions else [],
        servers=sorted({name_of(turn.get("server")) for turn in turns} - {""})[:4],
        answer=printable(answer[:BEGINNING]) if isinstance(answer, str) else "",
        beginning=printable(completion[:BEGINNING]) if isinstance(completion, str) else "",
    )


def parts_of(record: RolloutRecord, most_characters: int) -> Parts:
    """Returns the record's parts; of a text that is longer than `most_characters`, the middle is left out."""
    budget = _Budget(most_characters)
    turns = record.turns
    return Parts(
        rollout_id=name_of(record.rollout_id),
        answer=budget.text(record.fields.get("answer")),
        error=budget.text(record.error),
        filtered_by=None if record.filtered_by is None else name_of(record.filtered_by),
        dropped=None if record.dropped is None else name_of(record.dropped),
        turns=[_turn(turn, budget) for turn in turns[:MAX_PARTS]],
        turns_left_out=max(0, len(turns) - MAX_PARTS),
        opponent_turns=[
            OpponentTurnView(
                opponent=name_of(turn.get("opponent")),
                before=whole_number(turn.get("before")) or 0,
                completion=budget.text(turn.get("completion")) or Text(text="", characters=0, left_out=0),
            )
            for turn in record.opponent_turns[:MAX_PARTS]
        ],
        **{
            name: _pairs(record.fields.get(name), most_characters)
            for name in ("player_rewards", "player_advantages", "metrics", "state")
        },
    )


def _turn(turn: dict[str, Any], budget: _Budget) -> TurnView:
    return TurnView(
        player=name_of(turn.get("player")),
        prompt=budget.text(turn.get("prompt")),
        completion=budget.text(turn.get("completion")),
        **{
            name: whole_number(turn.get(name))
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "untrained_tokens", "policy_version")
        },
        **{name: finite_number(turn.get(name)) for name in ("temperature", "reward", "advantage")},
        finish_reason=name_of(turn.get("finish_reason")),
        server=name_of(turn.get("server")),
    )


def name_of(value: object) -> str:
    """Returns a short text, such as a name, for people; empty if it is none."""
    return printable(value[:200]) if isinstance(value, str) else ""


def _pairs(value: object, most: int) -> list[Pair]:
    if not isinstance(value, dict):
        return []
    return [
        Pair(name=name_of(str(name)), value=shown_value(each, min(most, 20_000)))
        for name, each in [*value.items()][:MAX_PARTS]
    ]


def shown_value(value: object, most: int, *, indented: bool = True) -> str:
    """Returns a value as text: a text as it is, anything else as JSON, at most so many characters of it."""
    try:
        text = value if isinstance(value, str) else dumps(value, option=orjson.OPT_INDENT_2 if indented else 0).decode()
    except TypeError:  # orjson reads what is deeper than it writes
        return "(nested too deeply to be shown)"
    return printable(text if len(text) <= most else f"{text[:most]} [... {len(text) - most} characters left out ...]")
