"""Merges turns into samples: a prompt that extends earlier turns continues a sample, any other begins one.

A rollout's turns may come from several agents, interleaved or at the same time. An *open branch* is a token sequence that a
later turn may extend. At the end each branch is one sample. `play.py` opens the branches while the rollout is played, and asks
`OpenBranches.rows_held` which routing an answer need not contain. `boundary.py` turns the branches of a batch's rollouts into
samples with `merge_rollout` and joins these with `assemble_batch`, in a worker thread.

**Which branch a turn extends.** The longest one of the turn's temperature and player that is a prefix, token for token, of its
prompt, or the first opened of equally long ones. So a sample has one temperature, at which it is trained, and one player. A
turn trains only its completion, so no token is trained twice, and leaves out the tokens that the environment excluded
(`Turn.untrained`).

**Routed experts.** Position i's row is decided by tokens 0..i alone, and the last token of a turn has none, since it was never
fed back. A branch of n tokens therefore holds rows 0..n-2, and the turn that extends it brings row n-1 and those after it. Rows
that it sends again are left out, since the first ones are those that generated the tokens. A turn may bring rows that begin
after its branch's end: for example, several turns were sent at once from one state, and another extended the branch first. It
takes the rows in between from any branch that begins with the same tokens. If there is none, the rollout fails: a sample with
missing rows cannot be replayed. Rows are slices of the arrays as received, never copies.

Each token is in memory once: a branch grows in place while the rollout is played, and finalizing its group stores all branches
side by side. The work is linear in the tokens received. Tokens are compared as bytes, and the end first, which almost always
differs in a branch that is not a prefix. Bytes and not numpy arrays, because numpy releases the GIL for every operation on 500
elements or more, and acquiring it again beside a busy loop costs more than the operation.

Next in the reading order of `docs/architecture.md`: `counterpoint/inference/pool/pool.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from counterpoint.transport.arrays import AnyArray
from counterpoint.transport.records import (
    COLUMNS,
    REWARDS,
    TOKEN_COLUMNS,
    Batch,
    Branch,
    Float32Array,
    Int32Array,
    Rollout,
    RoutingArray,
    Sample,
    SampleInfo,
    Turn,
    UInt8Array,
)

_INT32_BYTES = 4
_FLOAT32_BYTES = 4
_OPPOSITE = b"\x01" + bytes(255)
"""Translates a turn's `untrained` to its loss mask."""
_END_BYTES = 64
"""Bytes at the end of a branch that are compared before the whole."""


@dataclass(slots=True)
class OpenBranch:
    """A token sequence that a later turn may extend.

    It holds each token once: the turns' ids are views of its memory, which doubles whenever it is full.
    """

    turns: list[Turn] = field(default_factory=list)
    """The merged turns. Prompt and completion of the last one are all tokens of the branch."""
    routed_experts: list[RoutingArray] = field(default_factory=list)
    rows: int = 0
    """Rows in `routed_experts`: tokens - 1, or 0 without routing."""
    length: int = 0
    """The number of tokens."""
    _memory: bytearray = field(default_factory=bytearray)
    """The tokens as int32, and space for more."""

    def is_alike(self, turn: Turn) -> bool:
        """Whether the turn has the temperature and the player that all turns of the branch have."""
        first = self.turns[0]
        return first.temperature == turn.temperature and first.player == turn.player

    @property
    def tokens(self) -> memoryview:
        """The tokens as the bytes of int32."""
        return memoryview(self._memory)[: self.length * _INT32_BYTES]

    def extend(self, turn: Turn, prompt: bytes, chunks: Sequence[RoutingArray]) -> None:
        """Appends `turn`, and makes its ids views of the branch's memory. `chunks` are the rows of routing that it adds.

        `prompt` are the bytes of its prompt.
        """
        held = self.length * _INT32_BYTES
        added = prompt[held:] + turn.completion_ids.tobytes()
        self.length = len(turn.prompt_ids) + len(turn.completion_ids)
        self._make_room()
        self._memory[held : held + len(added)] = added
        token_ids_T = np.frombuffer(self._memory, np.int32, self.length)
        token_ids_T.flags.writeable = False
        turn.store_ids(token_ids_T)
        self.turns.append(turn)
        for chunk in chunks:
            self.routed_experts.append(chunk)
            self.rows += len(chunk)

    def closed(self) -> Branch:
        """The branch as it is. It shares the memory, so nothing may extend this one any more."""
        token_ids_T = np.frombuffer(self._memory, np.int32, self.length)
        token_ids_T.flags.writeable = False
        return Branch(tuple(self.turns), token_ids_T, tuple(self.routed_experts))

    def begins(self, prompt: bytes) -> bool:
        """Whether the branch is a prefix of `prompt`."""
        length = self.length * _INT32_BYTES
        if len(prompt) < length:
            return False
        tokens, end = memoryview(self._memory), max(0, length - _END_BYTES)
        return prompt.startswith(tokens[end:length], end) and prompt.startswith(tokens[:length])

    def _make_room(self) -> None:
        needed = self.length * _INT32_BYTES
        if needed > len(self._memory):
            memory = bytearray(max(needed, 2 * len(self._memory)))
            memory[: len(self._memory)] = self._memory
            self._memory = memory


class OpenBranches:
    """The branches of one rollout, in the order they were opened. Not for use by two threads at once."""

    def __init__(self) -> None:
        self.branches: list[OpenBranch] = []

    def rows_held(self, prompt_ids: Int32Array) -> int:
        """Returns the number of rows of routing that a call with this prompt need not return: its `routed_experts_start`."""
        if not any(branch.rows for branch in self.branches):  # of a model without experts
            return 0
        branch = self._extended_by(prompt_ids.tobytes())
        return branch.rows if branch else 0

    def add(self, turn: Turn) -> OpenBranch:
        """Extends the branch that the turn's prompt extends, or opens one, and returns it.

        Its last turn is `turn`, with ids as views.

        Raises `ValueError`, saying which rows, if the turn's routing has the wrong number of rows or leaves a gap, and changes
        nothing.
        """
        if not len(turn.prompt_ids):
            raise ValueError("prompt_ids is empty; expected at least one token")
        prompt = turn.prompt_ids.tobytes()
        branch = self._extended_by(prompt, turn)
        chunks = self._new_rows(turn, prompt, branch)
        if branch is None:
            branch = OpenBranch()
            self.branches.append(branch)
        branch.extend(turn, prompt, chunks)
        return branch

    def closed(self) -> tuple[Branch, ...]:
        """All branches as they are, in the order they were opened. Nothing may be added any more."""
        return tuple(branch.closed() for branch in self.branches)

    def _extended_by(self, prompt: bytes, turn: Turn | None = None) -> OpenBranch | None:
        """Returns the longest branch that the prompt extends, of the turn's temperature and player if it is given."""
        found: OpenBranch | None = None
        for branch in self.branches:
            if turn is not None and not branch.is_alike(turn):
                continue
            if (found is None or branch.length > found.length) and branch.begins(prompt):
                found = branch
        return found

    def _new_rows(self, turn: Turn, prompt: bytes, branch: OpenBranch | None) -> list[RoutingArray]:
        """Returns the rows that the turn adds to the branch (None: a new one), without empty chunks."""
        if turn.routed_experts is None:
            return []
        held, start = (branch.rows if branch else 0), turn.routed_experts_start
        tokens = len(turn.prompt_ids) + len(turn.completion_ids)
        if start < 0 or len(turn.routed_experts) != tokens - 1 - start:
            raise ValueError(
                f"routed_experts has {len(turn.routed_experts)} rows from position {start} on; a prompt and completion of "
                f"{tokens} tokens need {tokens - 1 - start}"
            )
        if start <= held:
            chunks = [turn.routed_experts[held - start :]]
        else:
            chunks = [*self._borrowed(prompt, held, start), turn.routed_experts]
        return [chunk for chunk in chunks if len(chunk)]

    def _borrowed(self, prompt: bytes, first: int, stop: int) -> list[RoutingArray]:
        """Returns rows `first..stop - 1` of a branch that begins with the prompt's first `stop` tokens."""
        wanted = prompt[: stop * _INT32_BYTES]
        for branch in self.branches:
            if stop <= branch.rows and len(wanted) == stop * _INT32_BYTES and branch.tokens[: len(wanted)] == wanted:
                return _rows_between(branch.routed_experts, first, stop)
        raise ValueError(
            f"routed_experts begins at position {stop}, but only {first} rows before it are known: rows {first} to {stop - 1} "
            "are missing, so the routing cannot be replayed; ask for it from the first row that OpenBranches.rows_held lacks"
        )


def _rows_between(chunks: Sequence[RoutingArray], first: int, stop: int) -> list[RoutingArray]:
    """Returns rows `first..stop - 1` of the concatenation of `chunks`, as slices."""
    found, position = [], 0
    for chunk in chunks:
        piece = chunk[max(0, first - position) : max(0, stop - position)]
        if len(piece):
            found.append(piece)
        position += len(chunk)
    return found


def merge_turns(rollout: Rollout) -> None:
    """Sets the branches of a rollout, unless it has them since it was played, and holds each token once (`share_tokens`).

    Raises `ValueError` when routing has a gap (see above), changing nothing.
    """
    if rollout.branches is None:
        rollout.branches = _opened(rollout.turns)
    _share(rollout, rollout.branches)


def share_tokens(rollout: Rollout) -> None:
    """Holds each token of a rollout once, in `tokens`, with the ids of its turns as views. Its routing may have gaps."""
    if rollout.branches is not None:
        _share(rollout, rollout.branches)
        return
    held = [replace(turn, routed_experts=None) for turn in rollout.turns]
    _share(rollout, _opened(held))
    rollout.branches = None
    rollout.turns = [
        replace(turn, routed_experts=before.routed_experts) for turn, before in zip(held, rollout.turns, strict=True)
    ]


def _opened(turns: Sequence[Turn]) -> tuple[Branch, ...]:
    """Returns the branches of turns in order of time. Raises `ValueError` when routing has a gap."""
    opened = OpenBranches()
    for turn in turns:
        opened.add(turn)
    return opened.closed()


def _share(rollout: Rollout, branches: Sequence[Branch]) -> None:
    """Stores the tokens of all branches, one after the other, read-only, with turns and branches as views."""
    rollout.tokens = np.frombuffer(b"".join(branch.token_ids_T.data for branch in branches), dtype=np.int32)
    shared: list[Branch] = []
    start = 0
    for branch in branches:
        token_ids_T = rollout.tokens[start : start + len(branch.token_ids_T)]
        for turn in branch.turns:
            turn.store_ids(token_ids_T)
        shared.append(Branch(branch.turns, token_ids_T, branch.routed_experts))
        start += len(token_ids_T)
    rollout.branches = tuple(shared)


def merge_rollout(rollout: Rollout) -> list[Sample]:
    """Returns the samples of a finalized rollout, in the order of their first turns, without branches that train no token.

    A sample has the policy version of its oldest turn. The advantage of a trained token is that of its turn, if turns have one,
    or else the rollout's, or its player's; that of other tokens is 0. Routed experts are slices of the turns' arrays. Raises
    `ValueError` if routing has a gap, which `finalize.py` rules out.
    """
    if rollout.branches is None:  # from a file, where it may be written again: its turns stay views of its own tokens
        rollout = rollout.with_turns([turn.detached() for turn in rollout.turns])
        merge_turns(rollout)
    number = {id(turn): index for index, turn in enumerate(rollout.turns)}
    trained = [branch for branch in rollout.branches or () if any(turn.trained_tokens for turn in branch.turns)]
    rewards = _rewards_by_player(rollout, {branch.turns[0].player for branch in trained})
    return [_sample(rollout, branch, [number[id(turn)] for turn in branch.turns], rewards) for branch in trained]


def _sample(
    rollout: Rollout, branch: Branch, numbers: Sequence[int], rewards: Mapping[str, npt.NDArray[np.float64]]
) -> Sample:
    """Returns the sample of a branch, whose turns have these numbers in the rollout. `rewards` are `_rewards_by_player`."""
    loss_mask_T, log_probabilities_T = _columns(branch)
    player, reward = branch.turns[0].player, rollout.reward if rollout.reward is not None else 0.0
    return Sample(
        rollout_id=rollout.rollout_id,
        environment=rollout.environment,
        policy_version=min(turn.policy_version for turn in branch.turns),
        reward=rollout.player_rewards.get(player, reward),
        temperature=branch.turns[0].temperature,
        columns={
            "token_ids_T": branch.token_ids_T,
            "loss_mask_T": loss_mask_T,
            "log_probabilities_T": log_probabilities_T,
            "advantages_T": loss_mask_T * _advantages(rollout, branch, numbers),
            **{name: _optional_column(branch, name) for name in branch.turns[0].columns},
        },
        routed_experts=branch.routed_experts,
        turn_rewards=_rewards(branch, numbers, rewards[player]) if rewards else (),
    )


def _advantages(rollout: Rollout, branch: Branch, numbers: Sequence[int]) -> Float32Array | np.float32:
    """Returns the advantages of a branch's tokens, trained or not, or the one that all of them have."""
    if rollout.turn_advantages is None:
        return np.float32(rollout.player_advantages.get(branch.turns[0].player, rollout.advantage))
    ends = [0, *(len(turn.prompt_ids) + len(turn.completion_ids) for turn in branch.turns)]
    return np.repeat(rollout.turn_advantages[numbers], np.diff(ends))


def _rewards_by_player(rollout: Rollout, players: Set[str]) -> dict[str, npt.NDArray[np.float64]]:
    """Returns the rewards of all turns that count for each of the players, `[turns]`; nothing if turns have none.

    With a reward for each player, those of others' turns count as 0.
    """
    if rollout.turn_rewards is None:
        return {}
    rewards = rollout.turn_rewards.astype(np.float64)
    if not rollout.player_rewards:
        return dict.fromkeys(players, rewards)
    player_of = np.array([turn.player for turn in rollout.turns])
    return {player: np.where(player_of == player, rewards, 0.0) for player in players}


def _rewards(branch: Branch, numbers: Sequence[int], rewards: npt.NDArray[np.float64]) -> tuple[tuple[int, float], ...]:
    """Returns `Sample.turn_rewards` from those of all turns."""
    trained = [(number, turn) for number, turn in zip(numbers, branch.turns, strict=True) if turn.trained_tokens]
    until_next = np.add.reduceat(rewards, [number for number, _ in trained]).tolist()
    return tuple(zip((_last_trained(turn) for _, turn in trained), until_next, strict=True))


def _last_trained(turn: Turn) -> int:
    """Returns the position of a turn's last trained token in its sample."""
    trained = turn.untrained.rfind(0) if turn.untrained else len(turn.completion_ids) - 1
    return len(turn.prompt_ids) + trained


def _columns(branch: Branch) -> tuple[UInt8Array, Float32Array]:
    """Returns the loss mask and the log-probabilities of a branch's tokens, zeros for untrained ones.

    Joined as bytes, like the tokens: an assignment for each turn would release the GIL each time.
    """
    length = len(branch.token_ids_T)
    zeros, ones = bytes(length * _FLOAT32_BYTES), b"\x01" * length
    mask: list[bytes | bytearray] = []
    values: list[bytes | memoryview] = []
    end = 0
    for turn in branch.turns:
        begin, before = len(turn.prompt_ids), end
        end = begin + len(turn.completion_ids)
        log_probabilities = np.ascontiguousarray(turn.log_probabilities, np.float32)
        if turn.untrained:
            trained = turn.untrained.translate(_OPPOSITE)
            log_probabilities = np.where(np.frombuffer(trained, np.bool_), log_probabilities, np.float32(0))
        else:
            trained = ones[: end - begin]
        mask += [zeros[: begin - before], trained]
        values += [zeros[: (begin - before) * _FLOAT32_BYTES], log_probabilities.data]
    return np.frombuffer(b"".join(mask), np.uint8), np.frombuffer(b"".join(values), np.float32)


def join_floats(arrays: Iterable[Float32Array]) -> Float32Array:
    """Returns the values of all arrays, one after the other, read-only. As bytes, since numpy would release the GIL for each."""
    return np.frombuffer(b"".join(np.ascontiguousarray(array, np.float32).data for array in arrays), np.float32)


def _optional_column(branch: Branch, name: str) -> AnyArray:
    """Returns the values of an optional column for a branch's tokens, zeros for untrained ones."""
    column_T = np.zeros(len(branch.token_ids_T), COLUMNS[name].dtype)
    for turn in branch.turns:
        begin = len(turn.prompt_ids)
        values = turn.columns[name]
        if turn.untrained:
            trained = np.frombuffer(turn.untrained.translate(_OPPOSITE), np.bool_)
            values = np.where(trained, values, values.dtype.type(0))
        column_T[begin : begin + len(values)] = values
    return column_T


def assemble_batch(run_id: str, step: int, samples: Sequence[Sample], *, with_rewards: bool = False) -> Batch:
    """Returns the batch of `step`: the samples' columns, one after the other, and their routing by reference.

    `with_rewards` adds the column `REWARDS`, if any sample has rewards of turns. Allocates each column once. Raises
    `ValueError` if there is no sample, or only some have an optional column.
    """
    if not samples:
        raise ValueError(f"run {run_id}, step {step}: a batch needs at least one sample to train on")
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(sample.token_ids_T) for sample in samples], out=offsets[1:])
    tokens = int(offsets[-1])
    for sample in samples:
        if sample.columns.keys() != samples[0].columns.keys():
            own, others = (sorted(each.columns.keys() - {*TOKEN_COLUMNS}) for each in (sample, samples[0]))
            raise ValueError(
                f"run {run_id}, step {step}: rollout {sample.rollout_id} has the optional columns {own}, rollout "
                f"{samples[0].rollout_id} has {others}; all samples of a batch have the same"
            )
    columns: dict[str, AnyArray] = {name: np.empty(tokens, COLUMNS[name].dtype) for name in samples[0].columns}
    for index, sample in enumerate(samples):
        place = slice(int(offsets[index]), int(offsets[index + 1]))
        for name, column_T in columns.items():
            column_T[place] = sample.columns[name]
    if with_rewards and any(sample.turn_rewards for sample in samples):
        columns[REWARDS] = np.zeros(tokens, COLUMNS[REWARDS].dtype)
        for sample, start in zip(samples, offsets.tolist(), strict=False):
            last = int(sample.loss_mask_T.nonzero()[0][-1])
            for position, reward in sample.turn_rewards or ((last, sample.reward),):
                columns[REWARDS][start + position] = reward
    routed = any(sample.routed_experts for sample in samples)
    return Batch(
        run_id=run_id,
        step=step,
        samples=tuple(
            SampleInfo(s.rollout_id, s.environment, s.policy_version, s.reward, s.temperature) for s in samples
        ),
        columns=columns | {"sample_offsets": offsets},
        routed_experts=tuple(sample.routed_experts for sample in samples) if routed else (),
    )
