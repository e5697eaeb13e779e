"""Synthetic rollouts from a seed, finalized as the daemon does, for dumps of any size.

There are two kinds. `even` rollouts are all alike, for benchmarks. The others resemble production: turns and tokens with a long
tail, rewritten contexts, several agents in one rollout, failures, groups that are not full. Tokens, log-probabilities and rewards
are drawn for each rollout. Routing consists of slices of one random block, so that making a rollout costs far less than writing
it. At most one group's tokens are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from counterpoint.orchestrator.rollouts.dump import DumpHeader
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.filters import with_vocabulary
from counterpoint.orchestrator.step.finalize import finalize_group
from counterpoint.run.config import AdvantageConfig, GibberishFilter, RepetitionFilter, ZeroAdvantageFilter
from counterpoint.transport.records import Rollout, RoutingArray, Turn

ENVIRONMENT = "synthetic"
VOCABULARY = 150_000

_ADVANTAGE = AdvantageConfig()
_FILTERS = with_vocabulary([GibberishFilter(), RepetitionFilter(), ZeroAdvantageFilter()], VOCABULARY)
"""All filters, so that a replay includes their cost."""

_MEDIAN_SHARE = 0.3
_SPREAD = 0.9
"""A rollout's size relative to the longest is lognormal with this median and spread, at most 1."""
_FAILED = 0.06
_SMALLER_GROUPS = 0.15
_SEVERAL_AGENTS = 0.2
_REWRITTEN = 0.03
"""Shares of rollouts, of groups, of rollouts, of turns."""
_SPARE_ROWS = 1021
"""Rows of the random block beyond those of the longest turn: the number of rows at which a turn's routing may begin."""
_MOST_ROUTING_BYTES = 4 * 2**30
"""Most bytes of one rollout's routing; the random block is as large."""


@dataclass(frozen=True)
class Shape:
    """The shape of the rollouts to make. Raises `ValueError` for an impossible one.

    `turns` and `tokens` (of all samples together) are those of every rollout if `even`, else those of the longest.
    """

    rollouts: int = 256
    turns: int = 78
    tokens: int = 60_000
    layers: int = 48
    top_k: int = 8
    experts: int = 128
    group_size: int = 8
    even: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("rollouts", "turns", "layers", "top_k", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; expected at least 1")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}; expected 0 or more")
        if not self.top_k <= self.experts <= 2**16:
            raise ValueError(f"experts = {self.experts}; expected at least top_k = {self.top_k} and at most {2**16}")
        if self.tokens < 2 * self.turns:
            raise ValueError(f"tokens = {self.tokens}; expected at least two for each of turns = {self.turns}")
        nbytes = self.tokens * self.layers * self.top_k * self.routing_dtype.itemsize
        if nbytes > _MOST_ROUTING_BYTES:
            raise ValueError(
                f"tokens x layers x top_k = {self.tokens} x {self.layers} x {self.top_k}: one rollout's routing would take "
                f"{nbytes / 2**30:.3g} GiB; expected at most {_MOST_ROUTING_BYTES / 2**30:.3g}"
            )

    @property
    def routing_dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """The smallest dtype that holds every expert's index."""
        return np.dtype(np.uint8) if self.experts <= 256 else np.dtype(np.uint16)


@dataclass(frozen=True, slots=True)
class _Step:
    """One turn as planned: which conversation it continues, and how many tokens of prompt and completion it adds."""

    conversation: int
    prompt: int
    completion: int


def header_of(shape: Shape) -> DumpHeader:
    """Makes the header of a dump of `synthetic_rollouts(shape)`; all rollouts ship."""
    return DumpHeader(
        run_id="synthetic",
        step=1,
        shipped=shape.rollouts,
        advantage=_ADVANTAGE,
        filters=_FILTERS,
        state_columns={ENVIRONMENT: ["answer"]},
    )


def synthetic_rollouts(shape: Shape) -> Iterator[Rollout]:
    """Makes the rollouts of `shape`, group by group, one at a time; the same for the same shape. Routing arrays are read-only."""
    block = _routing_block(shape)
    advantage = load_advantage(_ADVANTAGE)
    for group_id, indices in enumerate(_groups(shape)):
        group = [_rollout(shape, group_id, index, position, block) for index, position in enumerate(indices)]
        finalize_group(group, advantage, _FILTERS)
        yield from group


def _groups(shape: Shape) -> Iterator[range]:
    """The positions of each group's rollouts. A group has `group_size` of them; some groups have fewer unless `even`."""
    generator = np.random.default_rng((shape.seed, 0))
    start = 0
    while start < shape.rollouts:
        size = shape.group_size
        if not shape.even and size > 2 and generator.random() < _SMALLER_GROUPS:
            size = int(generator.integers(2, size))
        stop = min(start + size, shape.rollouts)
        yield range(start, stop)
        start = stop


def _rollout(shape: Shape, group_id: int, index: int, position: int, block: RoutingArray) -> Rollout:
    generator = np.random.default_rng((shape.seed, 1, position))
    steps = _even_steps(shape) if shape.even else _uneven_steps(shape, position, generator)
    turns = _turns(steps, block, generator)
    rollout = Rollout(
        rollout_id=f"{group_id}-{index}",
        group_id=group_id,
        environment=ENVIRONMENT,
        example_index=group_id,
        turns=turns,
        metrics={"turns": float(len(turns))},
        state={"answer": generator.bytes(16).hex()},
    )
    # The first of a group never fails, so that no group is lost whole.
    if index > 0 and not shape.even and generator.random() < _FAILED:
        rollout.error = "TimeoutError: the tool did not answer within 300 s"
        del turns[int(generator.integers(0, len(turns))) :]
    else:
        rollout.reward = float(generator.random())
    return rollout


def _even_steps(shape: Shape) -> list[_Step]:
    """Equal turns, half prompt and half completion; the first takes what is left over."""
    added = shape.tokens // shape.turns
    first = _Step(0, shape.tokens - (shape.turns - 1) * added - added // 2, added // 2)
    return [first] + [_Step(0, added - added // 2, added // 2)] * (shape.turns - 1)


def _uneven_steps(shape: Shape, position: int, generator: np.random.Generator) -> list[_Step]:
    """Turns of a share of the longest rollout's size, the very first rollout being it."""
    share = 1.0 if position == 0 else min(1.0, _MEDIAN_SHARE * float(generator.lognormal(0, _SPREAD)))
    count = max(1, round(share * shape.turns))
    tokens = max(2 * count, round(share * shape.tokens))
    weights = generator.lognormal(0, 0.7, count)
    added = 2 + ((tokens - 2 * count) * weights / weights.sum()).astype(np.int64)
    added[0] += tokens - added.sum()
    completions = np.clip((added * generator.uniform(0.2, 0.8, count)).astype(np.int64), 1, added - 1)
    conversations = _conversations(count, generator)
    return [
        _Step(conversation, int(total - completion), int(completion))
        for conversation, total, completion in zip(conversations, added, completions, strict=True)
    ]


def _conversations(count: int, generator: np.random.Generator) -> list[int]:
    """Which conversation each turn belongs to: each agent has one, and another from where its context is rewritten."""
    agents = int(generator.integers(2, 4)) if generator.random() < _SEVERAL_AGENTS else 1
    current = list(range(agents))
    conversations, opened = [], agents
    for agent in generator.integers(0, agents, count):
        if current[agent] in conversations and generator.random() < _REWRITTEN:
            current[agent], opened = opened, opened + 1
        conversations.append(current[agent])
    return conversations


def _turns(steps: list[_Step], block: RoutingArray, generator: np.random.Generator) -> list[Turn]:
    """Every turn's arrays are slices: of its conversation's tokens, of the rollout's log-probabilities, of the routing block."""
    lengths: dict[int, int] = {}
    for step in steps:
        lengths[step.conversation] = lengths.get(step.conversation, 0) + step.prompt + step.completion
    tokens = {c: generator.integers(0, VOCABULARY, length, dtype=np.int32) for c, length in lengths.items()}
    first = next(iter(tokens.values()))
    for token_ids_T in tokens.values():  # a system prompt that all agents share and every rewritten context keeps
        shared = min(len(first), len(token_ids_T)) // 8
        token_ids_T[:shared] = first[:shared]
    log_probabilities = -generator.standard_exponential(sum(step.completion for step in steps), dtype=np.float32)
    held = dict.fromkeys(lengths, 0)
    written = 0
    turns = []
    for step in steps:
        before = held[step.conversation]
        prompt_end = before + step.prompt
        end = held[step.conversation] = prompt_end + step.completion
        start = max(0, before - 1)
        offset = int(generator.integers(0, _SPARE_ROWS))
        turn = Turn(
            prompt_ids=tokens[step.conversation][:prompt_end],
            completion_ids=tokens[step.conversation][prompt_end:end],
            log_probabilities=log_probabilities[written : written + step.completion],
            policy_version=0,
            finish_reason="stop",
            routed_experts=block[offset : offset + end - 1 - start],
            routed_experts_start=start,
            server="http://127.0.0.1:8000",
        )
        written += step.completion
        turns.append(turn)
    return turns


def _routing_block(shape: Shape) -> RoutingArray:
    """`[rows, layers, top_k]`, as many rows as a turn may need and some to spare; the experts of a token and layer differ.

    Each is one of some random sets of `top_k` experts, shifted by a random number modulo `experts`.
    """
    generator = np.random.default_rng((shape.seed, 2))
    rows = shape.tokens + _SPARE_ROWS
    sets = np.array([generator.permutation(shape.experts)[: shape.top_k] for _ in range(256)], dtype=np.int32)
    block = np.empty((rows, shape.layers, shape.top_k), dtype=shape.routing_dtype)
    for layer in range(shape.layers):
        chosen = sets[generator.integers(0, len(sets), rows)]
        shift = generator.integers(0, shape.experts, (rows, 1), dtype=np.int32)
        block[:, layer] = (chosen + shift) % shape.experts
    block.flags.writeable = False
    return block
