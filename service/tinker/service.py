"""What the endpoints act on: the sessions, models and samplers of all clients, beside each other in one process.

Whose key made something, owns it: for another key it is not there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from counterpoint.inference.base import InferenceError
from counterpoint.run.trained import LoraConfig, TrainedRun, TrainingConfig
from counterpoint.service.config import ServiceConfig
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun, RunLost
from counterpoint.service.samplers import Samplers
from counterpoint.service.tasks import Tasks
from counterpoint.service.tinker.datums import BadRequest
from counterpoint.service.tinker.futures import Futures, Result, answer, failure
from counterpoint.service.tinker.models import Model, Request
from counterpoint.service.tinker.sampling import Sample, sample
from counterpoint.service.tinker.store import (
    ModelRecord,
    Position,
    SamplerRecord,
    SavedRecord,
    Session,
    Store,
    encoded,
    run_of,
)
from counterpoint.transport.wires.link import SharedConnection

logger = logging.getLogger(__name__)

ALPHA = 32.0
"""The scale of every adapter: clients give a rank alone."""

CREATE = "create"
"""The last part of the id of a request that creates a model; other ids end with a number."""

SLOT_SECONDS = 10.0
"""How long a run whose service has left it keeps its slot while others wait."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]

WATCH_SECONDS = 5.0
"""The time between two looks for what waits in vain, and for silent sessions."""

SILENT_SECONDS = 120.0
"""The silence after which a session's runs leave the trainer's slots once others wait; the SDK sends a heartbeat each 10 s. They
come back with its next request."""

NO_UNEMBEDDING = (
    "the servers take no adapter of the output embedding, so nothing trains one: train_unembed counts as false"
)
"""What every session is told at its start."""


class NotFound(LookupError):
    """There is no such thing, or it is another client's."""


class Gone(LookupError):
    """The session has ended."""


class LoraRequest(msgspec.Struct, frozen=True):
    """`lora_config` of `create_model`."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerRequest(msgspec.Struct, frozen=True):
    """`optimizer_config`."""

    type: str = "adamw"


class CreateModel(msgspec.Struct, frozen=True):
    """The body of `create_model`."""

    session_id: str
    model_seq_id: Position
    base_model: str
    lora_config: LoraRequest | None = None
    optimizer_config: OptimizerRequest = OptimizerRequest()
    user_metadata: dict[str, Any] | None = None


class LoadWeights(msgspec.Struct, frozen=True):
    """The body of `load_weights`, by which a model is created from saved weights."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: Position | None = None
    base_model: str | None = None
    optimizer_config: OptimizerRequest | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSampler(msgspec.Struct, frozen=True):
    """The body of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: Position
    base_model: str | None = None
    model_path: str | None = None


class Service:
    """All that clients have here."""

    def __init__(
        self,
        config: ServiceConfig,
        store: Store,
        connection: SharedConnection,
        samplers: Samplers,
        vocabulary: int | None,
    ) -> None:
        """Has no client yet; `start` takes up what the store has."""
        self.config = config
        self.store = store
        self.futures = Futures(config.max_pending, config.result_bytes)
        self.names = {re.sub(r":peft:.*", "", name) for name in (config.name, config.model, *config.models) if name}
        """The names of the model for clients."""
        self._connection = connection
        self._samplers = samplers
        self._vocabulary = vocabulary
        self._models: dict[str, Model] = {}
        self._seen: dict[str, float] = {}
        """When each session was last heard of."""
        self._opening = asyncio.Lock()
        self._tasks = Tasks("the service")

    async def start(self) -> None:
        """Takes up the models of the store. One whose journal cannot be read stays away, and the log says why."""
        for record in await asyncio.to_thread(self.store.models):
            session = await asyncio.to_thread(self.store.session, _session_of(record.model_id))
            if session is not None and not session.finished:
                try:
                    await self._open(record)
                except (OSError, ValueError, msgspec.MsgspecError):
                    logger.exception("model %s cannot be taken up; the others are", record.model_id)
        self._tasks.spawn(self._watch())

    async def close(self) -> None:
        """Ends everything here; runs stay at the trainer."""
        await self._tasks.cancel()
        await asyncio.gather(*(model.close() for model in self._models.values()))
        self.futures.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            before = time.monotonic() - SILENT_SECONDS
            for model_id, model in list(self._models.items()):
                await model.fail_overdue()
                if self._seen.setdefault(_session_of(model_id), time.monotonic()) < before:
                    logger.info("session %s is silent: model %s may leave its slot", _session_of(model_id), model_id)
                    await self._models.pop(model_id).close()

    def _in_background(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> str:
        """Begins work whose result is fetched under an id, unless it was begun. Raises `TooMany`."""
        if self.futures.begin(request_id):
            self._tasks.spawn(self._complete(request_id, work))
        return request_id

    async def _complete(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> None:
        try:
            result = await work()
        except BadRequest as error:
            result = failure(str(error))
        except (NotFound, Gone) as error:
            result = failure(str(error))
        except (RunLost, InferenceError, OSError, ValueError, ExceptionGroup) as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            result = failure(str(first), "user" if isinstance(first, BadRequest) else "server")
        await self.futures.complete(request_id, result)

    # --- sessions ---

    async def create_session(self, owner: str) -> Session:
        """Begins a session."""
        session = Session(f"s{secrets.token_hex(8)}", owner)
        await asyncio.to_thread(self.store.write, session)
        return session

    async def session(self, session_id: str, owner: str) -> Session:
        """Returns a session. Raises `NotFound` and `Gone`."""
        found = await asyncio.to_thread(self.store.session, session_id)
        if found is None or found.owner != owner:
            raise NotFound(f"there is no session {session_id[:80]!r}")
        if found.finished:
            raise Gone(f"session {session_id} has ended")
        self._seen[session_id] = time.monotonic()
        return found

    async def finish_session(self, session_id: str, owner: str) -> None:
        """Ends a session: its runs leave the trainer's slots once others wait for them. Raises as `session`."""
        found = await self.session(session_id, owner)
        await asyncio.to_thread(self.store.write, Session(found.session_id, found.owner, finished=True))
        for model_id in [each for each in self._models if _session_of(each) == session_id]:
            await self._models.pop(model_id).close()
        self._seen.pop(session_id, None)

    # --- models ---

    async def model(self, model_id: str, owner: str) -> Model:
        """Returns a model, also of a session that was silent. Raises `NotFound` and `Gone`."""
        await self.session(_session_of(model_id), owner)
        async with self._opening:
            if model_id not in self._models:
                record = await asyncio.to_thread(self.store.model, model_id)
                if record is None:
                    raise NotFound(f"there is no model {model_id[:80]!r}")
                await self._open(record)
            return self._models[model_id]

    async def retrieve(self, request_id: str, owner: str, seconds: float) -> Result | None:
        """Returns the result of a request; None if there is none after `seconds`.

        Raises `NotFound`, and `KeyError` for a result that is not kept.
        """
        session = await asyncio.to_thread(self.store.session, _session_of(request_id))
        if session is None or session.owner != owner:
            raise NotFound(f"there is no request {request_id[:120]!r}")
        model_id, _, last = request_id.rpartition(":")
        if not (session.finished or self.futures.knows(request_id)):
            record = await asyncio.to_thread(self.store.model, model_id)
            if record is not None and last == CREATE:  # the service was started again meanwhile
                self._in_background(request_id, lambda: self._create(record))
            elif record is not None:
                await self.model(model_id, owner)
        return await self.futures.fetch(request_id, seconds)

    async def create_model(self, asked: CreateModel, owner: str) -> str:
        """Begins a model; returns the id of the request. Raises `BadRequest`, `NotFound`, `Gone` and `TooMany`."""
        session = await self.session(asked.session_id, owner)
        self.check_base(asked.base_model)
        lora = asked.lora_config
        if lora is None:
            raise BadRequest("lora_config is required: only adapters are trained")
        if not 1 <= lora.rank <= self.config.max_rank:
            raise BadRequest(f"lora_config.rank = {lora.rank}; expected 1 to {self.config.max_rank}")
        if lora.seed is not None:
            raise BadRequest("lora_config.seed is not served: every adapter begins with the job's seed; leave it out")
        modules = (ATTENTION if lora.train_attn else []) + (FEED_FORWARD if lora.train_mlp else [])
        if not modules:
            raise BadRequest("lora_config: neither train_attn nor train_mlp is true, so nothing would be trained")
        _check_optimizer(asked.optimizer_config)
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"
        record = ModelRecord(model_id, run_of(model_id), owner, lora.rank, modules, user_metadata=asked.user_metadata)
        return self._begin_model(record)

    async def load_weights(self, asked: LoadWeights, owner: str) -> str:
        """Begins a model with a saved state; returns the id of the request. Raises as `create_model`."""
        if asked.session_id is None or asked.model_seq_id is None:
            raise BadRequest(
                "load_weights creates a model, by session_id and model_seq_id; a model that exists is not loaded into"
            )
        session = await self.session(asked.session_id, owner)
        if asked.base_model is not None:
            self.check_base(asked.base_model)
        if asked.optimizer_config is not None:
            _check_optimizer(asked.optimizer_config)
        saved = await self.saved(asked.path, owner)
        if saved.kind != "weights":
            raise BadRequest(f"{asked.path} has weights for samplers, without an optimizer; expected one of save_state")
        source = await asyncio.to_thread(self.store.model, saved.model_id)
        assert source is not None
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"
        start = (source.run_id, saved.step) if saved.step else (source.start_run, source.start_step)
        record = ModelRecord(
            model_id, run_of(model_id), owner, source.rank, source.target_modules, *start,
            asked.optimizer, asked.user_metadata or source.user_metadata, "load_weights",
        )  # fmt: skip
        return self._begin_model(record)

    def _begin_model(self, record: ModelRecord) -> str:
        encoded(record)  # a record that is too long is refused now
        return self._in_background(f"{record.model_id}:{CREATE}", lambda: self._create(record))

    async def _create(self, record: ModelRecord) -> Result:
        async with self._opening:
            if record.model_id not in self._models:
                former = await asyncio.to_thread(self.store.model, record.model_id)
                if former is not None and former != record:
                    raise BadRequest(f"model {record.model_id} is there already, and was made otherwise")
                await asyncio.to_thread(self.store.write, record)
                await self._open(record)
            run = self._models[record.model_id].run
        await run.admitted()
        return answer(model_id=record.model_id, type=record.created_by)

    async def _open(self, record: ModelRecord) -> None:
        lora = LoraConfig(rank=record.rank, alpha=ALPHA, target_modules=record.target_modules)
        interval = self.config.checkpoint_interval
        described = TrainedRun(
            run_id=record.run_id,
            training=TrainingConfig(lora=lora, start_from=record.start, checkpoint_interval=interval),
            trainer_timeout_seconds=SLOT_SECONDS,
            driven=True,
        )

        def opened() -> tuple[Journal, DrivenRun]:
            directory = self.store.run_directory(record.run_id) / "items"
            journal = Journal(directory, record.run_id, self.config.transport.largest_batch)
            return journal, DrivenRun(described, self.config.output_dir, self._connection, journal)

        journal, run = await asyncio.to_thread(opened)
        model = Model(
            record, run, journal, self.store, self.futures, self._samplers, self.config.max_tokens, self._vocabulary
        )
        try:
            await model.start()
        except BaseException:  # it must not be found half begun
            await model.close()
            raise
        self._models[record.model_id] = model

    def check_base(self, name: str) -> None:
        """Raises `BadRequest` unless the job's model has this name; a variant may follow it, as in `NAME:peft:262144`."""
        if re.sub(r":peft:.*", "", name) not in self.names:
            raise BadRequest(f"base_model = {name[:120]!r} is not served; expected {', '.join(sorted(self.names))}")

    async def offer(self, kind: str, model_id: str, seq_id: int, body: bytes, owner: str) -> str:
        """Takes a request of a model; returns its id. Raises `NotFound`, `Gone`, `TooMany` and `ValueError`."""
        return (await self.model(model_id, owner)).offer(Request(kind, seq_id, body))

    # --- weights and samplers ---

    async def saved(self, path: str, owner: str) -> SavedRecord:
        """Returns what a URI names. Raises `NotFound`."""
        found = await asyncio.to_thread(self.store.saved, path)
        session = None
        if found is not None:
            session = await asyncio.to_thread(self.store.session, _session_of(found.model_id))
        if found is None or session is None or session.owner != owner:
            raise NotFound(f"there are no weights {path[:120]!r}")
        return found

    async def create_sampler(self, asked: CreateSampler, owner: str) -> SamplerRecord:
        """Makes a sampler, whose adapter every server then has. Raises `BadRequest`, `NotFound`, `Gone`, `InferenceError`."""
        session = await self.session(asked.session_id, owner)
        sampler_id = f"{session.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            saved = await self.saved(asked.model_path, owner)
            if saved.kind != "sampler_weights":
                raise BadRequest(
                    f"{asked.model_path} is a state for training; expected one of save_weights_for_sampler"
                )
            published = saved.directory.rpartition("/")[2]
            record = SamplerRecord(
                sampler_id, owner, f"{run_of(saved.model_id)}.{published}", saved.directory, saved.path
            )
        elif asked.base_model is not None:
            self.check_base(asked.base_model)
            record = SamplerRecord(sampler_id, owner)
        else:
            raise BadRequest("neither base_model nor model_path is given")
        await asyncio.to_thread(self.store.write, record)
        return record

    async def sampler(self, sampler_id: str, owner: str) -> SamplerRecord:
        """Returns a sampler. Raises `NotFound`."""
        found = await asyncio.to_thread(self.store.sampler, sampler_id)
        if found is None or found.owner != owner:
            raise NotFound(f"there is no sampler {sampler_id[:80]!r}")
        return found

    async def sample(self, asked: Sample, owner: str) -> tuple[str, list[str]]:
        """Begins samples; returns the id of the request and one for each sample. Raises `NotFound` and `TooMany`."""
        sampler = await self.sampler(asked.sampling_session_id, owner)
        request_id = f"{sampler.sampler_id}:{asked.seq_id}"

        async def work() -> Result:
            body = await sample(self._samplers, sampler, asked, self.config.max_tokens)
            return Result(body, is_protobuf=True)

        self._in_background(request_id, work)
        return request_id, [f"{request_id}:{index}" for index in range(max(0, min(asked.num_samples, 1024)))]


def _session_of(any_id: str) -> str:
    return any_id.partition(":")[0]


def _check_optimizer(asked: OptimizerRequest) -> None:
    if asked.type != "adamw":
        raise BadRequest(f"optimizer {asked.type!r} is not served; expected adamw")
