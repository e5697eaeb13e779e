"""A model of a client: its requests in the order of `seq_id`, each an item of its run, and their results.

The request itself is the note of its item in the run's journal before its client hears that the service has it. After a restart
the service reads the requests there, and those without an answer get theirs as if nothing had happened. A request that comes
before an earlier one is an early note until that arrives.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from counterpoint.inference.base import InferenceError
from counterpoint.run.items import AdamW, ItemHeader, decode_item, encode_item
from counterpoint.service.journal import Journal
from counterpoint.service.records.ledger import Used
from counterpoint.service.records.structs import ModelRecord, Number, Position, SamplerRecord, SavedRecord
from counterpoint.service.runs import DrivenRun, ItemFailed, RunFailed, RunLost, checked
from counterpoint.service.tasks import Tasks
from counterpoint.service.tinker.context import ServiceContext
from counterpoint.service.tinker.datums import CUSTOM, contribution_of, output_of, tokens_of
from counterpoint.service.tinker.futures import FutureResult, TooMany, answer, failure
from counterpoint.service.tinker.proto import INT32, MESSAGES
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.sequence import Sequence
from counterpoint.service.tinker.sessions import session_of
from counterpoint.service.tinker.weights.external import check_recipients
from counterpoint.service.tinker.weights.named import adapter_name, expiry
from counterpoint.service.tinker.weights.retention import bytes_of
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.messages import SECONDS, Answered, Ask
from counterpoint.transport.records import Batch, Float32Array, Int32Array
from counterpoint.transport.typed import met

logger = logging.getLogger(__name__)

OPTIM_METRICS = ("grad_norm", "learning_rate", "tokens", "samples")
"""The metrics of an update that clients get."""

SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
"""The kinds of requests that write weights."""

MISSING_SECONDS = 300.0
"""Seconds that requests wait for a missing earlier one."""

JOURNAL_SECONDS = 30.0
"""Seconds that a client waits until the journal has its request. Then it must send the request again."""

NEWEST = "newest"
"""The name of the weights that follow a model for its samplers of the kind `inflight`."""


class Request(msgspec.Struct, frozen=True):
    """A request of a model as its client sent it."""

    kind: str
    """The last part of its path."""
    seq_id: int
    body: bytes
    refused: str = ""
    """Why it became an item without any effect, if it was refused for the state at its arrival, else empty."""

    @property
    def contributes(self) -> bool:
        """Whether an update would lack it: an unreadable one might be a contribution."""
        if self.kind != "forward_backward":
            return False
        try:
            return not MESSAGES["ForwardBackwardRequest"].FromString(self.body).forward_only
        except DecodeError:
            return True

    @property
    def tokens(self) -> int:
        """The most tokens that it may use, or 0 if it cannot be read."""
        if self.kind != "forward_backward":
            return 0
        try:
            return tokens_of(MESSAGES["ForwardBackwardRequest"].FromString(self.body))
        except DecodeError:
            return 0


class _Failed(msgspec.Struct, frozen=True):
    """A request that became no item."""

    body: bytes
    """Its result, in JSON."""
    lacks: bool
    """Whether an update would lack it."""


class AdamParams(msgspec.Struct, frozen=True):
    """The values of an `optim_step`."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct, frozen=True):
    """The body of `optim_step`."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams


class SaveWeights(msgspec.Struct, frozen=True):
    """The body of `save_weights`, `save_weights_for_sampler` and `save_weights_external`."""

    model_id: str
    seq_id: Number
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None
    sampling_session_seq_id: Position | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadedWeights(msgspec.Struct, frozen=True):
    """The body of `load_weights` of an existing model."""

    path: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request's item for the run, and the parts of its result."""

    header: ItemHeader
    batch: Batch | None
    result: Callable[[int, Answered], Awaitable[FutureResult]]
    used: Used = field(default_factory=Used)
    """Its use beside the trainer's time."""
    refused: str = ""
    """Why it is refused, if its client is at fault."""


class ClientModel:
    """One model, from its first request on."""

    def __init__(self, record: ModelRecord, run: DrivenRun, journal: Journal, context: ServiceContext) -> None:
        """`run` has the items of `journal`."""
        self.record = record
        self.run = run
        self._journal = journal
        self._context = context
        self._futures = context.results.of(record.owner)
        self._replay = context.replays.of(record.owner)
        self._sequence = Sequence[Request]()
        self._due: asyncio.Queue[Request] = asyncio.Queue()
        self._tasks = Tasks(f"model {record.model_id}")
        self._unwritten: dict[int, asyncio.Future[None]] = {}
        """The requests that are not in the journal yet."""
        self._bytes: dict[int, int] = {}
        """The bytes of the requests in memory."""
        self._in_hand: Request | None = None
        """The request that becomes an item now."""
        self.saving: set[int] = set()
        """The requests with states that may be on the disk already, and have no name yet."""
        self._lacks = False
        """Whether a contribution could not be journalled. The next item then reports it, or the others would count alone."""

    async def start(self) -> None:
        """Connects the run, and takes up its journal. Raises `OSError` and `CodecError`."""
        last = 0
        for number in await asyncio.to_thread(self._journal.items):
            ask, note = await asyncio.to_thread(self._journal.read_item, number)
            if note:
                request = msgspec.msgpack.decode(note, type=met(Request))
                last = max(last, request.seq_id)
                is_open = self._futures.begin(self.request_id(request.seq_id), is_due=True)
                asked = await asyncio.to_thread(self._asked, request, ask)
                if is_open:  # else its result stays, and its room would never come back
                    self._context.tenants.reserve_tokens(
                        self.record.owner, self.request_id(request.seq_id), asked.used.tokens
                    )
                self.saving |= {request.seq_id} if asked.header.saves else set()
                self._tasks.keep(partial(self._finish, request, asked, number))
        self._sequence.done = await self._take_up_failures(last)
        for seq_id in await asyncio.to_thread(self._journal.early):
            if seq_id > self._sequence.done:
                note = await asyncio.to_thread(self._journal.read_early, seq_id)
                is_open = self._futures.begin(self.request_id(seq_id), is_due=True)
                request = msgspec.msgpack.decode(note, type=met(Request))
                if is_open:
                    self._context.tenants.reserve_tokens(self.record.owner, self.request_id(seq_id), request.tokens)
                self._take(request, is_due=True)
            else:
                await asyncio.to_thread(self._journal.forget_early, seq_id)
        await self.run.start()
        self._tasks.keep(self._work)

    async def _take_up_failures(self, last: int) -> int:
        """Restores the failures of requests without an item, and returns the last request that had its place.

        `last` is the last one with an item.
        """
        for seq_id, note in (await asyncio.to_thread(self._journal.failed)).items():
            failed = msgspec.msgpack.decode(note, type=met(_Failed))
            if seq_id == last + 1:
                last = seq_id
                self._lacks |= failed.lacks
            await self._futures.complete(self.request_id(seq_id), FutureResult(failed.body))
        return last

    async def close(self) -> None:
        """Ends the model here. Its run stays at the trainer."""
        await self._tasks.cancel()
        await self.run.close()
        self._futures.cancel_all(self.record.model_id)  # else they count as pending for ever
        for unwritten in self._unwritten.values():
            unwritten.cancel()
        for seq_id in list(self._bytes):
            self._release(seq_id)

    def request_id(self, seq_id: int) -> str:
        """Returns the id by which a client fetches the result of a request."""
        return f"{self.record.model_id}:{seq_id}"

    async def offer(self, request: Request) -> str:
        """Takes a request, and returns its id once it is in the journal. A repetition changes nothing.

        Raises `TooMany`, `OSError`, and `ValueError`.
        """
        request_id = self.request_id(request.seq_id)
        is_missing = self._sequence.misses(request.seq_id)
        if not self._sequence.knows(request.seq_id) and self._futures.begin(request_id, is_due=is_missing):
            try:
                self._take(request)
            except (ValueError, TooMany):
                self._futures.cancel(request_id)
                raise
            self._unwritten[request.seq_id] = asyncio.get_running_loop().create_future()
            if self._sequence.waits(request.seq_id):
                self._tasks.keep(partial(self._write_early, request))
        if (unwritten := self._unwritten.get(request.seq_id)) is not None:
            done, _ = await asyncio.wait([unwritten], timeout=JOURNAL_SECONDS)
            if not done or unwritten.cancelled():
                raise TooMany(f"request {request.seq_id} is not in the journal yet; send it again")
            unwritten.result()
        return request_id

    def knows(self, seq_id: int) -> bool:
        """Whether a request has come before."""
        return self._sequence.knows(seq_id)

    def misses(self, seq_id: int) -> bool:
        """Whether accepted requests wait for this one."""
        return self._sequence.misses(seq_id)

    def may_wait(self, kind: str, seq_id: int) -> bool:
        """Whether a request can be asked for later without loss: no accepted request needs it."""
        if self._sequence.knows(seq_id) or self._sequence.misses(seq_id):
            return False
        return kind == "forward_backward" or seq_id > self._sequence.done + 1

    def _take(self, request: Request, *, is_due: bool = False) -> None:
        """Puts a request into its place. Raises `TooMany` and `ValueError`."""
        owner, size = self.record.owner, len(request.body)
        if not self._context.room.take(owner, size, is_due=is_due or self._sequence.misses(request.seq_id)):
            raise TooMany(
                f"requests of {self._context.room.of(owner):,} bytes of this key wait; {size:,} more have no room"
            )
        self._bytes[request.seq_id] = size
        try:
            due = self._sequence.offer(request.seq_id, request, time.monotonic())
        except ValueError:
            self._release(request.seq_id)
            raise
        for _, each in due:
            self._due.put_nowait(each)

    def _release(self, seq_id: int) -> None:
        """Gives back the room of a request."""
        self._context.room.give_back(self.record.owner, self._bytes.pop(seq_id, 0))

    async def _write_early(self, request: Request) -> None:
        """Writes a request that waits for an earlier one. If that fails, forgets it, and its client sends it again."""
        try:
            await asyncio.to_thread(self._journal.write_early, request.seq_id, msgspec.msgpack.encode(request))
        except OSError as error:
            if self._sequence.waits(request.seq_id):
                self._forget_early(request.seq_id)
                self._futures.cancel(self.request_id(request.seq_id))
                self._written(request.seq_id, error)
        else:
            if request.seq_id in self._unwritten:
                self._written(request.seq_id)
            else:  # it is an item since
                await asyncio.to_thread(self._journal.forget_early, request.seq_id)

    def _forget_early(self, seq_id: int) -> None:
        self._sequence.forget(seq_id)
        self._release(seq_id)

    def _written(self, seq_id: int, error: OSError | None = None) -> None:
        """Reports to a request's sender that it is in the journal, or that it could not be written there."""
        unwritten = self._unwritten.pop(seq_id, None)
        if unwritten is None or unwritten.done():
            return
        if error is None:
            unwritten.set_result(None)
        else:
            unwritten.set_exception(error)

    async def score(self, tokens: Int32Array, step: int, targets: Int32Array | None = None) -> Float32Array:
        """Returns the log-probability of each token but the first, by the trainer, under the weights of update `step`.

        `targets` are others in their places, `[N - 1, K]`, and so are then the log-probabilities.

        Raises `BadRequest` if these are not the newest any more, and `ItemFailed` and `RunLost`.
        """
        message = MESSAGES["ForwardBackwardRequest"](loss_fn="cross_entropy", forward_only=True)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].tobytes()
        target = datum.loss_fn_inputs.add(key="target_tokens").value
        wanted = tokens[1:] if targets is None else targets
        target.dense, target.dtype = wanted.tobytes(), INT32
        target.shape.extend(wanted.shape)
        asked = contribution_of(message, self.record.run_id, self._context.config.max_tokens, self._context.vocabulary)
        number = await self.run.begin(ItemHeader(objective=asked.objective), asked.batch)
        answered = checked(await self.run.answer_to(number))
        await self._count(f"score:{number}", Used(), answered)
        if answered.step != step:
            raise BadRequest(
                f"prompt_logprobs: the sampler has the weights of update {step}, and the model is at update {answered.step}; "
                "of an adapter, only the newest weights score prompts"
            )
        return answered.columns["log_probabilities"].reshape(-1, *wanted.shape[1:])[1:]

    async def fail_overdue(self) -> None:
        """Fails requests that have waited too long for an earlier one."""
        for seq_id in self._sequence.overdue(time.monotonic() - MISSING_SECONDS):
            self._release(seq_id)
            said = f"request {self._sequence.done + 1} has not come within {MISSING_SECONDS:g} s; this one is after it"
            await self._fail(seq_id, said)
            with suppress(OSError):
                await asyncio.to_thread(self._journal.forget_early, seq_id)

    async def _work(self) -> None:
        """Makes items of requests, one by one. If it has died, and begins anew, it answers the request in hand first."""
        if (request := self._in_hand) is not None:
            await self._refuse(request, "the service failed at it; its log says more")
        while True:
            request = self._in_hand = await self._due.get()
            asked = await asyncio.to_thread(self._asked, request)
            header = msgspec.structs.replace(asked.header, spoils=asked.header.spoils or self._lacks)
            if header.saves:
                async with self._context.removing:
                    self.saving.add(request.seq_id)
            try:
                note = msgspec.msgpack.encode(msgspec.structs.replace(request, refused=asked.refused))
                number = await self.run.begin(header, asked.batch, note)
            except RunFailed:
                return  # it is opened anew: its client sends again every request that is in no journal
            except (RunLost, OSError, ValueError) as error:
                await self._refuse(request, str(error))
                continue
            self._lacks = False
            self._tasks.keep(partial(self._finish, request, asked, number))
            await self._taken(request)

    async def _refuse(self, request: Request, said: str) -> None:
        """Answers a request that becomes no item."""
        logger.warning("model %s: request %d: %s", self.record.model_id, request.seq_id, said)
        self._lacks |= request.contributes
        self.saving.discard(request.seq_id)
        await self._fail(request.seq_id, said, lacks=request.contributes)
        await self._taken(request)

    async def _taken(self, request: Request) -> None:
        """Notes that a request is an item, or never becomes one."""
        self._in_hand = None
        self._release(request.seq_id)
        self._written(request.seq_id)
        with suppress(OSError):  # the next start removes it
            await asyncio.to_thread(self._journal.forget_early, request.seq_id)

    async def _fail(self, seq_id: int, said: str, *, lacks: bool = False) -> None:
        """Reports that a request failed without an item, also after a new start. `lacks`: an update would lack it."""
        result = failure(said, "server")
        try:
            note = msgspec.msgpack.encode(_Failed(result.body, lacks))
            await asyncio.to_thread(self._journal.write_failed, seq_id, note)
        except OSError as error:
            logger.warning(
                "model %s: a new start will not know why request %d failed: %s", self.record.model_id, seq_id, error
            )
        await self._futures.complete(self.request_id(seq_id), result)

    async def _finish(self, request: Request, asked: _Asked, number: int) -> None:
        counts = ""
        try:
            answered = checked(await self.run.answer_to(number))
            counts = "; what it has contributed counts all the same" if request.contributes else ""
            await self._count(str(request.seq_id), asked.used, answered)
            result = await asked.result(number, answered)
        except BadRequest as error:
            result = failure(str(error))
        except ItemFailed as error:
            result = failure(str(error), "user" if error.by_asker else "server")
        except RunFailed:
            return  # it is opened anew, and reports the item's result then, which may count
        except RunLost as error:
            await asyncio.to_thread(self._withdraw, request, number, str(error))
            result = failure(str(error), "server")
        except (InferenceError, OSError, ValueError) as error:
            result = failure(f"{error}{counts}", "server")
        except Exception as error:
            logger.exception("model %s: request %d has no result", self.record.model_id, request.seq_id)
            result = failure(f"the service failed: {type(error).__name__}: {error}{counts}", "server")
        await self._complete(request, result)

    def _withdraw(self, request: Request, number: int, said: str) -> None:
        """Replaces the item of a failed request by one without any effect: a readmitted run would carry it out."""
        if number in self._journal.items() and self._journal.read_answer(number) is None:
            former = decode_item(self._journal.read_item(number)[0].header)
            ask = Ask(number, encode_item(ItemHeader(spoils=former.spoils or request.contributes)), None)
            self._journal.write_item(ask, msgspec.msgpack.encode(msgspec.structs.replace(request, refused=said)))

    async def _count(self, number: str, used: Used, answered: Answered) -> None:
        """Has the ledger count an item, once: an item that comes again after a kill counts again."""
        used = msgspec.structs.replace(used, seconds=answered.metrics.get(SECONDS, 0.0))
        name = f"{self.record.model_id}:{number}"
        await self._context.store.ledger.count(self.record.owner, name, used, is_journalled=True)

    async def _complete(self, request: Request, result: FutureResult) -> None:
        self.saving.discard(request.seq_id)
        await self._futures.complete(self.request_id(request.seq_id), result)

    @property
    def is_untouched(self) -> bool:
        """Whether no request has come yet."""
        return self._sequence.is_new

    @property
    def waits_for_first(self) -> bool:
        """Whether requests have come, but not the first."""
        return self._sequence.misses(1)

    # --- items of requests ---

    def _asked(self, request: Request, journalled: Ask | None = None) -> _Asked:
        """Reads a request, of its existing item if it is `journalled`.

        A refused one becomes an item without any effect, so that the order stays whole.
        """
        try:
            if request.refused:
                raise BadRequest(request.refused)
            match request.kind:
                case "forward_backward":
                    return self._forward_backward(request.body, journalled)
                case "optim_step":
                    return self._optim_step(msgspec.json.decode(request.body, type=met(OptimStep)))
                case "save_weights":
                    return self._save(msgspec.json.decode(request.body, type=met(SaveWeights)))
                case "save_weights_for_sampler":
                    return self._save_for_sampler(msgspec.json.decode(request.body, type=met(SaveWeights)))
                case "save_weights_external":
                    return self._save_external(msgspec.json.decode(request.body, type=met(SaveWeights)))
                case "load_weights":
                    return self._loaded(msgspec.json.decode(request.body, type=met(LoadedWeights)))
                case other:
                    raise BadRequest(f"{other} is not served")
        except Exception as error:
            is_users = isinstance(error, BadRequest | msgspec.MsgspecError | DecodeError)
            said = str(error) if is_users else f"the service failed: {type(error).__name__}: {error}"
            if not is_users:
                logger.exception("model %s: request %d cannot be read", self.record.model_id, request.seq_id)

            async def refused(number: int, answered: Answered) -> FutureResult:
                return failure(said, "user" if is_users else "server")

            return _Asked(ItemHeader(spoils=request.contributes), None, refused, refused=said if is_users else "")

    def _forward_backward(self, body: bytes, journalled: Ask | None) -> _Asked:
        message = MESSAGES["ForwardBackwardRequest"].FromString(body)
        graph = self._traced(message) if message.loss_fn == CUSTOM else b""
        contribution = contribution_of(
            message, self.record.run_id, self._context.config.max_tokens, self._context.vocabulary, graph
        )
        if journalled is None:  # else its routing is in the item, and may be known nowhere else any more
            batch = self._replay.routed(contribution, session_of(self.record.model_id))
        else:
            batch = journalled.batch or contribution.batch
        metrics = self._replay.metrics(batch, contribution.sequences)

        async def result(number: int, answered: Answered) -> FutureResult:
            return FutureResult(await asyncio.to_thread(output_of, contribution, answered, metrics), is_protobuf=True)

        tokens = sum(contribution.lengths)
        used = Used(forward=tokens) if message.forward_only else Used(trained=tokens)
        return _Asked(ItemHeader(objective=contribution.objective), batch, result, used)

    def _traced(self, message: Any) -> bytes:
        """Returns the graph of a request's loss, which is one of the model's session. Raises `BadRequest`."""
        loss_id = next((each.value.text for each in message.loss_fn_config_v2 if each.key == "loss_id"), "")
        session = session_of(self.record.model_id)
        found = self._context.store.loss(loss_id) if loss_id.startswith(f"{session}:") else None
        if found is None:
            raise BadRequest(f"loss_fn_config: there is no loss {loss_id[:80]!r} of session {session}")
        return bytes(found.graph)

    def _optim_step(self, asked: OptimStep) -> _Asked:
        given = asked.adam_params
        clip = given.grad_clip_norm if given.grad_clip_norm > 0 else math.inf
        values = AdamW(given.learning_rate, (given.beta1, given.beta2), given.eps, given.weight_decay, clip)

        async def result(number: int, answered: Answered) -> FutureResult:
            known = {name: answered.metrics[name] for name in OPTIM_METRICS if name in answered.metrics}
            return answer(metrics=known | {"step": answered.step})

        return _Asked(ItemHeader(updates=True, values=values), None, result)

    def _loaded(self, asked: LoadedWeights) -> _Asked:
        """The model's first request, by which it began with a saved state when it was opened."""

        async def result(number: int, answered: Answered) -> FutureResult:
            return answer(path=asked.path, model_id=self.record.model_id, type="load_weights")

        return _Asked(ItemHeader(), None, result)

    def _save(self, asked: SaveWeights) -> _Asked:
        name, expires = _checked_name(asked), expiry(asked.ttl_seconds)

        async def result(number: int, answered: Answered) -> FutureResult:
            record = SavedRecord(
                self.record.model_id, "weights", name, number, answered.step,
                user_metadata=asked.user_metadata, created=time.time(), expires=expires,
            )  # fmt: skip
            await self._keep(record, overwrite=asked.overwrite)
            return answer(path=record.path, type="save_weights")

        return _Asked(ItemHeader(saves="kept"), None, result)

    def _save_for_sampler(self, asked: SaveWeights) -> _Asked:
        if asked.kind not in ("snapshot", "inflight"):
            raise BadRequest(f"kind = {asked.kind!r} is not served; expected snapshot or inflight")
        is_named, publication = asked.path is not None, f"s{asked.seq_id}"
        if not is_named and asked.sampling_session_seq_id is None:
            raise BadRequest("neither path nor sampling_session_seq_id is given")
        if asked.path is not None and asked.kind == "inflight":
            raise BadRequest("an inflight sampler has no path; leave it out")
        kind = "sampler_weights" if is_named else asked.kind
        name = _checked_name(asked) if is_named else NEWEST if kind == "inflight" else publication
        expires = expiry(asked.ttl_seconds)

        async def result(number: int, answered: Answered) -> FutureResult:
            record = SavedRecord(
                self.record.model_id, kind, name, number, answered.step, answered.text,
                asked.user_metadata, time.time(), expires,
            )  # fmt: skip
            adapter = adapter_name(self.record.run_id, answered.text)
            if not await asyncio.to_thread(self._context.store.knows, record):  # else the model was opened again
                await self._context.servers.load(adapter, Path(answered.text), self.record.owner)
            model_id, owner, session = self.record.model_id, self.record.owner, session_of(self.record.model_id)
            sampler_id = f"{session}:sample:{asked.sampling_session_seq_id}"
            if kind == "inflight":
                sampler = SamplerRecord(sampler_id, owner, follows=model_id)
            else:
                sampler = SamplerRecord(
                    sampler_id, owner, adapter, answered.text, model_id=model_id, step=answered.step
                )
            overwrite = asked.overwrite or kind == "inflight"
            await self._keep(record, overwrite=overwrite, sampler=None if is_named else sampler)
            if is_named:
                return answer(path=record.path, type="save_weights_for_sampler")
            return answer(sampling_session_id=sampler_id, type="save_weights_for_sampler")

        return _Asked(ItemHeader(publication=publication), None, result)

    def _save_external(self, asked: SaveWeights) -> _Asked:
        name, expires, recipients = (
            _checked_name(asked),
            expiry(asked.ttl_seconds),
            asked.age_encryption_recipients or [],
        )
        check_recipients(recipients)

        async def result(number: int, answered: Answered) -> FutureResult:
            record = SavedRecord(
                self.record.model_id, "external_weights", name, number, answered.step, answered.text,
                asked.user_metadata, time.time(), expires, recipients=recipients,
            )  # fmt: skip
            await self._keep(record, overwrite=asked.overwrite)
            return answer(path=record.path, type="save_weights_external")

        return _Asked(ItemHeader(publication=f"s{asked.seq_id}"), None, result)

    async def _keep(self, record: SavedRecord, *, overwrite: bool, sampler: SamplerRecord | None = None) -> None:
        """Writes a record, and its sampler. Raises `BadRequest` if another one has its name."""

        def kept() -> int:
            size = bytes_of(record, self._context.config.output_dir, self.record.run_id)
            self._context.store.keep(msgspec.structs.replace(record, size=size), overwrite=overwrite, sampler=sampler)
            return size

        try:
            self._context.tenants.saved(self.record, await asyncio.to_thread(kept), is_state=not record.directory)
        except FileExistsError as error:
            raise BadRequest(str(error)) from error


def _checked_name(asked: SaveWeights) -> str:
    name = asked.path if asked.path is not None else f"save-{asked.seq_id}"
    if not re.fullmatch(IDENTIFIER_PATTERN, name):
        raise BadRequest(f"path = {name[:80]!r} is no name: expected {IDENTIFIER_PATTERN}")
    return name
