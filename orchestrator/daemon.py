"""The orchestrator's daemon: one process, one loop, one run. It wires the components and decides nothing.

`startup` brings up inference, trainer and the first policy; `main_loop` waits for the last step
while the dispatcher works; `shutdown` drains and commits what is complete.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from cluster.notify import notify
from environments.base import EnvironmentContext
from environments.chat import Chat
from environments.describe_error import describe_error
from environments.lifecycle import started
from environments.mix import ExamplesChangedError, mix_of
from inference.answer_bounds import read_bounds
from inference.pool.pool import InferencePool
from inference.pool.sources import OPERATOR_FILE
from orchestrator import metrics
from orchestrator.changes import Changes, read_changes
from orchestrator.decisions import Decision, DecisionLog
from orchestrator.dispatcher import Dispatcher
from orchestrator.ending import first_version, until_durable
from orchestrator.evaluation.evaluations import Evaluations
from orchestrator.evaluation.loading import environments_started
from orchestrator.failure_report import report_failure
from orchestrator.loaded import Loaded, chats_of, load, load_chosen_advantage
from orchestrator.logging_setup import logging_to, run_context, set_level
from orchestrator.loop_health.blame import LoopBlame
from orchestrator.loop_health.gc_tuning import RolloutCounts, collect_as_memory_grows, freeze_gc, infrequent_gc
from orchestrator.loop_health.lag import EventLoopLagMonitor
from orchestrator.loop_health.threads import give_environments_threads, in_thread, prompt_switching
from orchestrator.loop_health.watchdog import awaiting
from orchestrator.metrics import MetricsLine
from orchestrator.opponents import opponents_of
from orchestrator.policy import PolicyWatcher, check_base_model
from orchestrator.reports import Reports
from orchestrator.rollouts.playing import Playing
from orchestrator.rollouts.tracing import RolloutTracing
from orchestrator.rollouts.transcripts import Transcriber
from orchestrator.run_directory import (
    ConfigurationError,
    check_control,
    claim_of,
    refusal,
    rewind,
    taken_over,
    write_config,
)
from orchestrator.scheduling.events import (
    CapacityChanged,
    LimitChanged,
    PauseRequested,
    PolicyUpdated,
    PolicyUpdateStarting,
    ResumeRequested,
)
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.signals import ShutdownSignals
from orchestrator.steering import Steering
from orchestrator.step import differences, discarded
from orchestrator.step.advantages import Advantage
from orchestrator.step.asked_dumps import AskedDumps
from orchestrator.step.boundary import StepBoundary
from orchestrator.step.checkpoint import Checkpoint, CheckpointError, committed_lines, identity_of, load_newest
from orchestrator.step.filters import with_vocabulary
from orchestrator.step.merge_process import MergeProcess
from orchestrator.step.sender import Sender
from orchestrator.teacher import teacher_of
from orchestrator.telemetry import RunTelemetry
from run.changes import JOURNAL, Change
from run.config import RunConfig
from run.pause import Pause, read_pause
from transport.process.descriptors import allow_connections
from transport.process.permanent_errors import exit_code_of
from transport.wires.open import open_link

logger = logging.getLogger(__name__)

_CONTROL_SECONDS = 0.5
"""Between two checks of `control/`."""


def run(
    config: RunConfig,
    on_ready: Callable[[], None],
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> int:
    """Runs one run to its end, or until a signal; in the main thread. `on_ready` is called when rollouts begin.

    Returns the exit code: 0 done; 1 failed; 2 bad configuration; 3 evicted; 128 + the signal's number if a signal ended the run
    early, drained. Every failure is logged with its reason and leaves the last commit intact.
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
            freeze_gc()  # what is imported by now: a pause of some 40 ms before the loop runs, and not on it
            return _run_to_its_end(runner.get_loop(), _serve(config, on_ready, signals))
    except (
        ConfigurationError,
        OSError,
    ) as error:  # raised before the loop runs, such as for a log that cannot be opened
        sys.stderr.write(f"counterpoint: error: {error}\n")
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
        self._config = config
        self._on_ready = on_ready
        self._signals = signals
        reports = self._reports = Reports(config, self._describe)
        self._outages, self._watchdog, self._activity = reports.outages, reports.watchdog, reports.activity
        self._lag = EventLoopLagMonitor(config.lag, self._watchdog.beat)
        self._blame = LoopBlame(config.lag.blame_seconds)
        self._rollout_counts = RolloutCounts()
        self._decisions = DecisionLog(config.run_dir)
        self._scheduler: Scheduler | None = None
        self._is_paused = False
        self._steering: Steering | None = None

    async def serve(self) -> bool:
        """Runs to the last step or until a signal; returns whether the run is done. Raises what ended it otherwise."""
        self._threads = give_environments_threads(self._config.schedule.max_inflight_rollouts)
        allow_connections(self._config.schedule.max_inflight_rollouts)
        async with AsyncExitStack() as resources, asyncio.TaskGroup() as tasks:
            self._background: list[asyncio.Task[None]] = []
            self._tasks = tasks
            resources.enter_context(self._blame)
            resources.push_async_callback(in_thread, self._decisions.flush)
            resources.push_async_callback(self._activity.close)
            self._run_in_background(
                self._lag.run(),
                self._watchdog.run(),
                self._decisions.run(),
                self._activity.run(),
                collect_as_memory_grows(self._rollout_counts),
            )
            done, exit_code = False, 1
            try:
                if await self._unless_stopped(self.startup(resources)):
                    done = await self._unless_stopped(self.main_loop())
                    await self.shutdown(done)
                exit_code = 0 if done else self._signals.exit_code
            finally:
                notify("STOPPING=1")
                # Tasks and threads that environments left running must not delay the exit for ever.
                self._signals.end_in_time(exit_code)
            for task in self._background:
                task.cancel()
        return done

    async def startup(self, resources: AsyncExitStack) -> None:
        """Loads what the run needs, connects to inference and trainer, and starts the scheduling with the trainer's policy.

        A run whose steps are all committed needs only the trainer.
        """
        given = self._given = self._config
        checkpoint = await in_thread(_resume, given) if given.resume else None
        self._identity = identity_of(given)
        self._config, self._journal = await in_thread(_read_changes, given, checkpoint)
        config = self._config
        set_level(config.log_level)
        loaded = await in_thread(load, config)
        await in_thread(write_config, given)  # the trainer reads the changes from their journal
        self._run_in_background(self._watch_control())  # a refusal from now on is of this configuration
        merge_chunk = await resources.enter_async_context(MergeProcess()) if config.use_process_pool else None
        self._assemble(loaded, checkpoint, merge_chunk, resources)

        self._run_in_background(self._sender.run())
        if self._all_committed and self._evaluations.all_done:
            logger.info(
                "all %d steps of run %s are committed; the trainer may not have all of them",
                config.steps,
                config.run_id,
            )
            self._on_ready()
            return
        await self._start_environments(loaded, resources)
        with awaiting("the first healthy inference server", self._pool.describe_sources()):
            await self._pool.start()
        await check_base_model(self._pool, config)
        opponents = await resources.enter_async_context(opponents_of(config, self._outages))
        self._playing.opponents = self._evaluations.opponents = opponents
        self._playing.teacher = await resources.enter_async_context(teacher_of(config, loaded.chat, self._outages))
        if config.trace_rollouts > 0:
            self._playing.tracing = RolloutTracing(self._activity.spans, config.run_id, config.trace_rollouts)
        version = await first_version(self._sender, config)
        policy = PolicyWatcher(
            config.run_dir, self._pool, _adapter(config), self._report_policy, self._evaluations.need_version,
            lambda: self._sender.newest_step,
        )  # fmt: skip
        steering = self._steering = await in_thread(self._make_steering, loaded.chat)
        self._set_paused(await in_thread(read_pause, config.run_dir))
        await steering.take_all()  # before the first rollout begins
        await policy.load_first(version)
        self._run_in_background(policy.run(), steering.run(), self._evaluations.run())
        freeze_gc()
        self._on_ready()
        logger.info("run %s has started: %d steps, %s", config.run_id, config.steps, config.run_dir)

    def _assemble(
        self,
        loaded: Loaded,
        checkpoint: Checkpoint | None,
        merge_chunk: MergeProcess | None,
        resources: AsyncExitStack,
    ) -> None:
        """Creates the components, which `resources` closes, and restores the checkpoint's state."""
        filters = with_vocabulary(self._config.filters, loaded.chat.vocabulary)
        config = self._config = self._config.model_copy(update={"filters": filters})
        environments = loaded.environments
        try:
            telemetry = resources.enter_context(RunTelemetry(config, self._lag))
            link = open_link(config.transport, config.output_dir, config.run_id, self._outages)
            model = _adapter(config) or config.served_model or config.model
            bounds = read_bounds(Path(config.model), loaded.chat.vocabulary)
            operator_file = config.output_dir / OPERATOR_FILE
            self._pool = InferencePool(
                config.inference,
                model,
                self._on_capacity,
                operator_file,
                bounds,
                claim_of(config),
                outages=self._outages,
            )
            played = {name: environment.environment for name, environment in environments.items()}
            self._mix = mix_of(config.environments, played, config.seed)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        resources.push_async_callback(self._pool.close)
        newest_step = checkpoint.step if checkpoint is not None else 0
        self._sender = Sender(
            link,
            config.run_dir,
            config.run_id,
            newest_step,
            config.transport.largest_batch,
            self._reports.waiting,
            self._activity.spans,
        )
        resources.push_async_callback(self._sender.close)
        self._activity.observe(self._pool, newest_step)

        self._scheduler = Scheduler(config.schedule, config.steps, self._mix)
        self._playing = Playing(config, environments, loaded.chats, self._pool)
        self._dispatcher = Dispatcher(
            config,
            scheduler=self._scheduler,
            playing=self._playing,
            advantage=loaded.advantage,
            sender=self._sender,
            boundary=StepBoundary(
                config.run_dir,
                config.run_id,
                {environment.name: environment.state_columns for environment in config.environments},
                gather_chunk_size=config.gather_chunk_size,
                keep_checkpoints=config.keep_checkpoints,
                keep_rollouts=config.keep_rollouts,
                merge_chunk=merge_chunk,
                transcribe=_transcriber(config, loaded.chat),
            ),
            lag=self._lag,
            blame=self._blame,
            rollout_counts=self._rollout_counts,
            decisions=self._decisions,
            tasks=self._tasks,
            publish=lambda line: self._publish(telemetry, line),
            report_discarded=lambda report: self._reports.discarded(report, self._tasks),
            on_progress=self._watchdog.progress,
            commit_in_progress=self._signals.commit_in_progress,
            identity=self._identity,
        )
        self._evaluations = self._dispatcher.evaluations = Evaluations(
            config,
            loaded.evaluations,
            self._pool,
            handle=self._dispatcher.handle,
            publish=telemetry.publish_lasting,
            on_progress=self._watchdog.progress,
            transcribe=_transcriber(config, loaded.chat),
        )
        self._run_in_background(telemetry.watch(self._pool, self._scheduler, self._outages))
        if checkpoint is not None:
            try:
                self._dispatcher.restore(checkpoint)
            except ExamplesChangedError as error:
                raise ConfigurationError(str(error)) from error
            except ValueError as error:
                raise CheckpointError(f"the checkpoint of step {checkpoint.step} cannot be resumed: {error}") from error
            logger.info("resuming after step %d", checkpoint.step)
        if config.resume:
            self._decisions.of_run(Decision.RESUMED, newest_step)

    async def _start_environments(self, loaded: Loaded, resources: AsyncExitStack) -> None:
        """Starts the environments that hold resources; `resources` closes them. Raises what `refusal` returns."""
        config = self._config
        directory, model = config.run_dir / "environments", Path(config.model)
        try:
            for name, environment in loaded.environments.items():
                context = EnvironmentContext(name, directory / name, model, config.seed)
                await resources.enter_async_context(started(environment.environment, context))
            evaluating = environments_started(loaded.evaluations, directory / "evaluations", model, config.seed)
            await resources.enter_async_context(evaluating)
        except ValueError as error:
            raise refusal(error) from error

    def _make_steering(self, chat: Chat) -> Steering:
        """Returns what takes up requests to the run from now on. Blocks."""

        def prepare(config: RunConfig) -> Callable[[], None]:
            advantage, chats = load_chosen_advantage(config), chats_of(config, chat)
            filters = with_vocabulary(config.filters, chat.vocabulary)
            return lambda: self._reconfigure(config.model_copy(update={"filters": filters}), advantage, chats)

        sender, between_steps, run_dir = self._sender, self._dispatcher.between_steps, self._config.run_dir
        changes = Changes(
            self._config, self._journal, given=self._given, steps=sender, between_steps=between_steps, prepare=prepare
        )
        dumps = AskedDumps(run_dir, self._config.steps, sender, between_steps)
        self._dispatcher.annotate, self._dispatcher.is_dump_asked = changes.annotation, dumps.is_asked
        return Steering(
            run_dir,
            changes=changes,
            dumps=dumps,
            steps=sender,
            set_paused=self._set_paused,
            every_poll=self._rest,
        )

    def _reconfigure(self, config: RunConfig, advantage: Advantage, chats: dict[str, Chat]) -> None:
        """Uses another configuration from now on."""
        former, self._config = self._config.schedule.max_inflight_rollouts, config
        self._mix.reweight({environment.name: environment.ratio for environment in config.environments})
        self._evaluations.set_shares(config)
        self._playing.reconfigure(config, chats)
        self._dispatcher.reconfigure(config, advantage)
        set_level(config.log_level)
        if (limit := config.schedule.max_inflight_rollouts) != former:
            former_threads, self._threads = self._threads, give_environments_threads(limit)
            former_threads.shutdown(wait=False)
            allow_connections(limit)
            self._dispatcher.handle(LimitChanged(limit))
        self._decisions.of_run(Decision.CHANGED, self._sender.newest_step + 1)

    def _set_paused(self, pause: Pause | None) -> None:
        """Begins or ends a pause, unless it has begun or ended already."""
        if (pause is not None) == self._is_paused:
            return
        self._is_paused = pause is not None
        step = self._sender.newest_step
        self._decisions.of_run(Decision.PAUSED if pause is not None else Decision.CONTINUED, step)
        words = "the run goes on" if pause is None else f"paused{f': {pause.reason}' if pause.reason else ''}"
        logger.info("%s, after step %d of %d", words, step, self._config.steps)
        self._reports.set_status(f"step {step} of {self._config.steps}" + (f"; {words}" if pause is not None else ""))
        self._watchdog.progress()
        self._dispatcher.handle(PauseRequested() if pause is not None else ResumeRequested())

    def _rest(self) -> None:
        """A run that waits to be resumed does not stall."""
        if self._scheduler is not None and self._scheduler.rests:
            self._watchdog.progress()

    @property
    def _all_committed(self) -> bool:
        return self._sender.newest_step >= self._config.steps

    async def main_loop(self) -> None:
        """Waits until the last step is committed here and durable at the trainer; dispatcher and background tasks do the work."""
        if not self._all_committed:
            await self._dispatcher.finished.wait()
        await until_durable(self._sender, self._config, self._watchdog.progress)
        await self._evaluations.finish()
        if self._steering is not None:
            await self._steering.take_all()  # a run may end between two looks
        logger.info("run %s is done: %d steps", self._config.run_id, self._config.steps)

    async def shutdown(self, done: bool) -> None:
        """Drains and commits, unless the run is done."""
        notify("STOPPING=1")
        if not done:
            logger.info("stopping on a signal: draining")
            await self._dispatcher.drain()
            self._decisions.of_run(Decision.DRAINED, self._sender.newest_step)
            logger.info("drained; the run can be resumed after step %d", self._sender.newest_step)

    def _run_in_background(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        self._background += [self._tasks.create_task(coroutine) for coroutine in coroutines]

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` until it ends or a signal cancels it; returns whether it ended."""
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
            await in_thread(check_control, self._config.run_dir)
            await asyncio.sleep(_CONTROL_SECONDS)

    def _on_capacity(self, rollouts: int) -> None:
        logger.debug("inference has capacity for %d concurrent requests", rollouts)
        self._dispatcher.handle(CapacityChanged(rollouts))

    def _report_policy(self, event: PolicyUpdateStarting | PolicyUpdated) -> None:
        self._watchdog.progress()
        self._activity.policy(event)
        self._dispatcher.handle(event)
        if isinstance(event, PolicyUpdated):
            self._evaluations.policy_updated(event.version)

    def _publish(self, telemetry: RunTelemetry, line: MetricsLine) -> None:
        telemetry.publish(line)
        self._activity.end_step(line, self._dispatcher.last_phases)
        self._reports.step_committed(line)

    def _describe(self) -> str:
        return "; ".join(self._scheduler.snapshot().waiting_for) if self._scheduler is not None else "not started yet"


def _resume(config: RunConfig) -> Checkpoint | None:
    """Loads the newest checkpoint and rewinds the directory to it. None if the run was killed before its first commit."""
    checkpoint = load_newest(config)
    newest_step = checkpoint.step if checkpoint is not None else 0
    rewind(config.run_dir, newest_step)
    (config.run_dir / discarded.DISCARDED_FILE).unlink(missing_ok=True)
    differences.forget(config.run_dir)
    metrics.repair(config.run_dir / "metrics.jsonl", newest_step, committed_lines(config.run_dir))
    return checkpoint


def _read_changes(given: RunConfig, checkpoint: Checkpoint | None) -> tuple[RunConfig, list[Change]]:
    """Returns the configuration after its changes, and these. Raises `ConfigurationError` where they do not fit it."""
    try:
        return read_changes(given, checkpoint.step if checkpoint is not None else 0)
    except ValueError as error:
        path = given.run_dir / "control" / JOURNAL
        raise ConfigurationError(f"{path} holds changes that do not fit the configuration: {error}") from error


def _adapter(config: RunConfig) -> str | None:
    """Returns the name of the run's LoRA adapter at the servers; None if full weights are trained."""
    return config.run_id if config.training.lora is not None else None


def _transcriber(config: RunConfig, chat: Chat) -> Transcriber | None:
    """Returns what decodes the rollouts of the records; None if records have no text."""
    return Transcriber(chat.transcribe, config.recorded_tokens) if config.recorded_tokens else None
