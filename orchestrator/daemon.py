"""The orchestrator's daemon: one process, one loop, one run. It starts the run's components, waits, and shuts them down.

`startup` brings up inference, trainer and the first policy. `main_loop` waits for the last step while the dispatcher works.
`shutdown` drains and commits the complete steps. `orchestrator/components.py` builds and connects the components.

Next in the reading order of `docs/architecture.md`: `orchestrator/components.py`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from counterpoint.environments.describe_error import describe_error
from counterpoint.orchestrator import metrics
from counterpoint.orchestrator.changes import read_changes
from counterpoint.orchestrator.components import Components, RunStart, load
from counterpoint.orchestrator.decisions import Decision
from counterpoint.orchestrator.ending import first_version, until_durable
from counterpoint.orchestrator.failure_report import report_failure
from counterpoint.orchestrator.logging_setup import logging_to, run_context, set_level
from counterpoint.orchestrator.other_servers import check_stock_servers
from counterpoint.orchestrator.policy import check_base_model
from counterpoint.orchestrator.receipts import chain
from counterpoint.orchestrator.reports import Reports
from counterpoint.orchestrator.run_directory import ConfigurationError, check_control, rewind, taken_over, write_config
from counterpoint.orchestrator.signals import ShutdownSignals
from counterpoint.orchestrator.step import differences, discarded
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, committed_lines, load_newest
from counterpoint.orchestrator.step.merge_process import MergeProcess
from counterpoint.run.changes import JOURNAL, Change
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.gc_tuning import collect_as_memory_grows, freeze_gc, infrequent_gc
from counterpoint.run.loop_health.health import LoopMonitors
from counterpoint.run.loop_health.threads import in_thread, prompt_switching
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.run.pause import read_pause
from counterpoint.transport.process.notify import notify, notify_failure
from counterpoint.transport.process.permanent_errors import exit_code_of
from counterpoint.transport.telemetry.start_phases import OVER, enter

logger = logging.getLogger(__name__)

_CONTROL_SECONDS = 0.5
"""Seconds between two checks of `control/`."""


def run(
    config: RunConfig,
    on_ready: Callable[[], None],
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> int:
    """Runs one run to its end, or until a signal, in the main thread. Calls `on_ready` when rollouts begin.

    Returns the exit code: 0 done, 1 failed, 2 bad configuration, 3 evicted, 128 + the signal's number if a signal ended the run
    early, drained. Logs every failure with its reason. The last commit stays intact.
    """
    try:
        with (
            prompt_switching(),
            infrequent_gc(),
            taken_over(config),
            logging_to(config.run_dir / "orchestrator.log", config.log_format, config.log_level),
            ShutdownSignals(config.shutdown_timeout_seconds) as signals,
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):
            freeze_gc()  # all imports so far: a pause of some 40 ms before the loop runs, and not on it
            return _run_to_its_end(runner.get_loop(), _serve(config, on_ready, signals))
    except (
        ConfigurationError,
        OSError,
    ) as error:  # raised before the loop runs, such as for a log that cannot be opened
        sys.stderr.write(f"counterpoint: error: {error}\n")
        notify_failure(str(error))
        return 2 if isinstance(error, ConfigurationError) else exit_code_of(error)


def _run_to_its_end(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, int]) -> int:
    """Runs the loop until `work` is done, and returns its result.

    asyncio stops the loop when a task that an environment started raises `SystemExit` or `KeyboardInterrupt`, besides passing the
    exception to the task that awaits it. This starts the loop again.
    """
    task = loop.create_task(work)
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done():
                logger.critical("the orchestrator failed", exc_info=error)
                return 1
            logger.debug("a task that an environment started raised %s", describe_error(error))


async def _serve(config: RunConfig, on_ready: Callable[[], None], signals: ShutdownSignals) -> int:
    run_context.set(config.run_id)
    try:
        done = await Daemon(config, on_ready, signals).serve()
    except Exception as error:  # noqa: BLE001 - the outermost frame: every failure becomes a log line and an exit code
        return report_failure(error, config.run_dir)
    return 0 if done else signals.exit_code


class Daemon:
    """One process of one run, from start to exit."""

    def __init__(self, config: RunConfig, on_ready: Callable[[], None], signals: ShutdownSignals) -> None:
        self._given = config
        self._on_ready = on_ready
        self._signals = signals
        self._reports = Reports(config, lambda: "not started yet" if self._run is None else self._run.describe())
        self._health = LoopMonitors(config.lag, self._reports.watchdog.beat)
        self._run: Components | None = None

    async def serve(self) -> bool:
        """Runs to the last step or until a signal, and returns whether the run is done.

        Raises the error that ended it otherwise.
        """
        self._health.make_room(self._given.schedule.most_in_flight)
        reports = self._reports
        async with AsyncExitStack() as resources, asyncio.TaskGroup() as tasks:
            self._background: list[asyncio.Task[None]] = []
            self._tasks = tasks
            resources.enter_context(self._health.blame)
            resources.push_async_callback(in_thread, reports.decisions.flush)
            resources.push_async_callback(reports.activity.close)
            self._run_in_background(
                self._health.lag.run(),
                reports.watchdog.run(),
                reports.decisions.run(),
                reports.activity.run(),
                collect_as_memory_grows(self._health.rollout_counts),
            )
            done, exit_code = False, 1
            try:
                if await self._unless_stopped(self.startup(resources)):
                    assert self._run is not None
                    done = await self._unless_stopped(self.main_loop(self._run))
                    await self.shutdown(self._run, done)
                exit_code = 0 if done else self._signals.exit_code
            finally:
                notify("STOPPING=1")
                # Tasks and threads that environments left running must not delay the exit for ever.
                self._signals.end_in_time(exit_code)
            for task in self._background:
                task.cancel()
        return done

    async def startup(self, resources: AsyncExitStack) -> None:
        """Loads the components, connects to inference and trainer, and starts the scheduling with the trainer's policy.

        A run that has committed all its steps needs only the trainer.
        """
        enter("loads and starts environments", beside=True)
        given = self._given
        checkpoint = await in_thread(_resume, given) if given.resume else None
        config, journal = await in_thread(_read_changes, given, checkpoint)
        set_level(config.log_level)
        loaded = await in_thread(load, config)
        await in_thread(write_config, given)  # the trainer reads the changes from their journal
        self._run_in_background(self._watch_control())  # a refusal from now on is of this configuration
        run = self._run = Components(
            RunStart(given, config, journal, checkpoint, loaded),
            self._reports,
            self._health,
            self._signals,
            merge_chunk=await resources.enter_async_context(MergeProcess()) if config.use_process_pool else None,
            tasks=self._tasks,
            resources=resources,
        )
        self._run_in_background(run.show_telemetry(), run.sender.run())
        if run.all_committed and run.evaluations.all_done:
            logger.info(
                "all %d steps of run %s are committed; the trainer may not have all of them",
                config.steps,
                config.run_id,
            )
            self._on_ready()
            enter(OVER, beside=True)
            return
        await run.start_environments(resources)
        enter("waits for a server", beside=True)
        with awaiting("the first healthy inference server", run.pool.describe_sources()):
            await run.pool.start()
        enter("checks the servers", beside=True)
        await check_base_model(run.pool, config)
        run.ignoring_temperature = await check_stock_servers(run.pool, lambda: run.config, loaded.chat)
        await run.start_other_models(resources)
        enter("waits for the trainer's weights", beside=True)
        version = await first_version(run.sender, config)
        enter("weights loaded and proven", beside=True)
        policy, steering = run.make_policy(), await in_thread(run.make_steering)
        run.set_paused(await in_thread(read_pause, config.run_dir))
        await steering.take_all()  # before the first rollout begins
        await policy.load_first(version)
        enter("first answer", beside=True)
        self._run_in_background(
            policy.run(),
            steering.run(),
            run.evaluations.run(),
            run.dispatcher.report_discarded(self._reports.discarded),
        )
        freeze_gc()
        self._on_ready()
        logger.info("run %s has started: %d steps, %s", config.run_id, config.steps, config.run_dir)

    async def main_loop(self, run: Components) -> None:
        """Waits until the last step is committed here and durable at the trainer.

        Dispatcher and background tasks do the work.
        """
        if not run.all_committed:
            await run.dispatcher.finished.wait()
        await until_durable(run.sender, run.config, self._reports.watchdog.progress)
        await run.evaluations.finish()
        if run.steering is not None:
            await run.steering.take_all()  # a run may end between two looks
        logger.info("run %s is done: %d steps", run.config.run_id, run.config.steps)

    async def shutdown(self, run: Components, done: bool) -> None:
        """Drains and commits, unless the run is done."""
        notify("STOPPING=1")
        if not done:
            logger.info("stopping on a signal: draining")
            await run.dispatcher.drain()
            self._reports.decisions.of_run(Decision.DRAINED, run.sender.newest_step)
            logger.info("drained; the run can be resumed after step %d", run.sender.newest_step)

    def _run_in_background(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        self._background += [self._tasks.create_task(coroutine) for coroutine in coroutines]

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` until it ends or a signal cancels it, and returns whether it ended."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._signals.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            return task.done()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.wait({task, stop})

    async def _watch_control(self) -> None:
        while True:
            await in_thread(check_control, self._given.run_dir)
            await asyncio.sleep(_CONTROL_SECONDS)


def _resume(config: RunConfig) -> StepCheckpoint | None:
    """Loads the newest checkpoint and rewinds the directory to it.

    Returns None if the run was killed before its first commit.
    """
    checkpoint = load_newest(config)
    newest_step = checkpoint.step if checkpoint is not None else 0
    rewind(config.run_dir, newest_step)
    for name in (discarded.DISCARDED_FILE, discarded.DROPPED_FILE):
        (config.run_dir / name).unlink(missing_ok=True)
    differences.forget(config.run_dir)
    metrics.repair(config.run_dir / "metrics.jsonl", newest_step, committed_lines(config.run_dir))
    chain.repair(config.run_dir, newest_step)
    return checkpoint


def _read_changes(given: RunConfig, checkpoint: StepCheckpoint | None) -> tuple[RunConfig, list[Change]]:
    """Returns the configuration after its changes, and these. Raises `ConfigurationError` where they do not fit it."""
    try:
        return read_changes(given, checkpoint.step if checkpoint is not None else 0)
    except ValueError as error:
        path = given.run_dir / "control" / JOURNAL
        raise ConfigurationError(f"{path} holds changes that do not fit the configuration: {error}") from error
