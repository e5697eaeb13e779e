"""Turns become samples: each prompt that extends what came before continues a sample, any other begins one.

A rollout's turns may come from several agents, interleaved or at the same time. An *open branch* is a token sequence that a
later turn may extend; at the end each branch is one sample. `step.py` merges a batch's rollouts with `merge_rollout` and puts
the samples together with `assemble_batch`, in a worker thread; whoever calls the model asks `OpenBranches.rows_held` which
routing the answer can leave out.

**Which branch a turn extends.** The longest one that is a prefix, token for token, of the turn's prompt; of equal ones the first
opened. Only what this turn's model call wrote is trained by it, so no token trains twice.

**Routed experts.** Position i's row is decided by tokens 0..i alone, and the last token of a turn has none, for it was never fed
back. A branch of n tokens therefore holds rows 0..n-2, and the turn that extends it brings row n-1 and those after it; rows
that it sends again are left out, since the first ones are those that generated the tokens. A turn whose rows begin later than
the branch it extends has rows (it was one of several turns sent at once from one state, and another extended the branch first)
borrows what lies between from any branch that begins with the same tokens. If there is none, rows are missing, and the rollout
fails: a sample with a hole cannot be replayed. Rows are slices of the arrays as received, never copies.

All of it is linear in the tokens received: a branch is compared with a prompt token by token only if its last token stands where
it should, and where many still would be, only if a digest agrees. Every array operation is over one turn, so none holds
the GIL for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from transport.records import Batch, Int32Array, Rollout, RoutingArray, Sample, SampleInfo, Turn

UInt64Array = npt.NDArray[np.uint64]

_COMPARED = 2
"""Branches compared with a prompt without a digest first: most often there is one."""


@dataclass(slots=True)
class Branch:
    """A token sequence that a later turn may extend."""

    turns: list[Turn]
    """Those merged so far; the last one's prompt and completion are all the branch's tokens."""
    length: int = 0
    """Tokens."""
    last_token: int = -1
    routed_experts: list[RoutingArray] = field(default_factory=list)
    rows: int = 0
    """Rows in `routed_experts`: length - 1, or 0 without routing."""
    _digest: int | None = None

    @property
    def digest(self) -> int:
        """Of all the branch's tokens. Made when it is first asked for after a turn."""
        if self._digest is None:
            last = self.turns[-1]
            self._digest = int(prefix_digests(np.concatenate((last.prompt_ids, last.completion_ids)))[-1])
        return self._digest

    def extend(self, turn: Turn, chunks: Sequence[RoutingArray]) -> None:
        """Makes `turn` the last one, and its prompt and completion the branch's tokens."""
        self.turns.append(turn)
        self.length = len(turn.prompt_ids) + len(turn.completion_ids)
        self.last_token = int((turn.completion_ids if len(turn.completion_ids) else turn.prompt_ids)[-1])
        self.routed_experts.extend(chunks)
        self.rows += sum(len(chunk) for chunk in chunks)
        self._digest = None

    def begins(self, token_ids: Int32Array) -> bool:
        """Whether the branch is a prefix of `token_ids` (which is at least as long)."""
        last = self.turns[-1]
        prompt_length = len(last.prompt_ids)
        return np.array_equal(token_ids[:prompt_length], last.prompt_ids) and np.array_equal(
            token_ids[prompt_length : self.length], last.completion_ids
        )

    def starts_with(self, token_ids: Int32Array) -> bool:
        """Whether `token_ids` (at most as long) is a prefix of the branch."""
        last = self.turns[-1]
        cut = min(len(token_ids), len(last.prompt_ids))
        return np.array_equal(token_ids[:cut], last.prompt_ids[:cut]) and np.array_equal(
            token_ids[cut:], last.completion_ids[: len(token_ids) - cut]
        )


class OpenBranches:
    """The branches of one rollout, in the order they were opened. Not for use by two threads at once."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []

    def rows_held(self, prompt_ids: Int32Array) -> int:
        """How many rows of routing a call with this prompt need not return: its `routed_experts_start`."""
        branch = self._extended_by(prompt_ids)
        return branch.rows if branch else 0

    def add(self, turn: Turn) -> Branch:
        """Extends the branch that the turn's prompt extends, or opens one.

        Raises `ValueError`, saying which rows, when the turn's routing has the wrong number of rows or leaves a gap; the
        branches are then as before.
        """
        if not len(turn.prompt_ids):
            raise ValueError("prompt_ids is empty; expected at least one token")
        branch = self._extended_by(turn.prompt_ids)
        chunks = self._new_rows(turn, branch)
        if branch is None:
            branch = Branch([])
            self.branches.append(branch)
        branch.extend(turn, chunks)
        return branch

    def _extended_by(self, prompt_ids: Int32Array) -> Branch | None:
        """The longest branch that the prompt begins with."""
        tokens = len(prompt_ids)
        likely = [
            branch
            for branch in self.branches
            if branch.length <= tokens and prompt_ids[branch.length - 1] == branch.last_token
        ]
        if len(likely) > _COMPARED:
            digests = prefix_digests(prompt_ids)
            likely = [branch for branch in likely if int(digests[branch.length - 1]) == branch.digest]
        likely.sort(key=lambda branch: branch.length, reverse=True)
        return next((branch for branch in likely if branch.begins(prompt_ids)), None)

    def _new_rows(self, turn: Turn, branch: Branch | None) -> list[RoutingArray]:
        """The rows that the turn adds to the branch (None: a new one), without empty chunks."""
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
            chunks = [*self._borrowed(turn.prompt_ids, held, start), turn.routed_experts]
        return [chunk for chunk in chunks if len(chunk)]

    def _borrowed(self, prompt_ids: Int32Array, first: int, stop: int) -> list[RoutingArray]:
        """Rows `first..stop - 1` of a branch that begins with the prompt's first `stop` tokens."""
        for branch in self.branches:
            if stop <= min(branch.rows, len(prompt_ids)) and branch.starts_with(prompt_ids[:stop]):
                return _rows_between(branch.routed_experts, first, stop)
        raise ValueError(
            f"routed_experts begins at position {stop}, but only {first} rows before it are known: rows {first} to {stop - 1} "
            "are missing, so the routing cannot be replayed; ask for it from the first row that OpenBranches.rows_held lacks"
        )


def _rows_between(chunks: Sequence[RoutingArray], first: int, stop: int) -> list[RoutingArray]:
    """Rows `first..stop - 1` of the concatenation of `chunks`, as slices."""
    found, position = [], 0
    for chunk in chunks:
        piece = chunk[max(0, first - position) : max(0, stop - position)]
        if len(piece):
            found.append(piece)
        position += len(chunk)
    return found


def prefix_digests(token_ids_T: Int32Array) -> UInt64Array:
    """`[T]`: entry i is a digest of tokens 0..i, `sum (token + 1) * multiplier ** i` modulo 2**64. Equal sequences have equal
    digests; unequal ones may, so a match is still to be compared."""
    powers = _powers(max(1, len(token_ids_T) - 1).bit_length())[: len(token_ids_T)]
    digests: UInt64Array = np.cumsum((token_ids_T.astype(np.uint64) + np.uint64(1)) * powers)
    return digests


@lru_cache(maxsize=32)
def _powers(bits: int) -> UInt64Array:
    """`[2 ** bits]` powers of an odd 64-bit constant, modulo 2**64."""
    powers: UInt64Array = np.multiply.accumulate(np.full(1 << bits, 0x9E3779B97F4A7C15, dtype=np.uint64))
    return powers


def merge_rollout(rollout: Rollout) -> list[Sample]:
    """The samples of one judged rollout, in the order their first turns were made; none for a branch without a completion.

    A sample's staleness is that of its oldest turn, its advantage the rollout's on every trained token and 0 elsewhere. Routed
    experts are slices of the turns' arrays. Raises `ValueError` when routing has a gap (see above), which `judge.py` rules out.
    """
    branches = OpenBranches()
    for turn in rollout.turns:
        branches.add(turn)
    return [
        _sample(rollout, branch)
        for branch in branches.branches
        if any(len(turn.completion_ids) for turn in branch.turns)
    ]


def _sample(rollout: Rollout, branch: Branch) -> Sample:
    last = branch.turns[-1]
    loss_mask_T = np.zeros(branch.length, dtype=np.uint8)
    log_probabilities_T = np.zeros(branch.length, dtype=np.float32)
    for turn in branch.turns:
        written = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids))
        loss_mask_T[written] = 1
        log_probabilities_T[written] = turn.log_probabilities
    return Sample(
        rollout_id=rollout.rollout_id,
        environment=rollout.environment,
        policy_version=min(turn.policy_version for turn in branch.turns),
        reward=rollout.reward if rollout.reward is not None else 0.0,
        token_ids_T=np.concatenate((last.prompt_ids, last.completion_ids)),
        loss_mask_T=loss_mask_T,
        log_probabilities_T=log_probabilities_T,
        advantages_T=loss_mask_T * np.float32(rollout.advantage),
        routed_experts=tuple(branch.routed_experts),
    )


def assemble_batch(run_id: str, step: int, samples: Sequence[Sample]) -> Batch:
    """The batch of `step`: the samples' columns, one after the other, and their routing by reference.

    Each column is allocated once and filled sample by sample. Raises `ValueError` when there is no sample.
    """
    if not samples:
        raise ValueError(f"run {run_id}, step {step}: a batch needs at least one sample to train on")
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(sample.token_ids_T) for sample in samples], out=offsets[1:])
    tokens = int(offsets[-1])
    token_ids_T = np.empty(tokens, dtype=np.int32)
    loss_mask_T = np.empty(tokens, dtype=np.uint8)
    log_probabilities_T = np.empty(tokens, dtype=np.float32)
    advantages_T = np.empty(tokens, dtype=np.float32)
    for index, sample in enumerate(samples):
        place = slice(int(offsets[index]), int(offsets[index + 1]))
        token_ids_T[place] = sample.token_ids_T
        loss_mask_T[place] = sample.loss_mask_T
        log_probabilities_T[place] = sample.log_probabilities_T
        advantages_T[place] = sample.advantages_T
    routed = any(sample.routed_experts for sample in samples)
    return Batch(
        run_id=run_id,
        step=step,
        samples=tuple(SampleInfo(s.rollout_id, s.environment, s.policy_version, s.reward) for s in samples),
        token_ids_T=token_ids_T,
        loss_mask_T=loss_mask_T,
        log_probabilities_T=log_probabilities_T,
        advantages_T=advantages_T,
        sample_offsets=offsets,
        routed_experts=tuple(sample.routed_experts for sample in samples) if routed else (),
    )
