"""Router replay for clients: finds the routing of samples for the data that train them (docs/tinker.md).

The routing of a token depends on it and on the tokens before it. So a datum gets that of the session's sample with which it has
most tokens in common from the first on, as far as these go. For example, a datum of tokens 1 to 90 of a sample with 100 gets
its first 90 rows. Source: `counterpoint/trainer/model/router_replay.py`.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from counterpoint.service.config import ServiceConfig
from counterpoint.service.tinker.datums import DatumBatch
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.sessions import session_of
from counterpoint.transport.records import Batch, Int32Array, RoutingArray, Turn

SAMPLE_BYTES = 1024
"""The bytes of a sample beside its tokens and its routing."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    key: tuple[bytes, int]
    """Its tokens, big-endian so that they are ordered as bytes are, then a number that makes it unique."""
    begins: int
    """The first sampled token, also of an earlier sample that it goes on from."""
    routed_experts: RoutingArray

    @property
    def nbytes(self) -> int:
        return len(self.key[0]) + self.routed_experts.nbytes + SAMPLE_BYTES

    def rows_for(self, key: bytes) -> int:
        """Returns the number of tokens with its routing, or 0 unless one of them was sampled."""
        mine, other = (np.frombuffer(each, ">i4") for each in (self.key[0], key))
        shorter = min(len(mine), len(other))
        differs = np.flatnonzero(mine[:shorter] != other[:shorter])
        common = int(differs[0]) if differs.size else shorter
        return min(common, len(self.routed_experts), len(other) - 1) if common > self.begins else 0


class Routings:
    """The routing of samples, in at most `most` bytes. The oldest make room. Any thread may call it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.bytes_held = 0
        self._number = 0
        self._sampled: OrderedDict[str, _Sampled] = OrderedDict()
        """By the ids of their sequences, the oldest first."""
        self._sorted: defaultdict[str, list[tuple[bytes, int]]] = defaultdict(list)
        """The keys of each session's samples, ascending: those with most tokens in common are neighbours."""
        self._names: dict[int, str] = {}
        """The ids by the numbers in the keys."""
        self._lock = threading.Lock()

    def note(self, sequence_id: str, prompt: Int32Array, completion: Int32Array, routed_experts: RoutingArray) -> None:
        """Takes a sample. `routed_experts` has a row for each of its tokens but the last. The id begins with its session's."""
        tokens = _key(np.concatenate([prompt, completion]))
        held = routed_experts.copy()  # else all that came with it in a server's answer would be held, and not counted
        with self._lock:
            self._drop(sequence_id)
            ordered = self._sorted[session_of(sequence_id)]
            before = [self._sampled[each] for each in self._beside(ordered, tokens)]
            begins = min([len(prompt), *(each.begins for each in before if each.rows_for(tokens))])
            self._number += 1
            found = _Sampled((tokens, self._number), begins, held)
            ordered.insert(bisect_right(ordered, found.key), found.key)
            self._sampled[sequence_id], self._names[self._number] = found, sequence_id
            self.bytes_held += found.nbytes
            while self.bytes_held > self._most_bytes:
                self._drop(next(iter(self._sampled)))

    def find(self, session_id: str, tokens: npt.NDArray[np.integer], named: Iterable[str] = ()) -> RoutingArray | None:
        """Returns the routing of the first tokens, as many as have one, or None if no sampled token is among them.

        Of equal ones takes that of a sequence in `named`, else that of the newest.
        """
        key = _key(tokens)
        with self._lock:
            own = [each for each in dict.fromkeys(named) if each in self._sampled and session_of(each) == session_id]
            names = own + self._beside(self._sorted.get(session_id, []), key)
            samples = [self._sampled[each] for each in names]
        best = max(samples, key=lambda each: each.rows_for(key), default=None)  # the first of the best
        rows = best.rows_for(key) if best is not None else 0
        return best.routed_experts[:rows] if best is not None and rows else None

    def forget(self, session_id: str) -> None:
        """Drops the samples of a session."""
        with self._lock:
            for _, number in list(self._sorted.get(session_id, [])):
                self._drop(self._names[number])

    def _beside(self, ordered: Sequence[tuple[bytes, int]], key: bytes) -> list[str]:
        """Returns the neighbours of some tokens, the newest of equal ones: none has more tokens in common with them."""
        place = bisect_right(ordered, (key, self._number))
        return [self._names[number] for _, number in (*ordered[max(0, place - 1) : place], *ordered[place : place + 1])]

    def _drop(self, sequence_id: str) -> None:
        if (found := self._sampled.pop(sequence_id, None)) is None:
            return
        session_id = session_of(sequence_id)
        ordered = self._sorted[session_id]
        del ordered[bisect_right(ordered, found.key) - 1]
        if not ordered:
            del self._sorted[session_id]
        del self._names[found.key[1]]
        self.bytes_held -= found.nbytes


class KeyReplay:
    """The routing of one key's samples, for the data that it trains."""

    def __init__(self, config: ServiceConfig, *, has_experts: bool) -> None:
        """Does nothing unless the model has experts."""
        self.routings = Routings(config.routing_bytes)
        self.missed = 0
        """Data with sampled tokens that had no routing."""
        self._is_strict = config.strict_replay
        self._has_experts = has_experts

    async def note(self, sequence_ids: Iterable[str], turns: Iterable[Turn]) -> None:
        """Takes samples of a session. Ignores those without routing, as of a dense model."""

        def note() -> None:
            for sequence_id, turn, routed_experts in routed:
                self.routings.note(sequence_id, turn.prompt_ids, turn.completion_ids, routed_experts)

        routed = [
            (sequence_id, turn, turn.routed_experts)
            for sequence_id, turn in zip(sequence_ids, turns, strict=True)
            if turn.routed_experts is not None
        ]
        if routed:
            await asyncio.to_thread(note)

    def routed(self, asked: DatumBatch, session_id: str) -> Batch:
        """Returns the batch of a contribution with the routing of its tokens.

        Raises `BadRequest` in strict mode if sampled tokens have none.
        """
        batch, offsets = asked.batch, asked.batch.sample_offsets
        if not self._has_experts:
            return batch
        found = [
            self.routings.find(session_id, batch.token_ids_T[start:stop], names)
            for start, stop, names in zip(offsets[:-1], offsets[1:], asked.sequences, strict=True)
        ]
        if any(each is not None for each in found):
            batch = replace(batch, routed_experts=tuple(() if each is None else (each,) for each in found))
        lacking = unrouted(batch, asked.sequences)
        if lacking and self._is_strict:
            raise BadRequest(
                f"datum {lacking[0]} ({len(lacking)} of {len(found)}): no routing is known of all tokens that were sampled, and "
                "tinker.strict_replay is set: they are no sample of this session, or other tokens come before them, or the "
                "routing made room for newer one (tinker.routing_bytes), or the service was started again; sample anew"
            )
        self.missed += len(lacking)
        return batch

    def metrics(self, batch: Batch, named: Sequence[Sequence[str]]) -> dict[str, float]:
        """Returns the metrics of its data's routing for a client, or nothing if the model has no experts."""
        return {"routing/missing:sum": float(len(unrouted(batch, named)))} if self._has_experts else {}


class Replays:
    """The routing of all keys' samples: one key finds nothing of another."""

    def __init__(self, config: ServiceConfig, *, has_experts: bool) -> None:
        """`has_experts`: whether the model is a mixture of experts."""
        self._config = config
        self._has_experts = has_experts
        self._by_owner: dict[str, KeyReplay] = {}

    def of(self, owner: str) -> KeyReplay:
        """Returns the routing of an owner's samples."""
        if owner not in self._by_owner:
            self._by_owner[owner] = KeyReplay(self._config, has_experts=self._has_experts)
        return self._by_owner[owner]

    @property
    def counts(self) -> dict[str, float]:
        """The counts over all keys for the lines about the service's loop."""
        every = self._by_owner.values()
        return {
            "routing_bytes": sum(each.routings.bytes_held for each in every),
            "routing_missing": sum(each.missed for each in every),
        }


def unrouted(batch: Batch, named: Sequence[Sequence[str]]) -> list[int]:
    """Returns the samples of a batch with a sampled token of unknown expert choice.

    Sampled are the tokens with a log-probability or an advantage, and some of a datum that has `named` samples.
    """
    sampled_T = (batch.log_probabilities_T != 0) | (batch.advantages_T != 0)
    offsets, found = batch.sample_offsets, []
    for index in range(len(batch.samples)):
        marked = np.flatnonzero(sampled_T[offsets[index] : offsets[index + 1]])
        routed = sum(map(len, batch.routed_experts[index])) if batch.routed_experts else 0
        if (marked.size and routed < marked[-1]) or (named[index] and not routed):
            found.append(index)
    return found


def _key(tokens: npt.NDArray[np.integer]) -> bytes:
    return tokens.astype(">i4").tobytes()
