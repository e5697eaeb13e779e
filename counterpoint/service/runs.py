"""A driven run: contributions, updates, publications and saves, asked of the trainer one by one over the wire.

Each item is in the run's journal before it is sent, and so is its answer before anybody hears of it. The trainer carries items
out in the order of their numbers, each once. After a loss of the connection, or of either process, it names the first item that
it lacks, and the run sends all from there on again. So the trainer makes contributions since the last checkpoint anew, and no
update counts twice. For example, a trainer that is killed after item 40, with a checkpoint of item 30, gets items 31 to 40
again.

Next in the reading order of `docs/architecture.md`: `transport/records.py`.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import tomli_w

from counterpoint.run.items import ItemHeader, Objective, UpdateValues, encode_item
from counterpoint.run.trained import TrainedRun
from counterpoint.service.journal import Journal
from counterpoint.service.receipts import ItemReceipts
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.messages import (
    Acknowledged,
    Answered,
    Ask,
    Bye,
    Evicted,
    Hello,
    Ready,
    Rejected,
    ToOrchestrator,
    Waiting,
)
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.link import SharedConnection

logger = logging.getLogger(__name__)

KEPT_ANSWERS = 256
"""Answers kept beyond those that a repetition after a loss needs: clients may ask for them again."""

AGAIN_SECONDS = 1.0
"""Seconds until the next attempt to write the journal."""


class RunLost(RuntimeError):
    """The run takes no items any more. The message says why."""


class RunFailed(RunLost):
    """A task of the run failed here. Its items go on, and count: the next process that opens the run has their answers."""


class ItemFailed(RuntimeError):
    """An item was not carried out. `by_asker`: the request is at fault, and not the trainer."""

    def __init__(self, message: str, *, by_asker: bool) -> None:
        super().__init__(message)
        self.by_asker = by_asker


class DrivenRun:
    """One run of the job's trainer. `start` begins. `close` ends it here, and the trainer keeps it."""

    def __init__(self, described: TrainedRun, output_dir: Path, connection: SharedConnection, journal: Journal) -> None:
        """Goes on after the items of `journal`, which it reads, so call this in a thread. Raises `OSError` and `CodecError`."""
        self.run_id = described.run_id
        self.reason = "the trainer was not reached yet"
        """Why items wait, or empty if the trainer takes them."""
        self._described = described.model_copy(update={"driven": True})
        run_dir = output_dir / f"run_{described.run_id}"
        self._control = run_dir / "control"
        self._link = connection.link()
        self._journal = journal
        self._receipts = ItemReceipts(described.run_id, run_dir, journal)
        items = journal.items()
        self._newest = max(items, default=0)
        """The last item in the journal."""
        self._beginning = asyncio.Lock()
        self._kept: dict[int, Ask | None] = dict.fromkeys(items)
        """Items that may have to be sent again, by number. Of those with None, the journal has the contents."""
        self._answers: dict[int, asyncio.Future[Answered]] = {}
        self._answered = set(journal.answers())
        self._updates: dict[int, int] = {}
        """The item of each update, by its step."""
        self._session: int | None = None
        self._base = self._sent = self._credit = 0
        """The last item known to be carried out, the last one sent in this session, and the number of further ones that may be
        sent."""
        self._changed, self._ready = asyncio.Event(), asyncio.Event()
        self._refused: dict[int, str] = {}
        """Maps the number of an item that the trainer could not read to the reason. An item without effect takes its place."""
        self._lost = RunLost(lost) if (lost := journal.lost()) else None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        for number in self._answered:
            answered = journal.read_answer(number)
            if answered is not None:
                self._note_update(answered)

    def _note_update(self, answered: Answered) -> None:
        if not answered.fault and answered.step:
            self._updates.setdefault(answered.step, answered.number)

    @property
    def has_failed(self) -> bool:
        """Whether a task of it has failed here, so that it can go on when it is opened anew."""
        return isinstance(self._lost, RunFailed)

    @property
    def updates(self) -> int:
        """The number of updates that are known to be made."""
        return max(self._updates, default=0)

    async def start(self) -> None:
        """Has the trainer admit the run, unless it was lost for good. Raises `OSError`."""
        if self._lost is not None:
            self._lose(self._lost)
            return
        await asyncio.to_thread(self._describe)
        await self._link.start(Hello(self.run_id, 0))
        self._tasks = [
            asyncio.create_task(work(), name=f"{name} of run {self.run_id}")
            for name, work in (("sender", self._send), ("receiver", self._receive))
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Reports a failed task to its waiters: without it, no answer would ever come."""
        error = None if task.cancelled() else task.exception()
        if self._is_closing or self._lost is not None:
            return
        logger.error("run %s: the %s failed", self.run_id, task.get_name(), exc_info=error)
        failed = RunFailed(f"run {self.run_id} failed here: {error!r}; it goes on once it is opened anew")
        self._lose(error if isinstance(error, RunLost) else failed)

    def _describe(self) -> None:
        self._control.mkdir(parents=True, exist_ok=True)
        table = self._described.model_dump(mode="json", exclude_none=True)
        write_atomically(self._control / "orch.toml", tomli_w.dumps(table).encode())

    async def close(self) -> None:
        """Ends the connection. Callers that still wait get `RunLost`."""
        self._is_closing = True
        await self._link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose(RunLost("the service ends"))

    async def admitted(self) -> None:
        """Returns once the trainer takes the run's items. Raises `RunLost`."""
        await self._ready.wait()
        self._check()

    def _check(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

    # --- items ---

    async def forward_backward(self, batch: Batch, objective: Objective) -> Answered:
        """Adds the gradients of a batch, for an objective, and returns metrics and columns.

        Raises `ItemFailed` and `RunLost`.
        """
        return await self.ask(ItemHeader(objective=objective), batch)

    async def update(self, values: UpdateValues) -> Answered:
        """Updates the weights by the contributions so far, and returns the update's metrics and step. Raises as above."""
        return await self.ask(ItemHeader(updates=True, values=values))

    async def publish(self, name: str) -> Path:
        """Publishes the weights under a name, for servers, and returns the directory. Raises as above."""
        return Path((await self.ask(ItemHeader(publication=name))).text)

    async def save(self) -> int:
        """Saves weights and optimizer until somebody removes them, and returns the step, 0 before any update.

        Raises as above.
        """
        return (await self.ask(ItemHeader(saves="kept"))).step

    async def ask(self, header: ItemHeader, batch: Batch | None = None, note: bytes = b"") -> Answered:
        """Asks for an item, the next by number, with `note` in its journal. Raises `ItemFailed` and `RunLost`."""
        return checked(await self.answer_to(await self.begin(header, batch, note)))

    async def begin(self, header: ItemHeader, batch: Batch | None = None, note: bytes = b"") -> int:
        """Journals an item, and returns its number. It is sent in its turn. Raises `RunLost`, `OSError`."""
        async with self._beginning:
            self._check()
            ask = Ask(self._newest + 1, encode_item(header), batch)
            writing = asyncio.ensure_future(asyncio.to_thread(self._journal.write_item, ask, note))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:  # who opens the run again must find the item whole, or not at all
                await asyncio.wait([writing])
                raise
            self._newest = ask.number
            self._kept[ask.number] = ask if ask.number <= self._base + self._credit else None
        self._changed.set()
        return ask.number

    async def answer_to(self, number: int) -> Answered:
        """Returns the result of an item, also of a failed one. Raises `RunLost`."""
        if number in self._answered:
            if (known := await asyncio.to_thread(self._journal.read_answer, number)) is None:
                raise RunLost(f"the answer to item {number} of run {self.run_id} is not kept any more")
            return known
        self._check()
        future = self._answers.setdefault(number, asyncio.get_running_loop().create_future())
        return await asyncio.shield(future)

    # --- the wire ---

    async def _send(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (session := self._session) is not None and self._sent < min(self._newest, self._base + self._credit):
                number = self._sent + 1
                ask = self._kept.get(number) or (await asyncio.to_thread(self._journal.read_item, number))[0]
                if session == self._session and number == self._sent + 1:
                    self._sent = number
                    await self._link.send(Ask(number, ask.header, ask.batch, session))
                    if number in self._kept:
                        self._kept[number] = None

    async def _receive(self) -> None:
        while self._lost is None:
            message = await self._link.receive()
            while not await self._carried_out(message):  # noqa: ASYNC110 - nothing announces room on a disk
                await asyncio.sleep(AGAIN_SECONDS)

    async def _carried_out(self, message: ToOrchestrator) -> bool:
        """Returns False if the journal takes nothing, such as on a full disk: the same message must then come again."""
        try:
            await self._carry_out(message)
        except OSError as error:
            if self.reason != (reason := f"the service's journal takes nothing: {error}"):
                logger.error("run %s waits: %s", self.run_id, reason)
            self.reason = reason
            return False
        if self._session is not None:
            self.reason = ""
        return True

    async def _carry_out(self, message: ToOrchestrator) -> None:
        """Carries out a message. The same again changes nothing. Raises `OSError` and `RunLost`."""
        match message:
            case Ready(next_step, credit, session):
                lacking = [
                    number for number in range(1, next_step) if number not in self._answered and number in self._kept
                ]
                if lacking and self._newest < next_step:
                    self._session = None
                    await self.begin(ItemHeader())  # its answer says that no earlier one will come any more
                self._session, self._credit, self.reason = session, credit, ""
                self._base = self._sent = next_step - 1
                self._ready.set()
                self._changed.set()
            case Answered() as answered:
                await self._take(answered)
            case Acknowledged(_, durable) if durable:
                await self._forget(durable)
            case Waiting(reason):
                self._session, self.reason = None, reason
            case Rejected(number, reason, session):
                logger.warning("run %s: the trainer refused a message: %s", self.run_id, reason)
                if number is not None and session == self._session and number in self._kept.keys() - self._answered:
                    await self._replace(number, reason)
            case Evicted(reason):
                self._lose(RunLost(reason))
            case Bye():
                self._session, self.reason = None, "the trainer has left"
            case _:
                pass

    async def _take(self, answered: Answered) -> None:
        for number in [each for each in self._kept if each < answered.number and each not in self._answered]:
            said = "its result was lost with two processes; it may have been carried out"
            await self._settle(Answered(number, answered.step, "trainer", said))
        await self._settle(answered)
        self._base = max(self._base, answered.number)
        self._changed.set()

    async def _replace(self, number: int, reason: str) -> None:
        """Sends an item without any effect in place of one that the trainer cannot read, and would wait for."""
        if number in self._refused:
            self._lose(RunLost(f"the trainer cannot read item {number}: {reason}"))
            return
        former, note = await asyncio.to_thread(self._journal.read_item, number)
        header = ItemHeader(spoils=former.batch is not None)
        ask = Ask(number, encode_item(header), None)
        await asyncio.to_thread(self._journal.write_item, ask, note)
        self._refused[number], self._kept[number] = reason, ask
        if (session := self._session) is not None and number <= self._sent:
            await self._link.send(Ask(number, ask.header, None, session))

    async def _settle(self, answered: Answered) -> None:
        number = answered.number
        if number in self._refused and not answered.fault:
            answered = Answered(
                number, answered.step, "trainer", f"the trainer cannot read it: {self._refused[number]}"
            )
        if number not in self._answered:
            await asyncio.to_thread(self._write_answer, answered)
            self._answered.add(number)
            self._note_update(answered)
        else:
            told = await asyncio.to_thread(self._journal.read_answer, number)
            if told is not None and not told.fault and (answered.fault or answered.step != told.step):
                lost = (
                    f"item {number} had led to step {told.step}, and was made anew after a loss: it now led to step "
                    f"{answered.step}{f' and failed: {answered.text}' if answered.fault else ''}. The weights are not those that "
                    "its client knows"
                )
                await asyncio.to_thread(self._journal.write_lost, lost)
                raise RunLost(lost)
        if (future := self._answers.pop(number, None)) is not None and not future.done():
            future.set_result(answered)

    def _write_answer(self, answered: Answered) -> None:
        self._journal.write_answer(answered)
        try:
            self._receipts.append(answered)
        except FileNotFoundError as error:  # somebody has removed the run's directory
            logger.warning("run %s: item %d has no receipt: %s", self.run_id, answered.number, error)

    async def _forget(self, durable: int) -> None:
        """Forgets the items that a checkpoint of this step covers."""
        covered = max((number for step, number in self._updates.items() if step <= durable), default=0)
        self._link.durable_up_to(durable)
        for number in [number for number in self._kept if number <= covered and number in self._answered]:
            self._kept[number] = None
        if (last := min(covered, self._newest - KEPT_ANSWERS)) > 0:
            await asyncio.to_thread(self._journal.forget, last)
            self._kept = {number: ask for number, ask in self._kept.items() if number > last}
            self._answered = {number for number in self._answered if number > last}
            self._updates = {step: number for step, number in self._updates.items() if step >= durable}

    def _lose(self, lost: RunLost) -> None:
        self._lost, self._session, self.reason = lost, None, str(lost)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(type(lost)(str(lost)))
                future.exception()  # nobody may wait for it
        self._answers.clear()
        self._ready.set()


def checked(answered: Answered) -> Answered:
    """Returns an answer. Raises `ItemFailed` if the item failed."""
    if answered.fault:
        raise ItemFailed(answered.text, by_asker=answered.fault == "asker")
    return answered
