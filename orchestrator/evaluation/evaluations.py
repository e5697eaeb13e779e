"""The evaluations of a run beside its training: plays the due ones, one after the other, and writes their results.

`due.py` decides which are due, the scheduler when a rollout may start. A result is written in an order that a kill at any
moment leaves whole: records, best weights, line. After a resume, an evaluation without its line is played again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from counterpoint.inference.base import InferenceError
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.orchestrator.evaluation import weights
from counterpoint.orchestrator.evaluation.attempt import EvaluationAttempt
from counterpoint.orchestrator.evaluation.due import DueEvaluations
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE, evaluated_steps
from counterpoint.orchestrator.evaluation.loading import LoadedEvaluation
from counterpoint.orchestrator.evaluation.result import EvaluationResult
from counterpoint.orchestrator.evaluation.versions import serving_adapter
from counterpoint.orchestrator.rollouts.players import GroupsPool
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.scheduling.events import (
    CancelEvaluation,
    EndEvaluation,
    EvaluationInstruction,
    EvaluationRequested,
    EvaluationRolloutEnded,
    StartEvaluationRollouts,
)
from counterpoint.orchestrator.step.records import write_records
from counterpoint.run.branches import origin_of
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport.files.atomic import publish_directory, published_steps, remove_directory
from counterpoint.transport.files.json_lines import append_line
from counterpoint.transport.records import Rollout

logger = logging.getLogger(__name__)

Handle = Callable[[EvaluationRequested | EvaluationRolloutEnded], None]


class Evaluations:
    """Plays a run's evaluations.

    `handle` receives the scheduler's events, `publish` the metrics of each result. `on_progress` is called for each rollout.
    `say` receives an evaluation's progress, for people, and an empty text once it has ended.
    """

    def __init__(
        self,
        config: RunConfig,
        loaded: Sequence[LoadedEvaluation],
        pool: GroupsPool,
        servers: InferencePool,
        *,
        handle: Handle,
        publish: Callable[[dict[str, float]], None],
        on_progress: Callable[[], None],
        say: Callable[[str], None],
        transcribe: Transcriber | None = None,
    ) -> None:
        """`pool` is that of training, at `servers`. Blocks: reads the former results. Raises `OSError`."""
        self._config = config
        self._loaded = {each.config.name: each for each in loaded}
        self._pool, self._servers = pool, servers
        self.opponents: Mapping[str, GroupsPool] = {}
        """The opponents by name, set before the first version."""
        self._handle = handle
        self._publish = publish
        self._on_progress = on_progress
        self._say = say
        self._transcribe = transcribe
        self._exact = config.training.lora is not None
        done, origin = evaluated_steps(config.run_dir) if loaded else {}, origin_of(config.run_dir)
        self._due = DueEvaluations(config.evaluations, 0 if origin is None else origin.step, config.steps, done)
        for name in self._loaded:
            self._take_up_held(name, done.get(name, -1))
        self._versions: asyncio.Queue[int] | None = asyncio.Queue() if loaded else None
        """Versions that wait for `run`, or None if nothing will play them."""
        self._newest = -1
        """The newest version that inference has loaded."""
        self._seen = -1
        """The newest version with known due evaluations."""
        self._changed = asyncio.Condition()
        self._holding = asyncio.Lock()
        """Held during `hold`: an evaluation may begin while the weights of its step are on their way."""
        self._playing: EvaluationAttempt | None = None
        self._rollouts: asyncio.TaskGroup
        self._ended = asyncio.Event()
        self._busy = False
        self._cancelled = False
        self._finishing = False
        """Whether the run has made all steps, and waits for evaluations alone."""
        self._number = 0
        self._player: asyncio.Task[None] | None = None
        self._unreported: dict[str, float] = {}
        self._shares = {each.config.name: each.config.share for each in loaded}

    def set_shares(self, config: RunConfig) -> None:
        """Uses this configuration's shares for evaluations that begin from now on."""
        self._shares = {evaluation.name: evaluation.share for evaluation in config.evaluations}

    @property
    def all_done(self) -> bool:
        """Whether the last version was evaluated, and nothing is in progress."""
        return self._due.all_begun and not self._busy

    def need_version(self, version: int) -> bool:
        """Returns whether anything is generated with a policy version. After the last step, only evaluations need one."""
        return version < self._config.steps or not self.all_done

    def policy_updated(self, version: int) -> None:
        """Notes that inference answers with policy version `version` from now on."""
        self._newest = version
        if self._versions is not None:
            self._versions.put_nowait(version)

    async def run(self) -> None:
        """Plays due evaluations until cancelled, also by a `CancelEvaluation`. Raises `OSError` (disk full)."""
        if self._versions is None:
            return
        async with asyncio.TaskGroup() as tasks:
            self._player = tasks.create_task(self._play_due(), name="evaluations")
            watcher = tasks.create_task(self._watch_versions(self._versions), name="versions to evaluate")
            await asyncio.wait({self._player})
            watcher.cancel()
            self._versions = None

    async def finish(self) -> None:
        """Waits until the last version is loaded and evaluated. One that is not loaded in time is not evaluated."""
        if self.all_done:  # as in a resume of a run that was evaluated: it loads no version
            return
        self._finishing = True
        self._say_progress()
        limit = self._config.trainer_timeout_seconds
        async with self._changed:
            try:
                async with asyncio.timeout(limit):
                    await self._changed.wait_for(lambda: self._cancelled or self._seen >= self._config.steps)
            except TimeoutError:
                error = f"policy version {self._config.steps} was not loaded within {limit:g} s, and is not evaluated"
                logger.warning("evaluations: %s", error)
                for name in self._loaded:
                    await self._write_line({"evaluation": name, "step": self._config.steps, "error": error})
            await self._changed.wait_for(lambda: self._cancelled or self._idle)

    def _say_progress(self) -> None:
        """Shows the evaluation's progress, and once no step is left also the version that it waits for."""
        awaited = f"waiting for policy version {self._config.steps}, to evaluate it" if self._finishing else ""
        self._say(awaited if self._playing is None else self._playing.in_words())

    @property
    def _idle(self) -> bool:
        return not self._busy and not self._due.any_waiting

    def execute(self, instruction: EvaluationInstruction) -> None:
        """Executes an instruction of the scheduler about the evaluation in progress."""
        match instruction:
            case StartEvaluationRollouts(evaluation_id, first, count) if not self._cancelled:
                attempt = self._playing
                assert attempt is not None
                for index in range(first, first + count):
                    self._rollouts.create_task(self._play(attempt, evaluation_id, index))
            case EndEvaluation():
                self._ended.set()
            case CancelEvaluation():
                self.cancel()

    def cancel(self) -> None:
        """Ends the evaluations: nothing more is played."""
        self._cancelled = True
        if self._player is not None:
            self._player.cancel()

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of results since the last call."""
        metrics, self._unreported = self._unreported, {}
        return metrics

    # --- due evaluations ---

    def _take_up_held(self, name: str, done: int) -> None:
        """Makes an adapter's interrupted evaluation due again, with the weights that were held for it."""
        *older, newest = [-1, *weights.held_steps(self._config.run_dir, name)]
        for step in (each for each in (*older, newest) if each >= 0):
            if step == newest and step > done and self._exact:
                self._due.wait_again(name, step)
            else:
                weights.release(self._config.run_dir, name, step)

    async def _watch_versions(self, versions: asyncio.Queue[int]) -> None:
        while True:
            version = await versions.get()
            for name, skipped in self._due.version_loaded(version):
                if skipped is not None:
                    logger.warning(
                        "evaluation %s of step %d is skipped: step %d is due before it could begin",
                        name,
                        skipped,
                        version,
                    )
                    await in_thread(weights.release, self._config.run_dir, name, skipped)
                if self._exact:
                    await self._hold(name, version)
            await self._notify(seen=version)

    async def _notify(self, seen: int | None = None) -> None:
        async with self._changed:
            self._seen = self._seen if seen is None else seen
            self._changed.notify_all()

    async def _hold(self, name: str, step: int) -> Path | None:
        try:
            async with self._holding:
                return await in_thread(weights.hold, self._config.run_dir, name, step)
        except FileNotFoundError:
            logger.warning("evaluation %s: the weights of step %d were removed before they could be held", name, step)
            return None

    # --- playing ---

    async def _play_due(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._newest >= 0 and self._due.any_waiting)
            due = self._due.next()
            assert due is not None
            name, step = due
            # Full weights have moved on since it was due.
            step = step if self._exact else self._newest
            self._busy = True
            await self._evaluate(self._loaded[name], step)
            self._busy = False
            await self._notify()

    async def _evaluate(self, loaded: LoadedEvaluation, step: int) -> None:
        config = loaded.config
        held = await self._hold(config.name, step) if self._exact or config.keep_best is not None else None
        try:
            async with self._policy(step, held) as pool:
                result, rollouts = await self._result(loaded, step, pool)
        except (InferenceError, FileNotFoundError, ValueError) as error:
            logger.error("evaluation %s of step %d could not be played: %s", config.name, step, error)
            await self._write_line({"evaluation": config.name, "step": step, "error": str(error)})
        else:
            await in_thread(self._write_records, config.name, step, rollouts)
            if held is not None and await in_thread(weights.keep_if_best, self._config.run_dir, result, held):
                logger.info("step %d is the best by %s so far: %.4g", step, config.keep_best, result.score)
            await self._write_line(result.line)
            logger.info("%s", result.in_words())
            self._unreported |= result.metrics()
            self._publish(result.metrics())
        await in_thread(weights.release, self._config.run_dir, config.name, step)

    @asynccontextmanager
    async def _policy(self, step: int, held: Path | None) -> AsyncIterator[GroupsPool]:
        if not self._exact:
            yield self._pool
            return
        if held is None:
            raise FileNotFoundError(f"the weights of step {step} are gone")
        async with serving_adapter(self._config, self._servers, step, held) as pool:
            yield pool

    async def _result(
        self, loaded: LoadedEvaluation, step: int, pool: GroupsPool
    ) -> tuple[EvaluationResult, Sequence[Rollout]]:
        self._number += 1
        attempt = self._playing = EvaluationAttempt(loaded, step, pool, self.opponents)
        self._ended.clear()
        async with asyncio.TaskGroup() as self._rollouts:
            self._handle(EvaluationRequested(self._number, loaded.rollouts, self._shares[loaded.config.name]))
            self._say_progress()
            await self._ended.wait()
        self._playing = None
        self._say("")
        return await attempt.result(), attempt.rollouts

    async def _play(self, attempt: EvaluationAttempt, evaluation_id: int, index: int) -> None:
        try:
            await attempt.play(index)
        except asyncio.CancelledError:
            self._cancelled = True  # as all others are: none is started in its place
            raise
        finally:
            self._on_progress()
            self._say_progress()
            self._handle(EvaluationRolloutEnded(evaluation_id, index))

    # --- writing ---

    async def _write_line(self, line: dict[str, Any]) -> None:
        await in_thread(append_line, self._config.run_dir / EVALUATIONS_FILE, line, durable=True)

    def _write_records(self, name: str, step: int, rollouts: Sequence[Rollout]) -> None:
        """Publishes `evaluations/<name>/step_N/`, and removes all but the newest `keep_rollouts`. Blocks."""
        directory = self._config.run_dir / "evaluations" / name
        # There is one of an evaluation that was interrupted before its line was written.
        remove_directory(directory / f"step_{step}")
        columns = {each.name: each.state_columns for each in self._loaded[name].config.environments}
        with publish_directory(directory / f"step_{step}") as partial:
            write_records(partial / "rollouts.jsonl", rollouts, columns, self._transcribe)
        for old in published_steps(directory)[: -self._config.keep_rollouts]:
            remove_directory(directory / f"step_{old}")
