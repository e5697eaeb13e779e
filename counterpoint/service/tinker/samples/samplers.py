"""The samplers of all clients: their weights, their clients, and the samples in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from counterpoint.inference.base import InferenceError
from counterpoint.service.records.structs import SamplerRecord, encoded
from counterpoint.service.samplers import Metered
from counterpoint.service.tinker.bodies import CreateSampler
from counterpoint.service.tinker.context import ServiceContext
from counterpoint.service.tinker.futures import FutureResult, failure
from counterpoint.service.tinker.models import NEWEST, ClientModel
from counterpoint.service.tinker.refusals import BadRequest, Gone, NoSuchThing
from counterpoint.service.tinker.samples.sampling import MOST_SAMPLES, SampleRequest, most_used, sample
from counterpoint.service.tinker.sessions import session_of
from counterpoint.transport.records import Float32Array, Int32Array


class ClientSamplers:
    """The samplers that clients have made."""

    def __init__(self, context: ServiceContext, model: Callable[[str, str], Awaitable[ClientModel]]) -> None:
        """`model` returns a model of an owner."""
        self._context = context
        self._store = context.store
        self._sessions = context.sessions
        self._model = model
        self._joining = asyncio.Lock()
        self._sampling: dict[str, asyncio.Task[None]] = {}
        """The samples in progress, by the ids of their requests."""

    async def create(self, asked: CreateSampler, owner: str) -> SamplerRecord:
        """Makes a sampler, with its adapter at every server. Raises `BadRequest`, `NoSuchThing`, `Gone`, `InferenceError`."""
        session = await self._sessions.live(asked.session_id, owner)
        sampler_id = f"{session.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            saved = await self._context.weights.named(asked.model_path, owner)
            if saved.kind != "sampler_weights":
                raise BadRequest(
                    f"{asked.model_path} is a state for training; expected one of save_weights_for_sampler"
                )
            record = SamplerRecord(
                sampler_id,
                owner,
                await self._context.weights.adapter_of(saved),
                saved.directory,
                saved.path,
                saved.model_id,
                saved.step,
            )
        elif asked.base_model is not None:
            self._context.check_base(asked.base_model)
            record = SamplerRecord(sampler_id, owner)
        else:
            raise BadRequest("neither base_model nor model_path is given")
        is_new = await asyncio.to_thread(self._store.sampler, sampler_id) is None
        with self._context.tenants.writing(owner, len(encoded(record)) * is_new):
            await asyncio.to_thread(self._store.write, record)
        return record

    async def join(self, sampler_id: str, owner: str) -> int:
        """Returns a number for one more client of a sampler, from 1. Raises `NoSuchThing` and `Gone`."""
        async with self._joining:
            sampler = await self.named(sampler_id, owner)
            await self._sessions.live(session_of(sampler_id), owner)
            joined = msgspec.structs.replace(sampler, clones=sampler.clones + 1)
            await asyncio.to_thread(self._store.write, joined)
            return joined.clones

    async def named(self, sampler_id: str, owner: str) -> SamplerRecord:
        """Returns a sampler. Raises `NoSuchThing`."""
        found = await asyncio.to_thread(self._store.sampler, sampler_id)
        if found is None or found.owner != owner:
            raise NoSuchThing(f"there is no sampler {sampler_id[:80]!r}")
        return found

    async def sample(self, asked: SampleRequest, owner: str) -> tuple[str, list[str]]:
        """Begins samples, and returns the id of the request and one for each sample.

        Raises `NoSuchThing`, `Gone`, `TooMany`, and `OverQuota` for one that had not begun before.
        """
        await self._sessions.live(session_of(asked.sampling_session_id), owner)
        sampler = await self.named(asked.sampling_session_id, owner)
        request_id = f"{sampler.sampler_id}:{asked.seq_id}"
        is_new, tokens = (
            not self._context.results.of(owner).knows(request_id),
            most_used(asked, self._context.config.max_tokens),
        )
        if is_new:
            self._context.tenants.check_tokens(owner, tokens)

        async def work() -> FutureResult:
            servers = Metered(self._context.servers, owner)
            try:
                return FutureResult(await self._sampled(servers, sampler, asked), is_protobuf=True)
            finally:  # also the use of a cancelled or failed request
                servers.end()
                if servers.used.tokens:
                    self._store.ledger.owe(owner, request_id, servers.used)

        if (task := self._context.results.begin(request_id, owner, work)) is not None:
            self._context.tenants.reserve_tokens(owner, request_id, tokens)
            self._sampling[request_id] = task
            task.add_done_callback(lambda _: self._sampling.pop(request_id, None))
        return request_id, _sequence_ids(sampler, asked)

    async def cancel(self, request_id: str, owner: str) -> None:
        """Ends samples in progress, also at the servers. Raises `NoSuchThing`."""
        await self._sessions.any(session_of(request_id), owner)
        if (task := self._sampling.pop(request_id, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._context.results.of(owner).complete(request_id, failure("its client has cancelled it"))

    async def cancel_all(self, session_id: str, owner: str) -> None:
        """Ends a session's samples in progress. Raises `NoSuchThing`."""
        own = [each for each in self._sampling if session_of(each) == session_id]
        await asyncio.gather(*(self.cancel(each, owner) for each in own))

    async def _sampled(self, servers: Metered, sampler: SamplerRecord, asked: SampleRequest) -> bytes:
        while sampler.follows:
            target = await asyncio.to_thread(self._store.saved, f"tinker://{sampler.follows}/inflight/{NEWEST}")
            if target is None:
                raise Gone(f"the weights of sampler {sampler.sampler_id} have ended with their session")
            adapter = await self._context.weights.adapter_of(target)
            now = msgspec.structs.replace(
                sampler, adapter=adapter, directory=target.directory, model_id=target.model_id, step=target.step
            )
            try:
                return await self._sampled_by(servers, now, asked)
            except (InferenceError, OSError, ExceptionGroup):  # newer weights may have taken their place meanwhile
                if await asyncio.to_thread(self._store.saved, target.path) == target:
                    raise
        return await self._sampled_by(servers, sampler, asked)

    async def _sampled_by(self, servers: Metered, sampler: SamplerRecord, asked: SampleRequest) -> bytes:
        async def score(prompt: Int32Array, targets: Int32Array | None) -> Float32Array:
            return await (await self._model(sampler.model_id, sampler.owner)).score(prompt, sampler.step, targets)

        response, turns = await sample(servers, sampler, asked, self._context.config.max_tokens, score)
        await self._context.replays.of(sampler.owner).note(_sequence_ids(sampler, asked), turns)
        return response


def _sequence_ids(sampler: SamplerRecord, asked: SampleRequest) -> list[str]:
    count = max(0, min(asked.num_samples, MOST_SAMPLES))
    return [f"{sampler.sampler_id}:{asked.seq_id}:{index}" for index in range(count)]
