"""The sessions, models and samplers of all clients, beside each other in one process, for the endpoints.

A key owns whatever it has made: for another key it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from counterpoint.environments.chat import Chat
from counterpoint.run.loss_graph import read_graph
from counterpoint.run.trained import LoraConfig, TrainedRun, TrainingConfig
from counterpoint.service.config import ServiceConfig
from counterpoint.service.journal import Journal
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import LossRecord, ModelRecord, SessionRecord, encoded, run_of
from counterpoint.service.runs import DrivenRun
from counterpoint.service.samplers import Samplers
from counterpoint.service.tinker.bodies import (
    CreateLoss,
    CreateModel,
    CreateSession,
    LoadWeights,
    OptimizerRequest,
)
from counterpoint.service.tinker.context import ServiceContext
from counterpoint.service.tinker.futures import FutureResult, answer
from counterpoint.service.tinker.intake import Intake
from counterpoint.service.tinker.models import SAVES, ClientModel, Request
from counterpoint.service.tinker.refusals import BadRequest, NoSuchThing, NotServed, OverQuota
from counterpoint.service.tinker.samples.samplers import ClientSamplers
from counterpoint.service.tinker.sessions import session_of
from counterpoint.service.tinker.tenants import check_project
from counterpoint.service.tinker.weights.imports import imported
from counterpoint.service.tinker.weights.retention import sweep
from counterpoint.transport.wires.link import SharedConnection

logger = logging.getLogger(__name__)

CREATE, UNLOAD = "create", "unload"
"""The last parts of the ids of requests that create or unload a model. Other ids end with a number."""

SLOT_SECONDS = 10.0
"""Seconds that a run keeps its slot without its service while others wait."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]

SWEEP_SECONDS = 60.0
"""The time between two looks for weights that have expired, or that nothing needs any more."""

LAPSED_SECONDS = 86_400.0
"""The silence after which a session's samplers hold no deleted weights on the disk."""

ABANDONED_SECONDS = 7 * 86_400.0
"""The silence after which a session ends, across new starts of the service."""

OPENED_AT_ONCE = 8
"""Models opened beside each other at the start."""

MOST_FORMER = 1000
"""Closed models with known updates."""

WATCH_SECONDS = 5.0
"""The time between two looks for requests that wait in vain, and for silent sessions."""

SILENT_SECONDS = 120.0
"""The silence after which a session's runs leave the trainer's slots once others wait. The SDK sends a heartbeat each 10 s.
They come back with its next request."""

NO_UNEMBEDDING = (
    "the servers take no adapter of the output embedding, so nothing trains one: train_unembed counts as false"
)
"""A note for every session at its start."""


class Service(ServiceContext):
    """All models of clients, over the shared context."""

    def __init__(
        self,
        config: ServiceConfig,
        store: RecordStore,
        connection: SharedConnection,
        servers: Samplers,
        vocabulary: int | None,
        keys: Mapping[bytes, str],
        chat: Chat | None = None,
        *,
        has_experts: bool = False,
    ) -> None:
        """Has no client yet. `start` takes up the store. `chat` is None for a model without a chat template."""
        super().__init__(config, store, servers, vocabulary, keys, has_experts=has_experts)
        self.chat = chat
        self.intake = Intake(alone=len(keys) <= 1)
        self.samplers = ClientSamplers(self, self.model)
        self._connection = connection
        self._models: dict[str, ClientModel] = {}
        self._beginning: dict[str, str] = {}
        """The owners of models that are not open yet, and count as open."""
        self._closed_saving: set[str] = set()
        """Closed models with journals that may have a save without a name. It gets its name when they open."""
        self._former: dict[str, int] = {}
        """The updates of models that closed since the start."""
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each model that is opening or closing, which takes a while."""

    async def start(self) -> None:
        """Takes up the models of the store. Leaves out one with an unreadable journal, and logs the reason."""
        few = asyncio.Semaphore(OPENED_AT_ONCE)

        async def take_up(record: ModelRecord) -> None:
            async with few:
                try:
                    await self._open(record)
                except (OSError, ValueError, msgspec.MsgspecError):
                    self._closed_saving.add(record.model_id)
                    logger.exception("model %s cannot be taken up; the others are", record.model_id)

        await asyncio.gather(*map(take_up, await asyncio.to_thread(self.store.open_models)))
        for session_id in {session_of(source) for source in self.store.ledger.sources()}:
            if not await self._goes_on(session_id):
                await self.store.ledger.end(f"{session_id}:")
        self.tasks.keep(self._watch)
        self.tasks.keep(self._sweep_at_times)

    async def _goes_on(self, session_id: str) -> bool:
        session = await asyncio.to_thread(self.store.session, session_id)
        return session is not None and not session.finished

    async def close(self) -> None:
        """Ends everything here. Runs stay at the trainer."""
        await self.tasks.cancel()
        await asyncio.gather(*(model.close() for model in self._models.values()))
        self.results.close()
        await asyncio.to_thread(self.store.database.close)

    async def _sweep_at_times(self) -> None:
        while True:
            try:
                await self._end_abandoned()
                await self.sweep()
            except (OSError, msgspec.MsgspecError):
                logger.exception("weights that nobody needs stay on the disk until the next look")
            await asyncio.sleep(SWEEP_SECONDS)

    async def _end_abandoned(self) -> None:
        """Ends sessions of clients that have left without a word. Raises `OSError`."""

        def found() -> list[SessionRecord]:
            self.store.touch(self.sessions.heard_of(2 * SWEEP_SECONDS))
            left = self.store.silent_sessions(time.time() - ABANDONED_SECONDS)
            return [each for each in left if self.sessions.was_silent(each.session_id, SILENT_SECONDS)]

        for session in await asyncio.to_thread(found):
            logger.info("session %s was silent for too long, and is ended", session.session_id)
            ending = {"reason": {"type": "interrupted"}, "detail": "its client was silent for too long"}
            await self.finish_session(session.session_id, session.owner, ending)

    def sweep_soon(self) -> None:
        """Begins a sweep."""
        self.tasks.spawn(self.sweep())

    async def sweep(self) -> None:
        """Deletes expired weights, and removes files that nothing needs from the disk. Raises `OSError`."""

        def is_live(session_id: str) -> bool:
            session = self.store.session(session_id)
            return session is not None and not (
                session.finished or self.sessions.was_silent(session_id, LAPSED_SECONDS)
            )

        def is_saving(model_id: str) -> bool:
            model = self._models.get(model_id)
            return model_id in self._closed_saving or bool(model and model.saving)

        async with self.removing:
            await asyncio.to_thread(sweep, self.store, self.config.output_dir, is_live, is_saving)
            found = self.tenants.look()
            held = await asyncio.to_thread(self.store.bytes_held)
            known = await asyncio.to_thread(self.store.largest_saves)
        for each, is_state, size in known:
            self.tenants.saved(each, size, is_state=is_state, is_new=False)
        found(held)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for model_id, model in list(self._models.items()):
                await model.fail_overdue()
                if model.run.has_failed:
                    await self._open_anew(model_id)
                elif self.sessions.was_silent(session_of(model_id), SILENT_SECONDS):
                    logger.info("session %s is silent: model %s may leave its slot", session_of(model_id), model_id)
                    await self._shut(model_id)

    async def _open_anew(self, model_id: str) -> None:
        """Opens a model anew from its journal, after its run has failed here. Otherwise the next request of it does."""
        logger.info("model %s is opened anew", model_id)
        owner = self._models[model_id].record.owner
        await self._shut(model_id)
        try:
            await self.model(model_id, owner)
        except (LookupError, OverQuota, OSError, ValueError, msgspec.MsgspecError):
            logger.exception("model %s cannot be opened anew", model_id)

    # --- sessions ---

    async def create_session(self, asked: CreateSession, owner: str) -> SessionRecord:
        """Begins a session. Raises `BadRequest`, `OverQuota` and `ValueError`."""
        project = check_project(asked.project_id or "")
        session = SessionRecord(
            f"s{secrets.token_hex(8)}", owner,
            user_metadata=asked.user_metadata, display_name=asked.display_name, created=time.time(),
            project=project,
        )  # fmt: skip
        with self.tenants.writing(owner, len(encoded(session))):
            await self.sessions.begin(session)
        return session

    async def assign_project(self, session_id: str, owner: str, project: str) -> None:
        """Counts a session's use from now on in a project. Raises `BadRequest`, `NoSuchThing`, `Gone`."""
        session = await self.sessions.live(session_id, owner)
        await self.sessions.change(msgspec.structs.replace(session, project=check_project(project)))

    async def finish_session(self, session_id: str, owner: str, ending: dict[str, Any]) -> None:
        """Ends a session, once. Its runs leave the trainer's slots once others wait for them. Raises `NoSuchThing`."""
        found = await self.sessions.any(session_id, owner)
        if found.finished:
            return
        await self.sessions.end(found, ending)
        await self.samplers.cancel_all(session_id, owner)
        for model_id in [each for each in {*self._models, *self._opening} if session_of(each) == session_id]:
            await self._shut(model_id)
        self.sessions.forget(session_id)
        self.results.of(owner).forget(f"{session_id}:")
        await asyncio.to_thread(self.replays.of(owner).routings.forget, session_id)
        await self.store.ledger.end(f"{session_id}:")
        models = await asyncio.to_thread(self.models, owner, session_id)
        # No request of theirs has a result any more.
        self._closed_saving.difference_update(each.model_id for each in models)
        self.sweep_soon()

    # --- models ---

    async def model(self, model_id: str, owner: str) -> ClientModel:
        """Returns a model, also of a session that was silent. Raises `NoSuchThing`, `Gone` and `OverQuota`."""
        await self.sessions.live(session_of(model_id), owner)
        async with self._opened(model_id):
            return await self._taken_up(model_id, owner)

    def _claim(self, model_id: str, owner: str, *, is_back: bool) -> bool:
        """Counts a model as open from now on. Returns False if it did before. Raises `OverQuota`."""
        if model_id in self._models or model_id in self._beginning:
            return False
        self.tenants.check_models(owner, self.open_models(owner), is_back=is_back)
        self._beginning[model_id] = owner
        return True

    async def _taken_up(self, model_id: str, owner: str) -> ClientModel:
        if model_id not in self._models:
            await self.sessions.live(session_of(model_id), owner)  # it may have ended since
            is_claimed = self._claim(model_id, owner, is_back=True)
            try:
                record = await asyncio.to_thread(self.store.model, model_id)
                if record is None:
                    raise NoSuchThing(f"there is no model {model_id[:80]!r}")
                await self._open(record)
            finally:
                if is_claimed:
                    self._beginning.pop(model_id, None)
        return self._models[model_id]

    async def _shut(self, model_id: str) -> None:
        """Closes a model, if it is open, before a second opening: two would write one journal."""
        async with self._opened(model_id):
            if (model := self._models.get(model_id)) is not None:
                if model.saving:
                    self._closed_saving.add(model_id)
                del self._models[model_id]
                self._former.pop(model_id, None)
                self._former[model_id] = model.run.updates
                if len(self._former) > MOST_FORMER:
                    del self._former[next(iter(self._former))]
                await model.close()

    @asynccontextmanager
    async def _opened(self, model_id: str) -> AsyncIterator[None]:
        """Makes others that ask for a model wait while it opens or closes."""
        lock = self._opening.setdefault(model_id, asyncio.Lock())
        async with lock:
            yield

    def models(self, owner: str, session_id: str | None = None) -> list[ModelRecord]:
        """Returns an owner's models, or those of one of its sessions, the newest first. Blocks."""
        found = self.store.models(owner, session_id)
        return sorted(found, key=lambda each: (each.created, each.model_id), reverse=True)

    async def owned_model(self, model_id: str, owner: str) -> ModelRecord:
        """Returns the record of a model, also of a session that has ended. Raises `NoSuchThing`."""
        found = await asyncio.to_thread(self.store.model, model_id)
        if found is None or found.owner != owner:
            raise NoSuchThing(f"there is no model {model_id[:80]!r}")
        return found

    async def unload_model(self, model_id: str, owner: str) -> str:
        """Closes a model, and returns the id of the request. Its run leaves its slot once others wait. Raises as `model`."""
        await self.model(model_id, owner)

        async def closed() -> FutureResult:
            await self._shut(model_id)
            return answer(model_id=model_id, type="unload_model")

        request_id = f"{model_id}:{UNLOAD}"
        self.results.begin(request_id, owner, closed)
        return request_id

    async def retrieve(self, request_id: str, owner: str, seconds: float) -> FutureResult | None:
        """Returns the result of a request, or None if there is none after `seconds`.

        Raises `NoSuchThing`, and `KeyError` for a dropped result.
        """
        session = await self.sessions.any(session_of(request_id), owner)
        model_id, _, last = request_id.rpartition(":")
        futures = self.results.of(owner)
        if not (session.finished or futures.knows(request_id)):
            record = await asyncio.to_thread(self.store.model, model_id)
            if record is not None and last == CREATE:  # the service has restarted meanwhile
                await self._begin_model(record)
            elif record is not None and last == UNLOAD:
                await self.unload_model(model_id, owner)
            elif record is not None:
                await self.model(model_id, owner)
            elif (loss := await asyncio.to_thread(self.store.loss, request_id)) is not None:
                self.results.begin(request_id, owner, lambda: self._keep_loss(loss))
        result = await futures.fetch(request_id, seconds)
        if result is not None:
            await self.store.ledger.told(request_id)
        return result

    def waits_for(self, request_id: str) -> str:
        """Returns why a request of a model waits, or an empty text if its model's run is trained."""
        model = self._models.get(request_id.rpartition(":")[0])
        return model.run.reason if model is not None else ""

    async def create_model(self, asked: CreateModel, owner: str) -> str:
        """Begins a model, and returns the id of the request. Raises `BadRequest`, `NoSuchThing`, `Gone` and `TooMany`."""
        session = await self.sessions.live(asked.session_id, owner)
        self.check_base(asked.base_model)
        lora = asked.lora_config
        if lora is None:
            raise BadRequest("lora_config is required: only adapters are trained")
        if not 1 <= lora.rank <= self.config.max_rank:
            raise BadRequest(f"lora_config.rank = {lora.rank}; expected 1 to {self.config.max_rank}")
        if lora.seed is not None and not -(2**63) <= lora.seed < 2**63:
            raise BadRequest(f"lora_config.seed = {str(lora.seed)[:40]}; expected a number of 64 bits")
        modules = (ATTENTION if lora.train_attn else []) + (FEED_FORWARD if lora.train_mlp else [])
        if not modules:
            raise BadRequest("lora_config: neither train_attn nor train_mlp is true, so nothing would be trained")
        _check_optimizer(asked.optimizer_config)
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"
        record = ModelRecord(
            model_id, run_of(model_id), owner, lora.rank, modules,
            user_metadata=asked.user_metadata, created=time.time(), seed=lora.seed,
        )  # fmt: skip
        return await self._begin_model(record)

    async def create_loss(self, asked: CreateLoss, owner: str) -> str:
        """Takes a traced loss, and returns the id of the request, which is the loss's. Raises as `create_model`."""
        session = await self.sessions.live(asked.session_id, owner)
        record = LossRecord(
            f"{session.session_id}:loss:{asked.custom_loss_seq_id}",
            msgspec.Raw(msgspec.json.encode({"inputs": asked.inputs, "graph": asked.graph})),
        )
        if not self.results.of(owner).knows(record.loss_id):
            with self.tenants.writing(owner, len(encoded(record))):
                keeping = self.results.begin(record.loss_id, owner, lambda: self._keep_loss(record))
                if keeping is not None:
                    await asyncio.wait([keeping])  # after a restart it is known then
        return record.loss_id

    async def _keep_loss(self, record: LossRecord) -> FutureResult:
        try:
            await asyncio.to_thread(read_graph, bytes(record.graph))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        former = await asyncio.to_thread(self.store.loss, record.loss_id)
        if former is not None and bytes(former.graph) != bytes(record.graph):
            raise BadRequest(f"loss {record.loss_id} is there already, and is another")
        await asyncio.to_thread(self.store.write, record)
        return answer(loss_id=record.loss_id, type="create_custom_loss")

    async def load_weights(self, asked: LoadWeights, owner: str, body: bytes) -> str:
        """Begins a model with a saved state, and returns the id of the request. Raises as `create_model`.

        Clients before 0.38 create the model first, and load as its first request. `body` is the request's.
        """
        if asked.optimizer_config is not None:
            _check_optimizer(asked.optimizer_config)
        if asked.base_model is not None:
            self.check_base(asked.base_model)
        if asked.model_id is not None and asked.seq_id is not None:
            return await self._load_into(asked.model_id, asked.seq_id, asked, owner, body)
        if asked.session_id is None or asked.model_seq_id is None:
            raise BadRequest("neither session_id and model_seq_id nor model_id and seq_id are given")
        session = await self.sessions.live(asked.session_id, owner)
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"
        source, start = await self._start_of(asked.path, owner)
        record = ModelRecord(
            model_id, run_of(model_id), owner, source.rank, source.target_modules, start_optimizer=asked.optimizer,
            user_metadata=asked.user_metadata or source.user_metadata, created_by="load_weights", created=time.time(),
            **start,
        )  # fmt: skip
        return await self._begin_model(record, asked.path)

    async def source(self, path: str, owner: str) -> ModelRecord:
        """Returns the model of a URI's weights. Raises `BadRequest` and `NoSuchThing`."""
        found = await asyncio.to_thread(imported, self.config.adapters, path)
        return found or await self.owned_model((await self.weights.named(path, owner)).model_id, owner)

    async def _start_of(self, path: str, owner: str) -> tuple[ModelRecord, dict[str, Any]]:
        """Returns the model of a URI's state, and the fields of a record that begins with it.

        Raises `BadRequest`, `NoSuchThing`.
        """
        source = await self.source(path, owner)
        own = {name: getattr(source, name) for name in ("start_run", "start_step", "start_adapter", "alpha")}
        if source.run_id == "import":
            return source, own
        saved = await self.weights.named(path, owner)
        if saved.kind != "weights":
            raise BadRequest(f"{path} has weights for samplers, without an optimizer; expected one of save_state")
        return source, own | (
            {"start_run": source.run_id, "start_step": saved.step, "start_adapter": ""} if saved.step else {}
        )

    async def _load_into(self, model_id: str, seq_id: int, asked: LoadWeights, owner: str, body: bytes) -> str:
        """Begins a model anew that has no request yet, with a saved state, as another run."""
        if seq_id != 1:
            raise NotServed(
                f"load_weights is not permitted with seq_id {seq_id}: it is a model's first request; create a client "
                "from the state"
            )
        await self.sessions.live(session_of(model_id), owner)
        async with self._opened(model_id):
            model = await self._taken_up(model_id, owner)
            is_loaded = model.record.run_id != run_of(model_id)
            if model.record.created_by == "load_weights" and not is_loaded:
                raise NotServed("the model was created with saved weights; create another client from the state")
            if model.is_untouched and not is_loaded:
                async with self.removing:  # as in `_begin_model`
                    source, start = await self._start_of(asked.path, owner)
                    former = await self.owned_model(model_id, owner)
                    if (former.rank, set(former.target_modules)) != (source.rank, set(source.target_modules)):
                        raise BadRequest(
                            f"{asked.path} has rank {source.rank} and {', '.join(source.target_modules)}; the model has "
                            f"rank {former.rank} and {', '.join(former.target_modules)}"
                        )
                    record = msgspec.structs.replace(
                        former, run_id=f"{former.run_id}.l", start_optimizer=asked.optimizer, created_by="load_weights", **start,
                    )  # fmt: skip
                    await asyncio.to_thread(self.store.write, record)
                await self._models.pop(model_id).close()
                await self._open(record)
            elif model.waits_for_first:
                raise NotServed(
                    "load_weights came after later requests of the model, which would not have the weights; create a client "
                    "from the state"
                )
            return await self._models[model_id].offer(Request("load_weights", seq_id, body))

    async def _begin_model(self, record: ModelRecord, path: str | None = None) -> str:
        """Begins a model, with its record on the disk before its client hears of it.

        `path` names the state that it begins with.

        Raises `BadRequest`, `NoSuchThing`, `OSError`, `OverQuota` and `TooMany`.
        """
        size = len(encoded(record))  # refuses a too long record now
        request_id, is_claimed = f"{record.model_id}:{CREATE}", False
        try:
            async with self._opened(record.model_id):
                former = await asyncio.to_thread(self.store.model, record.model_id)
                if former is None:
                    is_claimed = self._claim(record.model_id, record.owner, is_back=False)
                    async with self.removing:  # a removal of a state must see the record, or take the name before
                        if path is not None:
                            _, start = await self._start_of(path, record.owner)
                            if any(getattr(record, name) != value for name, value in start.items()):
                                raise BadRequest(f"{path[:120]} was saved anew meanwhile; load it again")
                        with self.tenants.writing(record.owner, size):
                            await asyncio.to_thread(self.store.write, record)
                elif msgspec.structs.replace(former, created=record.created) != record:
                    raise BadRequest(f"model {record.model_id} is there already, and was made otherwise")
                elif not self.results.of(record.owner).knows(request_id):
                    is_claimed = self._claim(record.model_id, record.owner, is_back=True)
            self.results.begin(request_id, record.owner, lambda: self._create(record))
        except BaseException:
            if is_claimed:
                self._beginning.pop(record.model_id, None)
            raise
        return request_id

    def open_models(self, owner: str) -> int:
        """Returns the number of an owner's open models, including those that are about to be."""
        found = {name for name, model in self._models.items() if model.record.owner == owner}
        return len(found | {name for name, whose in self._beginning.items() if whose == owner})

    @property
    def open_reasons(self) -> dict[str, str]:
        """Maps an open model to the reason why it waits, which is empty if the trainer takes its items."""
        return {name: model.run.reason for name, model in self._models.items()}

    @property
    def updates(self) -> dict[str, int]:
        """The updates of the models that have been open since the start."""
        return self._former | {name: model.run.updates for name, model in self._models.items()}

    async def _create(self, record: ModelRecord) -> FutureResult:
        try:
            async with self._opened(record.model_id):
                await self.sessions.live(session_of(record.model_id), record.owner)
                if record.model_id not in self._models:
                    await self._open(record)
                run = self._models[record.model_id].run
        finally:
            self._beginning.pop(record.model_id, None)
        await run.admitted()
        return answer(model_id=record.model_id, type=record.created_by)

    async def _open(self, record: ModelRecord) -> None:
        lora = LoraConfig(
            rank=record.rank, alpha=record.alpha, target_modules=record.target_modules, seed=record.seed,
            start_from=Path(record.start_adapter) if record.start_adapter else None,
        )  # fmt: skip
        interval = self.config.checkpoint_interval
        described = TrainedRun(
            run_id=record.run_id,
            training=TrainingConfig(lora=lora, start_from=record.start, checkpoint_interval=interval),
            trainer_timeout_seconds=SLOT_SECONDS,
            driven=True,
            share=record.owner or None,
        )

        def opened() -> tuple[Journal, DrivenRun]:
            directory = self.store.run_directory(record.run_id) / "items"
            # The ledger may count an item again as long as the item is there.
            flush = self.store.ledger.flush
            journal = Journal(directory, record.run_id, self.config.transport.largest_batch, flush)
            return journal, DrivenRun(described, self.config.output_dir, self._connection, journal)

        journal, run = await asyncio.to_thread(opened)
        model = ClientModel(record, run, journal, self)
        try:
            await model.start()
        except BaseException:  # it must not be found half begun
            await model.close()
            raise
        self._models[record.model_id] = model
        self._closed_saving.discard(record.model_id)

    async def offer(self, kind: str, model_id: str, seq_id: int, body: bytes, owner: str, tokens: int = 0) -> str:
        """Takes a request of a model, of `tokens` tokens, and returns its id.

        Over a quota of bytes, a save has its place in the order all the same, and fails. Raises `NoSuchThing`, `Gone`,
        `TooMany`, `OverQuota` and `ValueError`.
        """
        model, refusal = await self.model(model_id, owner), ""
        request_id = model.request_id(seq_id)
        if model.may_wait(kind, seq_id):
            self.tenants.check_tokens(owner, tokens)
        if tokens and not model.knows(seq_id):
            self.tenants.reserve_tokens(owner, request_id, tokens)
        if kind in SAVES and not model.knows(seq_id):
            try:
                is_due = model.misses(seq_id)
                self.tenants.reserve_disk(owner, request_id, model.record, kind, len(body), is_due=is_due)
            except OverQuota as error:
                refusal = str(error)
        try:
            return await model.offer(Request(kind, seq_id, body, refusal))
        finally:
            if not self.results.of(owner).waits_for(request_id):  # it was not accepted, or has its result already
                self.tenants.ended(owner, request_id)


def _check_optimizer(asked: OptimizerRequest) -> None:
    if asked.type != "adamw":
        raise BadRequest(f"optimizer {asked.type!r} is not served; expected adamw")
