"""Takes up changes of a run's configuration while it runs: checks them, journals them, and uses them from the next step on.

`counterpoint/run/changes.py` has the protocol.

A change is journalled between two step boundaries, for the next uncommitted step. The trainer trains only committed steps, so
it has read of the change before it opens that step. Rollouts in flight keep the values that they began with: the temperature
travels with every turn, and advantages are computed once, when a group is finalized.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from counterpoint.run.changes import (
    Change,
    ChangeRefused,
    apply,
    begun_at,
    completed,
    edits,
    in_force,
    read_journal,
    values_of,
    without_removed,
    write_journal,
)
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.requests import Answer, ChangeRequest, write_answer
from counterpoint.transport.exact_json import dumps

logger = logging.getLogger(__name__)

LONGEST_VALUE_BYTES = 1000
"""The longest value, as JSON, in a metrics line. A longer one is replaced by its size."""

MOST_ENTRIES, KEPT_ENTRIES = 256, 16
"""The journal's size at which its durable entries are joined, and the number of newest entries that stay as they are."""


class Steps(Protocol):
    """The part of `orchestrator.step.sender.Sender` that is used."""

    durable_step: int

    @property
    def newest_step(self) -> int:
        """The last committed step."""


class Changes:
    """The changes of one run."""

    def __init__(
        self,
        config: RunConfig,
        journal: Sequence[Change],
        *,
        given: RunConfig,
        steps: Steps,
        between_steps: AbstractAsyncContextManager[object],
        prepare: Callable[[RunConfig], Callable[[], None]],
    ) -> None:
        """`config` is `given`, the run's file, with the changes of the journal.

        `prepare` loads the components that a configuration names, in a thread. It returns a function that puts them in place,
        on the loop.
        """
        self._config = config
        self._given = given
        self._journal = list(journal)
        self._steps = steps
        self._between_steps = between_steps
        self._prepare = prepare

    def annotation(self, step: int) -> dict[str, Any]:
        """Returns the `changes` of a step's metrics line: the values by key that begin at this step."""
        values = {key: _short(value) for key, value in begun_at(self._journal, step).items()}
        return {"changes": values} if values else {}

    async def take(self, request: ChangeRequest) -> None:
        """Carries a request out, unless that has happened before, and answers it.

        Raises `OSError`, and the request then stays.
        """
        known = [change.step for change in self._journal if change.request_id == request.request_id]
        try:
            step = known[0] if known else await self._make(request)
            answer = Answer(request_id=request.request_id, outcome="done", step=step)
        except ValueError as error:
            logger.warning("a change of run %s is refused: %s", self._config.run_id, error)
            answer = Answer(request_id=request.request_id, outcome="refused", reason=str(error))
        await in_thread(write_answer, self._config.run_dir, answer, request)

    async def _make(self, request: ChangeRequest) -> int:
        changes = completed(self._config, request.changes)
        config = apply(self._config, changes)
        put_in_place = await in_thread(self._prepare, config)
        async with self._between_steps:
            step = self._steps.newest_step + 1
            if step > config.steps:
                raise ChangeRefused(f"all {config.steps} steps of the run are committed: none is left for the change")
            given = values_of(self._given, changes)
            change = Change(request_id=request.request_id, step=step, changes=changes, given=given)
            journal = [*_compact(self._journal, self._steps.durable_step), change]
            await in_thread(write_journal, config.run_dir, journal)
            self._config, self._journal = config, journal
            put_in_place()
        logger.info("from step %d on: %s", step, ", ".join(f"{key} = {value!r}" for key, value in changes.items()))
        return step


def read_changes(given: RunConfig, newest_step: int) -> tuple[RunConfig, list[Change]]:
    """Returns a run's configuration after its changes, and their journal. A value that was edited in the file since then holds.

    Leaves out a change of an environment or evaluation that the file no longer has. Raises `ValueError` for a journal that is
    damaged or does not fit the file.
    """
    journal = without_removed(given, read_journal(given.run_dir))
    if edited := edits(given, journal):
        change = Change(request_id=f"edited-{newest_step}", step=newest_step + 1, changes=edited, given=edited)
        journal.append(change)
        write_journal(given.run_dir, journal)
    return (apply(given, in_force(journal, given.steps)) if journal else given), journal


def _short(value: Any) -> Any:
    """Returns a short value as it is, and of a long one its size."""
    size = len(dumps(value))
    return value if size <= LONGEST_VALUE_BYTES else f"({size} bytes)"


def _compact(journal: list[Change], durable: int) -> list[Change]:
    """Joins changes of steps that will not be trained again, if they were answered long ago."""
    if len(journal) < MOST_ENTRIES:
        return journal
    old = [change for change in journal[:-KEPT_ENTRIES] if change.step <= durable]
    if not old:
        return journal
    given = {key: value for change in old for key, value in change.given.items()}
    return [old[-1].model_copy(update={"changes": in_force(old, durable), "given": given}), *journal[len(old) :]]
