"""The records that travel: a turn, a rollout, a sample, a batch.

They are plain data, without any wire, model or loop. Arrays are numpy; bulk arrays may be views of received bytes and are
never copied on the way. Shape suffixes in names: `T` tokens, `S` samples, `L` layers, `K` experts a token.

Next in the reading order of `docs/architecture.md`: `counterpoint/environments/base.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]
RoutingArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""Routed experts `[tokens, layers, top_k]`: uint8 up to 256 experts, uint16 above."""

TEACHER_LOG_PROBABILITIES = "teacher_log_probabilities"
"""Column: the log-probabilities of the tokens under a teacher, of its whole distribution at temperature 1."""

REWARDS = "rewards"
"""Column: the rewards of single turns, each at the turn's last trained token, for a value head. 0 at other tokens."""

LOG_PROBABILITY_ROUNDING = 1e-3
"""Inference engines round a certainty to a little above 0; more than this is not rounding."""


@dataclass(frozen=True, slots=True)
class Column:
    """What a column of samples and batches holds: an array of one dimension."""

    name: str
    dtype: type[np.generic]
    expected: str
    """The values that it may hold, in words."""
    lowest: float = -math.inf
    highest: float = math.inf
    optional: bool = False
    """Whether a batch may be without it. It is 0 where the mask is 0."""
    of_turns: bool = False
    """Whether turns have its values of their completion tokens, and a loss gets those of the trained ones."""
    of_tokens: bool = True
    """Whether it has one value a token."""
    in_digest: bool = False
    """Whether its values tell two batches of one step apart."""

    def bad(self, values_T: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Returns where values are none that it may hold."""
        is_float = issubclass(self.dtype, np.floating)
        bad_T: npt.NDArray[np.bool_] = ~np.isfinite(values_T) if is_float else np.zeros(len(values_T), np.bool_)
        if self.lowest > -math.inf:
            bad_T |= values_T < self.lowest
        if self.highest < math.inf:
            bad_T |= values_T > self.highest
        return bad_T


_NOT_POSITIVE = "a finite number, 0 or less"

COLUMNS = {
    each.name: each
    for each in (
        Column("token_ids_T", np.int32, "0 or more", lowest=0, in_digest=True),
        Column("loss_mask_T", np.uint8, "0 or 1", highest=1),
        Column("log_probabilities_T", np.float32, _NOT_POSITIVE, highest=LOG_PROBABILITY_ROUNDING, in_digest=True),
        Column("advantages_T", np.float32, "a finite number", in_digest=True),
        Column("sample_offsets", np.int64, "0, rising to the number of tokens", of_tokens=False),
        Column(
            TEACHER_LOG_PROBABILITIES,
            np.float32,
            _NOT_POSITIVE,
            highest=LOG_PROBABILITY_ROUNDING,
            optional=True,
            of_turns=True,
        ),
        Column(REWARDS, np.float32, "a finite number", optional=True, in_digest=True),
    )
}
"""Every column by its name, in the order in which the required ones travel; the optional ones follow these."""

REQUIRED_COLUMNS = tuple(name for name, column in COLUMNS.items() if not column.optional)
OPTIONAL_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.optional)
TURN_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.of_turns)
"""The optional columns that turns may have."""
TOKEN_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.of_tokens and not column.optional)
"""The required columns of samples."""

MOST_ALTERNATIVES = 20
"""Most alternatives of one token. vLLM takes no more (`max_logprobs`), nor does OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The most probable tokens at the place of each token of a completion, the most probable first. `K` are asked for."""

    token_ids_TK: Int32Array
    log_probabilities_TK: Float32Array
    """Log-probabilities in nats, of the distribution that was sampled from. Minus infinity, or below -9,000: it could
    not be sampled."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: its prompt, its completion, and the weights that computed it.

    `routed_experts` holds the rows of positions `routed_experts_start ... len(prompt) + len(completion) - 2` of the
    concatenation prompt + completion: the last token was never fed back, so it has no row.
    """

    prompt_ids: Int32Array
    completion_ids: Int32Array
    log_probabilities: Float32Array
    """One per completion token, of the distribution it was sampled from (temperature, top-p, top-k, min-p), natural logarithm."""
    policy_version: int
    """The weights that were loaded when the call began (the oldest that may have produced a token of it)."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    routed_experts: RoutingArray | None = None
    routed_experts_start: int = 0
    server: str = ""
    temperature: float = 1.0
    """The divisor of the logits at sampling. 1 in a file that was written before this was recorded."""
    cached_tokens: int | None = None
    """Tokens of its prompt that the server's prefix cache had; None if the server did not say."""
    player: str = ""
    """The player of a rollout with several whose turn it is; empty where there is only one."""
    load: str = ""
    """The load of weights that computed it, `PROCESS:FIRST-LAST` by its server's own count; empty if that does not say."""
    seed: int = 0
    """The seed that its call was sent with; 0: none."""
    alternatives: Alternatives | None = None
    """What else might have been sampled, if the call asked for it. For who reads the answer: no file has it."""
    untrained: bytearray | bytes = field(default_factory=bytearray)
    """Empty where every completion token is trained, else one byte for each: 1 where it must not be. Set by `leave_untrained`;
    `bytes` once the rollout's group is finalized."""
    columns: dict[str, Float32Array] = field(default_factory=dict)
    """Further values of its completion tokens, one each, by names of `TURN_COLUMNS`. All turns of a rollout have the same."""

    def leave_untrained(self, start: int = 0, stop: int | None = None) -> None:
        """Excludes the completion tokens `start..stop - 1` (as in a slice; all by default) from training, until the rollout ends.

        They stay part of the sample, as tokens that the model reads. Raises `TypeError` once the rollout's group is finalized.
        """
        if isinstance(self.untrained, bytes):
            raise TypeError("this turn is finalized or from a file: what is trained of it cannot be changed any more")
        tokens = len(self.completion_ids)
        first, last, _ = slice(start, stop).indices(tokens)
        if first >= last:
            return
        if not self.untrained:
            self.untrained.extend(bytes(tokens))
        self.untrained[first:last] = b"\x01" * (last - first)

    @property
    def trained_tokens(self) -> int:
        """The number of completion tokens that are trained."""
        return len(self.completion_ids) - self.untrained.count(1)

    def store_ids(self, token_ids: Int32Array) -> None:
        """Makes its ids views of `token_ids`, which begins with them: prompt, then completion. Their values stay.

        A copy with other arrays would cost as much as the turn, and each turn is stored twice.
        """
        prompt, written = len(self.prompt_ids), len(self.prompt_ids) + len(self.completion_ids)
        object.__setattr__(self, "prompt_ids", token_ids[:prompt])
        object.__setattr__(self, "completion_ids", token_ids[prompt:written])

    def detached(self) -> Turn:
        """Returns a copy whose `untrained` and `columns` do not change with the turn's own. It shares the arrays."""
        values = (*_BEFORE_UNTRAINED(self), bytes(self.untrained), dict(self.columns))
        return Turn(*values)


_TURN_FIELDS = [each.name for each in fields(Turn)]
_BEFORE_UNTRAINED = attrgetter(*_TURN_FIELDS[:-2])


@dataclass(frozen=True, slots=True)
class OpponentTurn:
    """A call of another policy than the run's, kept for people: nothing of it is trained or counted."""

    opponent: str
    """Its name in the configuration, or that of a seat."""
    before: int
    """The number of turns that the rollout had when it was made."""
    completion: str
    """The completion as text."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state and metrics of a rollout, from its environment, as JSON objects in UTF-8."""

    metrics: bytes
    state: bytes


@dataclass(frozen=True, slots=True)
class Branch:
    """Turns of which each one's prompt extends all that came before: they become one sample."""

    turns: tuple[Turn, ...]
    token_ids_T: Int32Array
    """The last turn's prompt and completion."""
    routed_experts: tuple[RoutingArray, ...] = ()
    """Chunks whose rows add up to T - 1, or empty."""


@dataclass(slots=True)
class Rollout:
    """One attempt at an example: its turns in order of time, and a reward or an error."""

    rollout_id: str
    """`GROUP-INDEX`, where the group is its `group_id`."""
    group_id: int
    environment: str
    example_index: int
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    error: str | None = None
    """Why it failed, for a person; None if it completed."""
    inference_failed: bool = False
    """It failed because a model call of it got no answer in time: a failure of the infrastructure, not of its environment."""
    metrics: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """What the environment kept. The saved records have it, cut where it is long, but whole what `state_columns` names.
    JSON-serialisable."""
    answer: str | None = None
    """The right answer of its example, for people, cut where it is long (`environments.base.answer_of`); None if it has none."""
    sampling_args: dict[str, Any] = field(default_factory=dict)
    """All that its calls were sent with that overrode nothing: `[sampling]` of its environment, and the stop tokens."""
    advantage: float = 0.0
    """The advantage; with players, the one of theirs that is largest in size."""
    advantage_kind: str = ""
    """The `advantage.kind` that it was finalized with, which may have been changed since; empty before."""
    player_rewards: dict[str, float] = field(default_factory=dict)
    """The reward of each player, where the environment gave one to each; `reward` is then their mean."""
    player_advantages: dict[str, float] = field(default_factory=dict)
    """The advantages of the players in `player_rewards` that have turns."""
    turn_rewards: Float32Array | None = None
    """The reward of each turn, `[turns]`, read-only; None where nothing gave a reward to a turn. `reward` is their sum, and
    that of a player the sum of the player's own."""
    turn_advantages: Float32Array | None = None
    """The advantage of each turn, `[turns]`; None where `advantage`, or its player's, holds for each. `advantage` is then the
    one of them that is largest in size."""
    opponent_turns: list[OpponentTurn] = field(default_factory=list)
    """Calls of other policies, in order of time."""
    filtered_by: str | None = None
    """Name of the enforcing filter that removed it."""
    dropped: str | None = None
    """Why its whole group was dropped after it was finalized, such as `stale`: it is recorded and not trained. None if not."""
    saved: SavedState | None = None
    """`metrics` and `state` as they were when its group was finalized; None before. Files are written from these bytes, since an
    environment may change both at any time."""

    turn_hashes: list[dict[str, str | None]] | None = None
    """The hashes of its turns' tokens, for its record, computed when its group was finalized; None before, or from a file."""
    tokens: Int32Array | None = None
    """All tokens of its turns, each once, of which the turns' ids are views. None until its group is finalized, or it is read
    from a file."""
    branches: tuple[Branch, ...] | None = None
    """Its turns as branches; None before its end, or if it was read from a file."""

    def with_turns(self, turns: list[Turn]) -> Rollout:
        """Returns a copy with other turns. `dataclasses.replace` takes six times as long, and each rollout is copied thrice."""
        copy = Rollout(*_OF_ROLLOUT(self))
        copy.turns = turns
        return copy

    @property
    def oldest_policy_version(self) -> int:
        """The smallest policy version of any turn."""
        return min(turn.policy_version for turn in self.turns)


_OF_ROLLOUT = attrgetter(*[each.name for each in fields(Rollout)])


class _Columned:
    """The required columns as attributes."""

    __slots__ = ()

    columns: dict[str, npt.NDArray[Any]]

    @property
    def token_ids_T(self) -> Int32Array:
        """The tokens."""
        return self.columns["token_ids_T"]

    @property
    def loss_mask_T(self) -> UInt8Array:
        """1 where the token was written by the model and trains."""
        return self.columns["loss_mask_T"]

    @property
    def log_probabilities_T(self) -> Float32Array:
        """The inference engine's log-probabilities; 0 where the mask is 0."""
        return self.columns["log_probabilities_T"]

    @property
    def advantages_T(self) -> Float32Array:
        """The advantages; 0 where the mask is 0."""
        return self.columns["advantages_T"]


@dataclass(frozen=True, slots=True)
class Sample(_Columned):
    """A flat token sequence ready to train on: one or more turns merged."""

    rollout_id: str
    environment: str
    policy_version: int
    """The oldest of its turns."""
    reward: float
    temperature: float
    """The temperature of all its turns: turns of different temperatures are never merged."""
    columns: dict[str, npt.NDArray[Any]]
    """The columns by their names in `COLUMNS`: those of tokens, `[T]`."""
    routed_experts: tuple[RoutingArray, ...] = ()
    """Chunks whose rows add up to T - 1 (the last token has no routing), or empty."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Positions and rewards, where turns have rewards: the last trained token of each of its turns, and the rewards of the
    rollout's turns from that one on, before the sample's next. Empty: `reward` is its last trained token's."""


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """The columns of one sample in a batch's header."""

    rollout_id: str
    environment: str
    policy_version: int
    reward: float
    temperature: float
    """The temperature at which its log-probabilities were sampled, and at which it is trained."""


@dataclass(frozen=True, slots=True)
class Batch(_Columned):
    """The samples of one training step of one run, as columns over all tokens."""

    run_id: str
    step: int
    """The step this batch trains, counted from 1. Policy version `step` is the weights after it."""
    samples: tuple[SampleInfo, ...]
    columns: dict[str, npt.NDArray[Any]]
    """The columns by their names in `COLUMNS`: all that are required, and the optional ones of this run."""
    routed_experts: tuple[tuple[RoutingArray, ...], ...] = ()
    """One tuple of chunks a sample, rows adding up to that sample's tokens - 1; empty when the model has no experts."""

    @property
    def sample_offsets(self) -> Int64Array:
        """`[S + 1]`: sample i is the tokens `sample_offsets[i]:sample_offsets[i + 1]`."""
        return self.columns["sample_offsets"]

    @property
    def optional(self) -> list[str]:
        """The names of its optional columns, in the order in which they travel."""
        return [name for name in self.columns if name not in REQUIRED_COLUMNS]

    @property
    def of_loss(self) -> list[str]:
        """The names of the optional columns that a loss gets."""
        return [name for name in self.optional if COLUMNS[name].of_turns]

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """All arrays in the order in which they travel: the required columns, the optional ones, the routing chunks."""
        columns = [self.columns[name] for name in (*REQUIRED_COLUMNS, *self.optional)]
        return columns + [chunk for sample in self.routed_experts for chunk in sample]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)
