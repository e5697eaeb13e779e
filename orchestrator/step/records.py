"""Writes a step's records for people and tools: `rollouts.jsonl`, one JSON object per rollout, without bulk arrays.

Each call of the encoder encodes one rollout, in a thread that rests in between: no call holds the GIL for long.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import orjson

from counterpoint.orchestrator.receipts.receipt import RecordHashes, turn_hashes
from counterpoint.orchestrator.rollouts.rollout_file import in_portions, saved_state
from counterpoint.orchestrator.rollouts.token_file import write_tokens
from counterpoint.orchestrator.rollouts.transcripts import Transcriber, TurnText
from counterpoint.orchestrator.scheduling.outcomes import outcome_of
from counterpoint.transport.exact_json import dumps, loads, raw_parts
from counterpoint.transport.printable import shortened
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.records import Rollout

logger = logging.getLogger(__name__)

STATE_BYTES = 16 * 2**10
"""Bytes of a rollout's state, as JSON, in its record, besides the columns that `state_columns` names."""

LONGEST_VALUE = 1000
"""Characters of one value of a state that exceeds these: its JSON, cut."""

MOST_READ_STATE = 128 * 2**10
"""Bytes of a state that is read for its record without `state_columns`. Longer ones would hold the GIL over a millisecond."""

OTHERS = "(others)"
"""The key of the note about columns that a record leaves out of its state."""

_said: set[tuple[str, str]] = set()
"""Environments and columns that the log has named."""


def rollout_record(
    rollout: Rollout, state_columns: Sequence[str], texts: Sequence[TurnText] | None = None
) -> dict[str, Any]:
    """Returns one rollout's line: identity, right answer, result, a summary of each turn with its text, and its state.

    Without `texts` the turns have no text. Metrics and state are in it as encoded JSON. Raises as `saved_state` does.
    """
    saved = saved_state(rollout)
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "environment": rollout.environment,
        "example_index": rollout.example_index,
        "answer": rollout.answer,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "advantage_kind": rollout.advantage_kind,
        "player_rewards": rollout.player_rewards,
        "player_advantages": rollout.player_advantages,
        "outcome": outcome_of(rollout),
        "error": rollout.error,
        "filtered_by": rollout.filtered_by,
        "dropped": rollout.dropped,
        "metrics": orjson.Fragment(saved.metrics),
        "sampling_args": rollout.sampling_args,
        "turns": [
            {
                "prompt_tokens": len(turn.prompt_ids),
                "cached_tokens": turn.cached_tokens,
                "completion_tokens": len(turn.completion_ids),
                "untrained_tokens": turn.untrained.count(1),
                "policy_version": turn.policy_version,
                "finish_reason": turn.finish_reason,
                "server": turn.server,
                "load": turn.load,
                "seed": turn.seed,
                **hashes,
                "temperature": turn.temperature,
                "player": turn.player,
                **{name: float(column.mean()) if column.size else None for name, column in turn.columns.items()},
                **own,
                "prompt": text and text.prompt,
                "completion": text and text.completion,
            }
            for turn, text, own, hashes in zip(
                rollout.turns,
                texts or repeat(None, len(rollout.turns)),
                _of_turns(rollout),
                rollout.turn_hashes or turn_hashes(rollout),
                strict=True,
            )
        ],
        "opponent_turns": rollout.opponent_turns,
        "state": _recorded_state(rollout, saved.state, state_columns),
    }


def _of_turns(rollout: Rollout) -> Iterable[dict[str, float]]:
    """Yields what each turn has of its own: a reward, an advantage, or neither."""
    named = {"reward": rollout.turn_rewards, "advantage": rollout.turn_advantages}
    found = {name: values.tolist() for name, values in named.items() if values is not None}
    if not found:
        return repeat({}, len(rollout.turns))
    return [dict(zip(found, own, strict=True)) for own in zip(*found.values(), strict=True)]


def _recorded_state(rollout: Rollout, encoded: bytes, names: Sequence[str]) -> dict[str, Any] | orjson.Fragment:
    """Returns the columns `names` of the state, whole, and as much of the others as `STATE_BYTES` allow."""
    if not names and len(encoded) <= STATE_BYTES:
        return orjson.Fragment(encoded)
    # A state of any size must not be read with the GIL. Written again, a deeply nested value would exceed the encoder's depth.
    state = raw_parts(encoded) if names or len(encoded) <= MOST_READ_STATE else {}
    _say_missing(rollout, names, state)
    recorded: dict[str, Any] = {name: orjson.Fragment(bytes(state.get(name, b"null"))) for name in names}
    left = STATE_BYTES
    for name, part in state.items():
        if name not in recorded:
            value = bytes(part)
            if len(value) > LONGEST_VALUE and len(encoded) > STATE_BYTES:
                text = loads(value) if value.startswith(b'"') else value.decode()
                value = dumps(shortened(text, LONGEST_VALUE))
            if (left := left - len(value) - len(name)) < 0:
                break
            recorded[name] = orjson.Fragment(value)
    if left < 0 or (len(encoded) > MOST_READ_STATE and not names):
        recorded[OTHERS] = (
            f"not recorded: the state has {len(encoded)} bytes as JSON; name in state_columns what is to be"
        )
    return recorded


def recorded_line(
    rollout: Rollout, state_columns: Mapping[str, Sequence[str]], transcribe: Transcriber | None
) -> bytes:
    """Returns one rollout's line, with its newline. Blocks: call it in a thread. Raises as `saved_state` does."""
    return _line(rollout, state_columns, transcribe(rollout) if transcribe is not None else None)


def _line(rollout: Rollout, state_columns: Mapping[str, Sequence[str]], texts: Sequence[TurnText] | None) -> bytes:
    record = rollout_record(rollout, state_columns[rollout.environment], texts)
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _say_missing(rollout: Rollout, names: Sequence[str], columns: Mapping[str, Any]) -> None:
    """Warns once of a column that the state of a rollout lacks without having failed: its name is most likely misspelt."""
    for name in names if rollout.error is None else ():
        if name not in columns and (said := (rollout.environment, name)) not in _said:
            _said.add(said)
            nearest = difflib.get_close_matches(name, columns, n=1)
            logger.warning(
                "environment %r: state_columns: the state of rollout %s has no %r, whose column is null%s It has %s",
                rollout.environment,
                rollout.rollout_id,
                name,
                f"; did you mean {nearest[0]!r}?" if nearest else ".",
                ", ".join(sorted(columns)) or "nothing",
            )


def write_records(
    path: Path,
    rollouts: Iterable[Rollout],
    state_columns: Mapping[str, Sequence[str]],
    transcribe: Transcriber | None = None,
    tokens_path: Path | None = None,
) -> list[RecordHashes]:
    """Writes a new JSON Lines file, which the caller flushes, and returns hashes. Blocks: call it in a thread.

    `state_columns` is by environment. Without `transcribe` the turns have no text. With `tokens_path`, writes the tokens of
    that text there (`orchestrator/rollouts/token_file.py`).
    """
    hashes: list[RecordHashes] = []
    with ExitStack() as files:
        file = files.enter_context(path.open("xb"))
        tokens = files.enter_context(tokens_path.open("xb")) if tokens_path is not None and transcribe else None
        for rollout in chain.from_iterable(yielding_gil(in_portions(rollouts))):
            texts = transcribe(rollout) if transcribe is not None else None
            line, of_tokens = _line(rollout, state_columns, texts), b""
            file.write(line)
            if tokens is not None and texts is not None:
                of_tokens = write_tokens(tokens, rollout, texts)
            hashes.append((hashlib.sha256(line).digest(), of_tokens))
    return hashes
