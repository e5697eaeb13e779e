"""The samplers: the base model and published adapters at the job's servers, each proven before it answers.

An adapter that nobody samples from makes room for another once the servers hold as many as they can, and is loaded again from its
directory when it is asked for: no sampler ends because others were made. `Metered` are the calls of one request of a key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from counterpoint.inference.base import InferenceError, Probe, SamplingParameters, WeightUpdate
from counterpoint.inference.loads import Claim
from counterpoint.inference.model_facts import AnswerBounds
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.service.ledger import Used
from counterpoint.service.shared_calls import SharedCalls
from counterpoint.transport.records import Float32Array, Int32Array, Turn


@dataclass(slots=True)
class _Loaded:
    served: Served
    ready: asyncio.Task[None]
    users: int = 0


class Samplers:
    """What the servers hold for this service."""

    def __init__(
        self, pool: InferencePool, model: str, bounds: AnswerBounds, most: int, claim: Claim, *, alone: bool = True
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

    @property
    def parser(self) -> Served:
        """What parses completions: any server does, whatever weights they are of."""
        return self._base

    async def start(self) -> None:
        """Returns when the first server serves the base model. Raises `InferenceError`."""
        await self._base.start()

    async def close(self) -> None:
        """Gives everything up."""
        for each in self._loaded.values():
            each.ready.cancel()
            await asyncio.gather(each.ready, return_exceptions=True)
            await each.served.release()
        self._loaded.clear()
        await self._base.release()

    async def load(self, name: str, directory: Path) -> None:
        """Returns once every server has the adapter in `directory`, proven. Raises `InferenceError`, `OSError`, `ValueError`."""
        async with self._using(name, directory):
            pass

    async def sample(
        self, adapter: tuple[str, Path] | None, prompt: Int32Array, sampling: SamplingParameters, affinity: str
    ) -> Turn:
        """Returns a completion by an adapter, its name and directory, or by the base model. Raises as `load`."""
        if adapter is None:
            return await self._base.generate(prompt, sampling, affinity=affinity)
        async with self._using(*adapter) as served:
            return await served.generate(prompt, sampling, affinity=affinity)

    async def score(self, tokens: Int32Array, start: int, affinity: str) -> Float32Array:
        """Returns the log-probability of each token from `start` on, at least 1, by the base model. Raises `InferenceError`."""
        return await self._base.score(tokens, start, affinity=affinity)

    @asynccontextmanager
    async def _using(self, name: str, directory: Path) -> AsyncIterator[Served]:
        key = (name, directory)
        loaded = self._loaded.get(key) or await self._make(key)
        self._loaded.move_to_end(key)
        loaded.users += 1
        try:
            try:
                await asyncio.shield(loaded.ready)
            except (Exception, asyncio.CancelledError):
                if loaded.ready.done() and self._loaded.get(key) is loaded:  # the next request tries again
                    del self._loaded[key]
                    await loaded.served.release()
                if loaded.ready.cancelled():
                    raise InferenceError(f"the load of {name} was ended; ask again") from None
                raise
            yield loaded.served
        finally:
            loaded.users -= 1
            async with self._room:
                self._room.notify_all()

    async def _make(self, key: tuple[str, Path]) -> _Loaded:
        async with self._room:
            while key not in self._loaded and len(self._loaded) >= self._most:
                idle = next((each for each, loaded in self._loaded.items() if not loaded.users), None)
                if idle is None:
                    await self._room.wait()
                else:
                    await self._loaded.pop(idle).served.release()
            if key not in self._loaded:
                served = self._pool.model(
                    key[0], bounds=self._bounds, claim=self._claim, called="a sampler's adapter at"
                )
                self._loaded[key] = _Loaded(served, asyncio.create_task(_load(served, *key), name=f"load of {key[0]}"))
            return self._loaded[key]


class Metered:
    """The calls of one request at the servers, each begun once its key has a place."""

    def __init__(self, samplers: Samplers, key: str) -> None:
        """Asks `samplers` for `key`."""
        self.used = Used()
        """What has been done so far."""
        self._samplers = samplers
        self._key = key
        self._prompts = set[bytes]()

    async def turns(
        self,
        adapter: tuple[str, Path] | None,
        asked: Sequence[tuple[Int32Array, SamplingParameters, str]],
        *,
        within_prompt: bool = False,
    ) -> list[Turn]:
        """Returns a completion for each prompt, sampling and affinity. Raises as `Samplers.sample`, in an `ExceptionGroup`.

        `within_prompt`: the prompts are parts of one that counts already.
        """

        async def sample(prompt: Int32Array, sampling: SamplingParameters, affinity: str) -> Turn:
            if not within_prompt and (name := prompt.tobytes()) not in self._prompts:
                self._prompts.add(name)
                self.used.prompt += len(prompt)
            turn = await self._samplers.sample(adapter, prompt, sampling, affinity)
            self.used.sampled += len(turn.completion_ids)
            return turn

        works = ((len(each[0]) + each[1].max_tokens, partial(sample, *each)) for each in asked)
        return await self._samplers.calls.gathered(
            self._key, works, lambda turn: len(turn.prompt_ids) + len(turn.completion_ids)
        )

    async def scores(self, asked: Sequence[tuple[Int32Array, int, str]]) -> list[Float32Array]:
        """Returns what `Samplers.score` does of each of these. Raises as it does, in an `ExceptionGroup`."""
        works = ((len(each[0]), partial(self._samplers.score, *each)) for each in asked)
        return await self._samplers.calls.gathered(self._key, works, len)


async def _load(served: Served, name: str, directory: Path) -> None:
    probe = await asyncio.to_thread(Probe.read, directory / "probe.json")
    await served.start()
    await served.update(WeightUpdate(probe.version, directory, probe, name))


def affinities(session: str, seq_id: int, count: int) -> Sequence[str]:
    """Returns names for the samples of one request, of which all but the first find their prompt at the first one's server."""
    return [f"{session}.{seq_id}-{index}" for index in range(count)]
