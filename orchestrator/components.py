"""The components of one run: built from its configuration, and connected, so that reports of one reach the others.

`load` imports the names in the configuration, and `Components` builds on it. `orchestrator/daemon.py` starts them, waits for
their end and shuts them down.

Next in the reading order of `docs/architecture.md`: `orchestrator/dispatcher.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.lifecycle import check_chat, started
from counterpoint.environments.mix import ExamplesChangedError, mix_of
from counterpoint.environments.rewards.rubric import paid_parts
from counterpoint.environments.workers.load import load_environment
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.inference.pool.sources import OPERATOR_FILE
from counterpoint.orchestrator.changes import Changes
from counterpoint.orchestrator.decisions import Decision
from counterpoint.orchestrator.dispatcher import Dispatcher, RunParts, StepHooks
from counterpoint.orchestrator.early_warnings.watch import Watch
from counterpoint.orchestrator.evaluation.evaluations import Evaluations
from counterpoint.orchestrator.evaluation.loading import LoadedEvaluation, environments_started, load_evaluation
from counterpoint.orchestrator.logging_setup import set_level
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.opponents import opponents_of
from counterpoint.orchestrator.other_servers import check_sampling
from counterpoint.orchestrator.policy import PolicyWatcher
from counterpoint.orchestrator.receipts.chain import ReceiptChain
from counterpoint.orchestrator.receipts.receipt import code_of
from counterpoint.orchestrator.reports import Reports
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment
from counterpoint.orchestrator.rollouts.playing import Playing
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.run_directory import ConfigurationError, claim_of, refusal
from counterpoint.orchestrator.scheduling.events import (
    CapacityChanged,
    Event,
    LimitChanged,
    PauseRequested,
    PolicyUpdated,
    PolicyUpdateStarting,
    ResumeRequested,
)
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.signals import ShutdownSignals
from counterpoint.orchestrator.steering import Steering
from counterpoint.orchestrator.step.advantages import Advantage, load_advantage, try_advantage
from counterpoint.orchestrator.step.asked_dumps import AskedDumps
from counterpoint.orchestrator.step.boundary import StepBoundary
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint, identity_of
from counterpoint.orchestrator.step.differences import compared
from counterpoint.orchestrator.step.filters import with_vocabulary
from counterpoint.orchestrator.step.merge_process import MergeProcess
from counterpoint.orchestrator.step.sender import Sender
from counterpoint.orchestrator.teacher import teacher_of
from counterpoint.orchestrator.telemetry.endpoint import RunTelemetry
from counterpoint.run.batch_files import KeptBatches
from counterpoint.run.changes import Change
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.health import LoopMonitors
from counterpoint.run.pause import Pause
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.wires.open import open_link

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The environments and functions that a configuration names."""

    chat: Chat
    chats: dict[str, Chat]
    """`chat` with each environment's template variables, by the environment's name."""
    advantage: Advantage
    environments: dict[str, LoadedEnvironment]
    evaluations: list[LoadedEvaluation]


def load(config: RunConfig) -> Loaded:
    """Loads environments, advantage function and chat template. Raises the errors of `refusal`."""
    try:
        environments = {e.name: LoadedEnvironment(e, load_environment(e)) for e in config.environments}
        advantage = _load_advantage(config)
        chat = Chat(config.model)
        chats = _chats_of(config, chat)
        for name, loaded in environments.items():
            check_chat(name, loaded.environment, chats[name])
        evaluations = [load_evaluation(config, evaluation, chat) for evaluation in config.evaluations]
        return Loaded(chat, chats, advantage, environments, evaluations)
    except ValueError as error:
        raise refusal(error) from error


@dataclass(frozen=True, slots=True)
class RunStart:
    """The configuration and checkpoint that a run starts with."""

    given: RunConfig
    """The configuration as it was given."""
    config: RunConfig
    """The same after its changes."""
    journal: Sequence[Change]
    """The journal of the changes."""
    checkpoint: StepCheckpoint | None
    """The checkpoint from which the run goes on, or None at its beginning."""
    loaded: Loaded


class Components:
    """The components of one run. Those that need to be closed are in the `resources` that they were built with."""

    def __init__(
        self,
        start: RunStart,
        reports: Reports,
        health: LoopMonitors,
        signals: ShutdownSignals,
        *,
        merge_chunk: MergeProcess | None,
        tasks: asyncio.TaskGroup,
        resources: AsyncExitStack,
    ) -> None:
        """Builds them, and restores the checkpoint's state. Raises `ConfigurationError`, `CheckpointError` and `OSError`."""
        loaded, checkpoint = start.loaded, start.checkpoint
        filters = with_vocabulary(start.config.filters, loaded.chat.vocabulary)
        config = self.config = start.config.model_copy(update={"filters": filters})
        self._start = start
        self._reports = reports
        self._health = health
        self._tasks = tasks
        self._is_paused = False
        self.steering: Steering | None = None
        self.ignoring_temperature: set[str] = set()
        """The stock servers that answer right only at temperature 1."""
        newest_step = checkpoint.step if checkpoint is not None else 0
        try:
            self._telemetry = resources.enter_context(RunTelemetry(config, health.lag))
            link = open_link(config.transport, config.output_dir, reports.outages)
            self._servers = InferencePool(
                config.inference, operator_file=config.output_dir / OPERATOR_FILE, outages=reports.outages
            )
            self.pool = self._make_pool(loaded.chat)
            played = {name: environment.environment for name, environment in loaded.environments.items()}
            self._mix = mix_of(config.environments, played, config.seed)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        resources.push_async_callback(self.pool.release)
        self.sender = Sender(
            link,
            config.run_dir,
            config.run_id,
            newest_step,
            config.transport.largest_batch,
            reports.waiting,
            reports.activity.spans,
            KeptBatches(config.keep_batches, config.keep_batches_gib),
        )
        resources.push_async_callback(self.sender.close)
        reports.activity.observe(self.pool, newest_step)
        self.scheduler = RolloutScheduler(config.schedule, config.steps, self._mix)
        self._playing = Playing(config, loaded.environments, loaded.chats, self.pool)
        self.evaluations = self._make_evaluations()
        self.dispatcher = self._make_dispatcher(signals, merge_chunk)
        if checkpoint is not None:
            self._restore(checkpoint)
        if config.resume:
            reports.decisions.of_run(Decision.RESUMED, newest_step)

    def _make_pool(self, chat: Chat) -> Served:
        config = self.config
        return self._servers.model(
            _adapter(config) or config.served_model or config.model,
            self._on_capacity,
            bounds=read_bounds(Path(config.model), chat.vocabulary),
            claim=claim_of(config),
        )

    def _make_dispatcher(self, signals: ShutdownSignals, merge_chunk: MergeProcess | None) -> Dispatcher:
        config, loaded = self.config, self._start.loaded
        boundary = StepBoundary(
            config.run_dir,
            config.run_id,
            {environment.name: environment.state_columns for environment in config.environments},
            gather_chunk_size=config.gather_chunk_size,
            keep_checkpoints=config.keep_checkpoints,
            keep_every=config.training.keep_every,
            keep_rollouts=config.keep_rollouts,
            merge_chunk=merge_chunk,
            transcribe=_transcriber(config, loaded.chat),
            warn=self._make_watch().take,
            receipts=ReceiptChain(config.run_dir, code_of(config.environments)),
            with_rewards=config.training.value_head is not None,
        )
        parts = RunParts(
            scheduler=self.scheduler,
            playing=self._playing,
            sender=self.sender,
            boundary=boundary,
            health=self._health,
            decisions=self._reports.decisions,
            evaluations=self.evaluations,
        )
        hooks = StepHooks(
            publish=self._publish,
            on_progress=self._reports.watchdog.progress,
            commit_in_progress=signals.commit_in_progress,
            annotate=lambda step: {} if self.steering is None else self.steering.annotation(step),
            is_dump_asked=lambda step: self.steering is not None and self.steering.is_dump_asked(step),
        )
        return Dispatcher(config, loaded.advantage, parts, hooks, self._tasks, identity_of(self._start.given))

    def _make_watch(self) -> Watch:
        """Returns the watch of the metrics. The advantage, and so what is compared, may change while the run goes on."""
        config = self.config
        rubrics = {environment.name: environment.args.get("rubric") for environment in config.environments}
        return Watch(
            config.output_dir,
            config.run_id,
            {name: paid_parts(rubric) for name, rubric in rubrics.items() if isinstance(rubric, list)},
            lambda: compared(self.config) == "group",
        )

    def _make_evaluations(self) -> Evaluations:
        return Evaluations(
            self.config,
            self._start.loaded.evaluations,
            self.pool,
            self._servers,
            handle=self._handle,
            publish=self._telemetry.publish_lasting,
            on_progress=self._reports.watchdog.progress,
            say=self._reports.evaluating,
            transcribe=_transcriber(self.config, self._start.loaded.chat),
        )

    def _handle(self, event: Event) -> None:
        """Passes an event on to the dispatcher, which is made after the evaluations."""
        self.dispatcher.handle(event)

    def _restore(self, checkpoint: StepCheckpoint) -> None:
        try:
            self.dispatcher.restore(checkpoint)
        except ExamplesChangedError as error:
            raise ConfigurationError(str(error)) from error
        except ValueError as error:
            raise CheckpointError(f"the checkpoint of step {checkpoint.step} cannot be resumed: {error}") from error
        logger.info("resuming after step %d", checkpoint.step)

    async def start_environments(self, resources: AsyncExitStack) -> None:
        """Starts the environments that hold resources, which `resources` closes. Raises the errors of `refusal`."""
        config, loaded = self.config, self._start.loaded
        directory, model = config.run_dir / "environments", Path(config.model)
        try:
            for name, environment in loaded.environments.items():
                context = EnvironmentContext(name, directory / name, model, config.seed)
                await resources.enter_async_context(started(environment.environment, context))
            evaluating = environments_started(loaded.evaluations, directory / "evaluations", model, config.seed)
            await resources.enter_async_context(evaluating)
        except ValueError as error:
            raise refusal(error) from error

    async def start_other_models(self, resources: AsyncExitStack) -> None:
        """Gives the rollouts their opponents and teacher, if the run has any. `resources` closes them."""
        config, outages = self.config, self._reports.outages
        opponents = await resources.enter_async_context(opponents_of(config, self._servers, outages))
        self._playing.opponents = self.evaluations.opponents = opponents
        chat = self._start.loaded.chat
        self._playing.teacher = await resources.enter_async_context(teacher_of(config, chat, self._servers, outages))

    async def show_telemetry(self) -> None:
        """Keeps the numbers for Prometheus current, until cancelled."""
        await self._telemetry.watch(self.pool, self.scheduler, self._reports.outages)

    def make_policy(self) -> PolicyWatcher:
        """Returns the watcher that gives the pool the trainer's policies."""
        watcher = PolicyWatcher(
            self.config.run_dir,
            self.pool,
            _adapter(self.config),
            self._report_policy,
            self.evaluations.need_version,
            lambda: self.sender.newest_step,
            lambda: self.sender.published,
        )
        self.sender.on_published = watcher.look
        return watcher

    def make_steering(self) -> Steering:
        """Returns the steering that takes up requests to the run from now on. Blocks."""
        chat, run_dir = self._start.loaded.chat, self.config.run_dir

        def prepare(config: RunConfig) -> Callable[[], None]:
            advantage, chats = _load_advantage(config), _chats_of(config, chat)
            filters = with_vocabulary(config.filters, chat.vocabulary)
            check_sampling(self.ignoring_temperature, config)
            return lambda: self._reconfigure(config.model_copy(update={"filters": filters}), advantage, chats)

        changes = Changes(
            self.config,
            self._start.journal,
            given=self._start.given,
            steps=self.sender,
            between_steps=self.dispatcher.between_steps,
            prepare=prepare,
        )
        dumps = AskedDumps(run_dir, self.config.steps, self.sender, self.dispatcher.between_steps)
        self.steering = Steering(
            run_dir,
            changes=changes,
            dumps=dumps,
            steps=self.sender,
            set_paused=self.set_paused,
            every_poll=self._rest,
        )
        return self.steering

    @property
    def all_committed(self) -> bool:
        """Whether the last step is committed."""
        return self.sender.newest_step >= self.config.steps

    def describe(self) -> str:
        """Says for a person, such as in the log of a stall, what the run waits for."""
        return "; ".join(self.scheduler.snapshot().waiting_for)

    def set_paused(self, pause: Pause | None) -> None:
        """Begins or ends a pause, unless it has begun or ended already."""
        if (pause is not None) == self._is_paused:
            return
        self._is_paused = pause is not None
        step = self.sender.newest_step
        self._reports.decisions.of_run(Decision.PAUSED if pause is not None else Decision.CONTINUED, step)
        words = "the run goes on" if pause is None else f"paused{f': {pause.reason}' if pause.reason else ''}"
        logger.info("%s, after step %d of %d", words, step, self.config.steps)
        self._reports.set_status(f"step {step} of {self.config.steps}" + (f"; {words}" if pause is not None else ""))
        self._reports.watchdog.progress()
        self.dispatcher.handle(PauseRequested() if pause is not None else ResumeRequested())

    def _rest(self) -> None:
        """Tells the watchdog that a paused run does not stall."""
        if self.scheduler.rests:
            self._reports.watchdog.progress()

    def _reconfigure(self, config: RunConfig, advantage: Advantage, chats: dict[str, Chat]) -> None:
        """Uses another configuration from now on."""
        former, self.config = self.config.schedule.most_in_flight, config
        self._mix.reweight({environment.name: environment.ratio for environment in config.environments})
        self.evaluations.set_shares(config)
        self._playing.reconfigure(config, chats)
        self.dispatcher.reconfigure(config, advantage)
        set_level(config.log_level)
        if (limit := config.schedule.most_in_flight) != former:
            self._health.make_room(limit)
            self.dispatcher.handle(LimitChanged(limit))
        self._reports.decisions.of_run(Decision.CHANGED, self.sender.newest_step + 1)

    def _on_capacity(self, rollouts: int) -> None:
        logger.debug("inference has capacity for %d concurrent requests", rollouts)
        self.dispatcher.handle(CapacityChanged(rollouts))

    def _report_policy(self, event: PolicyUpdateStarting | PolicyUpdated) -> None:
        self._reports.watchdog.progress()
        self._reports.activity.policy(event)
        self.dispatcher.handle(event)
        if isinstance(event, PolicyUpdated):
            self.evaluations.policy_updated(event.version)

    def _publish(self, line: MetricsLine) -> None:
        self._telemetry.publish(line)
        self._reports.activity.end_step(line, self.dispatcher.last_phases)
        self._reports.step_committed(line)


def _load_advantage(config: RunConfig) -> Advantage:
    """Loads the advantage function and tries it with a made-up group. Raises `ValueError`."""
    advantage = load_advantage(config.advantage, config.training.loss)
    try_advantage(advantage, config.schedule.group_size)
    return advantage


def _chats_of(config: RunConfig, chat: Chat) -> dict[str, Chat]:
    """Returns the chat of each environment, with its template variables. Raises `ValueError`."""
    return {e.name: chat.with_template_kwargs(config.sampling_of(e).chat_template_kwargs) for e in config.environments}


def _adapter(config: RunConfig) -> str | None:
    """Returns the name of the run's LoRA adapter at the servers, or None if it trains full weights."""
    return config.run_id if config.training.lora is not None else None


def _transcriber(config: RunConfig, chat: Chat) -> Transcriber | None:
    """Returns the transcriber that decodes rollouts for the records, or None if records have no text."""
    return Transcriber(chat.transcribe, config.recorded_tokens) if config.recorded_tokens else None
