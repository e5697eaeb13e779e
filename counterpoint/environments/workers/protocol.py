"""The messages between the orchestrator and the workers of an environment.

A message is a list: its kind, mostly the number of a session, and plain values; arrays are bytes in it. Messages that are sent in
one iteration of a loop travel together, as one frame of msgpack. A frame's size, and that of every container in it, is bounded
before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from counterpoint.environments.reward import LARGEST_OF_A_TURN
from counterpoint.transport.exact_json import JsonError, loads
from counterpoint.transport.json_values import encode_values
from counterpoint.transport.records import Alternatives, Rollout, Turn
from counterpoint.transport.unpacked import MOST_INTEGER_BYTES, long_integer, read_long_integer, unpacked

Message = list[Any]

# From a worker.
HELLO, READY, UNABLE, BEAT, GENERATE, PARSE, ABANDON, DONE = range(1, 9)
"""`HELLO token pid`; `READY examples group_scoring`; `UNABLE error`; `BEAT lag`;
`GENERATE session call seat base sampling ids`: the prompt is the tokens of turn `base` (-1: none) and then `ids`; `seat` is ""
for the policy, or `PLAYER` or `OPPONENT` and its name;
`PARSE session call turn tools reasoning`; `ABANDON session call`;
`DONE session error rewards results unavailable answer`, the right one for people."""

# To a worker.
PLAY, SCORE, TURN, REPLY, FAILURE, CANCEL, LEAVE = range(33, 40)
"""`PLAY session example rollout sampling scored`; `SCORE session example rollouts grouped`; `TURN session call index turn`;
`REPLY session call reply`; `FAILURE session call kind text`; `CANCEL session`; `LEAVE`."""

RESUMING = frozenset({GENERATE, PARSE, DONE, PLAY, SCORE, TURN, REPLY, FAILURE})
"""A rollout starts or continues at once when one of these arrives. All others take little time."""

PLAYER, OPPONENT = "player:", "opponent:"

MAX_FRAME_BYTES = 64 * 2**20
MAX_BATCH_BYTES = 2**20
"""The bytes above which a frame takes no further message."""
MAX_BATCH = 64
"""Messages in one frame."""
MAX_STATE_BYTES = 4 * 2**20
"""The size of a rollout's state or metrics as JSON."""
MAX_CALLS = 1024
"""Model calls of one rollout at the same time."""
MAX_ERROR = 2000
"""Characters of an error."""
MAX_CONTAINER = 65536


class ProtocolError(ValueError):
    """A frame or message is none of ours."""


def pack(messages: Sequence[Message]) -> bytes:
    """Returns a frame."""
    packed: bytes = msgpack.packb(messages, default=long_integer)
    return packed


def unpack(frame: bytes) -> list[Message]:
    """Returns the messages of a frame. Raises `ProtocolError`."""
    limits = {"max_array_len": MAX_CONTAINER, "max_map_len": MAX_CONTAINER, "max_ext_len": MOST_INTEGER_BYTES}
    what = f"a frame of {len(frame)} bytes"
    messages = unpacked(frame, what, ProtocolError, **limits, ext_hook=read_long_integer)
    if type(messages) is not list or not all(type(each) is list and each and type(each[0]) is int for each in messages):
        raise ProtocolError(f"a frame of {len(frame)} bytes is no list of messages")
    if len(messages) > MAX_BATCH:  # they are handled before other workers' are read
        raise ProtocolError(f"a frame of {len(messages)} messages; at most {MAX_BATCH} come in one")
    return messages


def encoded(name: str, value: object) -> bytes:
    """Returns an environment's `state` or `metrics` as JSON. Raises `ValueError` that says what is wrong with it."""
    if not isinstance(value, dict):
        raise ValueError(f"the environment left a {name} of type {type(value).__name__}; expected a dictionary")
    try:
        data = encode_values(value)
    except Exception as error:
        raise ValueError(f"the environment left a {name} that is not JSON-serialisable: {error}") from error
    if len(data) > MAX_STATE_BYTES:
        raise ValueError(
            f"the environment left a {name} of {len(data)} bytes as JSON; from a worker at most {MAX_STATE_BYTES} travel"
        )
    return data


def decoded(data: object, name: str) -> dict[str, Any]:
    """Returns what `encoded` made. Raises `ProtocolError`."""
    if not isinstance(data, bytes) or len(data) > MAX_STATE_BYTES:
        raise ProtocolError(f"a worker sent a {name} that is no JSON of at most {MAX_STATE_BYTES} bytes")
    try:
        value = loads(data)
    except JsonError as error:
        raise ProtocolError(f"a worker sent a {name} that cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"a worker sent a {name} of type {type(value).__name__}; expected an object")
    return value


def pack_answer(turn: Turn) -> list[Any]:
    """Returns what a worker is told about a turn whose prompt it knows. Its routing stays here."""
    return [
        turn.completion_ids.tobytes(), turn.log_probabilities.tobytes(), turn.policy_version, turn.finish_reason, turn.server,
        turn.temperature, turn.cached_tokens, turn.player, _packed_alternatives(turn.alternatives),
    ]  # fmt: skip


def answer_bytes(turn: Turn) -> int:
    """Returns the size of the arrays that `pack_answer` has of a turn."""
    found = turn.alternatives
    others = 0 if found is None else found.token_ids_TK.nbytes + found.log_probabilities_TK.nbytes
    return turn.completion_ids.nbytes + turn.log_probabilities.nbytes + others


def unpack_answer(prompt: bytes, answer: Sequence[Any]) -> Turn:
    """Returns the turn that `pack_answer` described."""
    completion, log_probabilities, version, finish_reason, server, temperature, cached, player, alternatives = answer
    return Turn(
        prompt_ids=np.frombuffer(prompt, np.int32),
        completion_ids=np.frombuffer(completion, np.int32),
        log_probabilities=np.frombuffer(log_probabilities, np.float32),
        policy_version=version,
        finish_reason=finish_reason,
        server=server,
        temperature=temperature,
        cached_tokens=cached,
        player=player,
        alternatives=None if alternatives is None else _alternatives(*alternatives),
    )


def _packed_alternatives(alternatives: Alternatives | None) -> list[Any] | None:
    if alternatives is None:
        return None
    ids_TK, values_TK = alternatives.token_ids_TK, alternatives.log_probabilities_TK
    return [ids_TK.shape[1], ids_TK.tobytes(), values_TK.tobytes()]


def _alternatives(count: int, token_ids: bytes, log_probabilities: bytes) -> Alternatives:
    ids_TK = np.frombuffer(token_ids, np.int32).reshape(-1, count)
    return Alternatives(ids_TK, np.frombuffer(log_probabilities, np.float32).reshape(-1, count))


def pack_rollout(rollout: Rollout) -> list[Any]:
    """Returns a finished rollout, to be scored by a worker that may not have played it."""
    turns = [[turn.prompt_ids.tobytes(), bytes(turn.untrained), *pack_answer(turn)] for turn in rollout.turns]
    rewards = None if rollout.turn_rewards is None else rollout.turn_rewards.tobytes()
    return [*identity_of(rollout), encoded("state", rollout.state), encoded("metrics", rollout.metrics), turns, rewards]


def unpack_rollout(packed: Sequence[Any]) -> Rollout:
    """Returns what `pack_rollout` made."""
    *identity, state, metrics, turns, rewards = packed
    rollout = rollout_of(identity)
    rollout.turn_rewards = None if rewards is None else np.frombuffer(rewards, np.float32)
    rollout.state, rollout.metrics = loads(state), loads(metrics)
    for prompt, untrained, *answer in turns:
        turn = unpack_answer(prompt, answer)
        set_untrained(turn, untrained)
        rollout.turns.append(turn)
    return rollout


def identity_of(rollout: Rollout) -> list[Any]:
    """Returns what tells a rollout from others."""
    return [rollout.rollout_id, rollout.group_id, rollout.environment, rollout.example_index]


def rollout_of(identity: Sequence[Any]) -> Rollout:
    """Returns an empty rollout of `identity_of`."""
    return Rollout(*identity)


def untrained_of(turns: Sequence[tuple[int, Turn]]) -> list[list[Any]]:
    """Returns the masks of untrained tokens of numbered turns, for each turn that has one."""
    return [[number, bytes(turn.untrained)] for number, turn in turns if turn.untrained]


def set_untrained(turn: Turn, mask: object) -> None:
    """Leaves those tokens of a turn untrained, beside those that are. Raises `ProtocolError` for a mask that does not fit it."""
    if not isinstance(mask, bytes) or (mask and len(mask) != len(turn.completion_ids)) or mask.strip(b"\x00\x01"):
        raise ProtocolError(f"a mask that does not fit a completion of {len(turn.completion_ids)} tokens")
    if mask and isinstance(turn.untrained, bytearray):
        # What is left untrained at this end stays so: a turn that the other end gave up was never seen as constrained there.
        turn.untrained[:] = bytes(map(max, mask, turn.untrained)) if turn.untrained else mask


def result_of(rollout: Rollout, turns: Sequence[tuple[int, Turn]]) -> list[Any]:
    """Returns what an environment left in a rollout and in its turns, which have the numbers of the other end.

    The last value has the rewards of turns, each number with its own, or is None. Raises `ValueError`.
    """
    rewards = None
    if rollout.turn_rewards is not None:
        numbers = {id(turn): number for number, turn in turns}
        of_turns = zip(rollout.turns, rollout.turn_rewards.tolist(), strict=True)
        rewards = [[numbers[id(turn)], reward] for turn, reward in of_turns]
    return [encoded("state", rollout.state), encoded("metrics", rollout.metrics), untrained_of(turns), rewards]


@dataclass(frozen=True, slots=True)
class EnvironmentResult:
    """What an environment left in a rollout, as `take_result` reads it."""

    state: dict[str, Any]
    metrics: dict[str, Any]
    turn_rewards: dict[int, float] | None
    """The rewards of turns, by the turn's number at this end."""


def take_result(result: object, turns: Sequence[Turn]) -> EnvironmentResult:
    """Returns what `result_of` says, and sets the masks of `turns`. Raises `ProtocolError`."""
    match result:
        case [state, metrics, list(masks), list() | None as rewards]:
            pass
        case _:
            raise ProtocolError("a result that is not [state, metrics, masks, rewards]")
    for each in masks:
        match each:
            case [int(index), mask] if 0 <= index < len(turns):
                set_untrained(turns[index], mask)
            case _:
                raise ProtocolError("a mask of a turn that there is not")
    by_turn: dict[int, float] = {}
    for each in rewards or ():
        match each:
            case [int(index), float(reward)] if 0 <= index < len(turns) and abs(reward) <= LARGEST_OF_A_TURN:
                by_turn[index] = reward
            case _:
                raise ProtocolError("a reward that is no finite one of a turn")
    return EnvironmentResult(decoded(state, "state"), decoded(metrics, "metrics"), None if rewards is None else by_turn)


def is_message(message: Message, *types: type | tuple[type, ...]) -> bool:
    """Whether the values after the kind are of these types, neither more nor fewer."""
    return len(message) == len(types) + 1 and all(map(isinstance, message[1:], types))
