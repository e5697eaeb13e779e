"""The samplers: the base model and published adapters at the job's servers, each proven before it answers.

Once the servers hold as many adapters as they can, an unused one makes room for another, and is loaded again from its directory
on the next request for it: no sampler ends because others were made. If keys want more than there is room for, one with fewer
adapters gets that of one with more, once its calls have ended. `Metered` are the calls of one request of a key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from counterpoint.inference.base import InferenceError, Probe, SamplingParameters, WeightUpdate
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.model_facts import AnswerBounds
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.service.records.ledger import Used
from counterpoint.service.shared_calls import SharedCalls
from counterpoint.transport.records import Float32Array, Int32Array, Turn


@dataclass(slots=True)
class _Loaded:
    served: Served
    ready: asyncio.Task[None]
    key: str
    """The key that owns it."""
    users: int = 0
    leaves: bool = False
    """It gets no further call, and makes room for another key's once its calls have ended."""


class Samplers:
    """The weights that the servers hold for this service."""

    def __init__(
        self, pool: InferencePool, model: str, bounds: AnswerBounds, most: int, claim: LoadClaim, *, alone: bool = True
    ) -> None:
        """Samples from `model`, and from at most `most` adapters of it at once, which `claim` owns at the servers.

        `alone`: one key asks them, or none.
        """
        self.calls = SharedCalls(alone=alone)
        self._pool = pool
        self._bounds = bounds
        self._most = most
        self._claim = claim
        self._base = pool.model(model, self.calls.resize, bounds=bounds)
        self._loaded: OrderedDict[tuple[str, Path], _Loaded] = OrderedDict()
        self._room = asyncio.Condition()
        self._wanting = Counter[str]()
        """The number of each key's calls that wait for room for an adapter."""
        self._given, self._numbers = dict[str, int](), count(1)
        """When each key got room last, as an ascending number."""

    @property
    def parser(self) -> Served:
        """The name of weights for parsing completions: any server parses those of any weights."""
        return self._base

    async def start(self) -> None:
        """Returns when the first server serves the base model. Raises `InferenceError`."""
        await self._base.start()

    async def close(self) -> None:
        """Gives up all weights."""
        for each in self._loaded.values():
            each.ready.cancel()
            await asyncio.gather(each.ready, return_exceptions=True)
            await each.served.release()
        self._loaded.clear()
        await self._base.release()

    async def load(self, name: str, directory: Path, key: str = "") -> None:
        """Returns once every server has a key's adapter in `directory`, proven.

        Raises `InferenceError`, `OSError`, `ValueError`.
        """
        async with self._using(name, directory, key):
            pass

    async def sample(
        self,
        adapter: tuple[str, Path] | None,
        prompt: Int32Array,
        sampling: SamplingParameters,
        affinity: str,
        key: str = "",
        on_cut: Callable[[int], None] | None = None,
    ) -> Turn:
        """Returns a completion by an adapter, its name and directory, or by the base model, for a key. Raises as `load`.

        `on_cut` is as of `GenerateRequest`.
        """
        if adapter is None:
            return await self._base.generate(prompt, sampling, affinity=affinity, on_cut=on_cut)
        async with self._using(*adapter, key) as served:
            return await served.generate(prompt, sampling, affinity=affinity, on_cut=on_cut)

    def forget(self, adapter: tuple[str, Path] | None, affinity: str) -> None:
        """Forgets the servers of a request's samples, once all have ended."""
        loaded = None if adapter is None else self._loaded.get(adapter)
        if adapter is None or loaded is not None:
            (self._base if loaded is None else loaded.served).forget_group(affinity)

    async def score(self, tokens: Int32Array, start: int, affinity: str) -> Float32Array:
        """Returns the log-probability of each token from `start` on, at least 1, by the base model. Raises `InferenceError`."""
        return await self._base.score(tokens, start, affinity=affinity)

    @asynccontextmanager
    async def _using(self, name: str, directory: Path, key: str) -> AsyncIterator[Served]:
        place = (name, directory)
        loaded = self._loaded.get(place)
        if loaded is None or loaded.leaves:
            loaded = await self._make(place, key)
        else:
            loaded.users += 1
        self._loaded.move_to_end(place)
        try:
            try:
                await asyncio.shield(loaded.ready)
            except (Exception, asyncio.CancelledError):
                if _has_failed(loaded.ready) and self._loaded.get(place) is loaded:  # the next request tries again
                    del self._loaded[place]
                    await loaded.served.release()
                if loaded.ready.cancelled():
                    raise InferenceError(f"the load of {name} was ended; ask again") from None
                raise
            yield loaded.served
        finally:
            loaded.users -= 1
            async with self._room:
                self._room.notify_all()

    async def _make(self, place: tuple[str, Path], key: str) -> _Loaded:
        """Returns an adapter with one user more, loaded once there is room."""
        async with self._room:
            self._wanting[key] += 1
            try:
                while (there := self._loaded.get(place)) is None or there.leaves:
                    if there is None and len(self._loaded) < self._most and self._is_next(key):
                        served = self._pool.model(
                            place[0], bounds=self._bounds, claim=self._claim, called="a sampler's adapter at"
                        )
                        load = asyncio.create_task(_load(served, *place), name=f"load of {place[0]}")
                        self._loaded[place] = _Loaded(served, load, key)
                        self._given[key] = next(self._numbers)
                    elif (idle := self._idle()) is not None:
                        await self._loaded.pop(idle).served.release()
                        self._room.notify_all()
                    else:
                        self._ask_to_leave(key)
                        await self._room.wait()
                there.users += 1
                return there
            finally:
                self._wanting[key] -= 1
                self._room.notify_all()

    def _held(self, key: str) -> int:
        """Returns the number of a key's adapters that stay."""
        return sum(each.key == key and not each.leaves for each in self._loaded.values())

    def _is_next(self, key: str) -> bool:
        """Whether the key gets the next room: of those that want any, that with the fewest adapters, then the least recent."""
        wanting = [each for each, count in self._wanting.items() if count]
        return min(wanting, key=lambda each: (self._held(each), self._given.get(each, 0))) == key

    def _idle(self) -> tuple[str, Path] | None:
        """Returns an adapter without calls: one that leaves, or the least recently used if there is no room."""
        idle = [place for place, each in self._loaded.items() if not each.users]
        leaving = next((place for place in idle if self._loaded[place].leaves), None)
        return leaving or (idle[0] if idle and len(self._loaded) >= self._most else None)

    def _ask_to_leave(self, key: str) -> None:
        """Has an adapter of a key with the most leave, unless one does already, or this key has as many."""
        if any(each.leaves for each in self._loaded.values()):
            return
        most = max(self._loaded.values(), key=lambda each: self._held(each.key), default=None)
        if most is not None and self._held(most.key) > self._held(key):
            most.leaves = True


class Metered:
    """The calls of one request at the servers, each begun once its key has a place."""

    def __init__(self, samplers: Samplers, key: str) -> None:
        """Asks `samplers` for `key`."""
        self.used = Used()
        """The tokens used so far."""
        self._samplers = samplers
        self._key = key
        self._prompts = set[bytes]()
        self._groups: dict[tuple[tuple[str, Path] | None, str], str] = {}
        """One affinity of each group of samples, by adapter and group."""

    async def turns(
        self,
        adapter: tuple[str, Path] | None,
        asked: Iterable[tuple[Int32Array, SamplingParameters, str]],
        *,
        within_prompt: bool = False,
    ) -> list[Turn]:
        """Returns a completion for each prompt, sampling and affinity. Raises as `Samplers.sample`, in an `ExceptionGroup`.

        `within_prompt`: the prompts are parts of one that counts already.
        """

        async def sample(prompt: Int32Array, sampling: SamplingParameters, affinity: str) -> Turn:
            self._groups.setdefault((adapter, affinity.rpartition("-")[0]), affinity)
            if not within_prompt and (name := prompt.tobytes()) not in self._prompts:
                self._prompts.add(name)
                self.used.prompt += len(prompt)
            turn = await self._samplers.sample(adapter, prompt, sampling, affinity, self._key, self._sampled)
            self._sampled(len(turn.completion_ids))
            return turn

        works = ((len(each[0]) + each[1].max_tokens, partial(sample, *each)) for each in asked)
        return await self._samplers.calls.gathered(
            self._key, works, lambda turn: len(turn.prompt_ids) + len(turn.completion_ids)
        )

    def end(self) -> None:
        """Forgets the servers with the request's prompts."""
        for (adapter, _), affinity in self._groups.items():
            self._samplers.forget(adapter, affinity)

    def _sampled(self, tokens: int) -> None:
        self.used.sampled += tokens

    async def scores(self, asked: Sequence[tuple[Int32Array, int, str]]) -> list[Float32Array]:
        """Returns the results of `Samplers.score` for each of these. Raises its errors, in an `ExceptionGroup`."""
        works = ((len(each[0]), partial(self._samplers.score, *each)) for each in asked)
        return await self._samplers.calls.gathered(self._key, works, len)


def _has_failed(load: asyncio.Task[None]) -> bool:
    return load.done() and (load.cancelled() or load.exception() is not None)


async def _load(served: Served, name: str, directory: Path) -> None:
    probe = await asyncio.to_thread(Probe.read, directory / "probe.json")
    await served.start()
    await served.update(WeightUpdate(probe.version, directory, probe, name))


def affinity(session: str, seq_id: int, index: int) -> str:
    """Returns the name of a request's sample. All but the first find their prompt at the first one's server."""
    return f"{session}.{seq_id}-{index}"
