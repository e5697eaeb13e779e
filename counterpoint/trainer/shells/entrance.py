"""Has runs enter and leave the trainer's slots: the admission of a run, from its discovery to its first item."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from counterpoint.run.trained import TrainedRun
from counterpoint.run.trainer_files import start_directory
from counterpoint.trainer.broadcast import Assembled, Broadcaster
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.lora.adapter_file import keep_start
from counterpoint.trainer.probe import ask, check_base
from counterpoint.trainer.runs import behind, checkpoint, control_files
from counterpoint.trainer.runs.record import RunStage
from counterpoint.trainer.runs.run import Run, RunProgress
from counterpoint.trainer.shells.asked import AskedShell
from counterpoint.trainer.shells.shared import Shared
from counterpoint.trainer.shells.steps import StepsShell
from counterpoint.trainer.telemetry.mismatch import COMPARED_STEPS
from counterpoint.transport.telemetry.start_phases import enter

logger = logging.getLogger(__name__)


class AdapterProbeFailed(RuntimeError):
    """The probe of an adapter raised an error, which is no verdict on its configuration."""


class Entrance:
    """The admission of runs, and their leaving. It registers its hooks with the learner's manager."""

    def __init__(self, shared: Shared, shell_of: Callable[[Run], StepsShell | AskedShell]) -> None:
        """`shell_of` returns the shell of a run."""
        self._shared = shared
        self._shell_of = shell_of
        self._manager = shared.learner.manager
        self._output_dir = shared.config.output_dir
        self._manager.register_discovered_hook(self._on_discovered)
        self._manager.register_forgotten_hook(self._on_forgotten)
        self._manager.register_directory_deleted_hook(self._on_directory_deleted)

    def discover(self, present: Collection[str]) -> bool:
        """Gives slots to runs that are `present`, takes those of others, and admits the new ones; returns whether any changed."""
        if not self._manager.discover_runs(present):
            return False
        enter("publishes the first weights")
        self._shared.learner.synchronize()
        admitted = self._shared.registry.at(RunStage.ADMITTED)
        fit = [run for run in admitted if run.failure is None and self._shell_of(run).publishes_first(run)]
        probed = self._shared.probe(fit)
        steps = {run.run_id: run.progress.step for run in admitted if run.failure is None}
        self._shared.metrics.truncate(steps)
        mismatches = self._shared.metrics.newest(steps, "mismatch_kl", COMPARED_STEPS)
        for run in admitted:
            if run.failure is None:
                self._shared.mismatches.begin(run.run_id, run.progress.step, mismatches[run.run_id])
                self._admit(run, probed.get(run.slot))
            else:
                self._refuse(run, run.failure)
        enter("waits for the first batch")
        return True

    def _refuse(self, run: Run, reason: str) -> None:
        self._manager.refuse_run(run.slot, reason)
        self._shared.slots_change = True

    def _on_discovered(self, slot: int, run_id: str, config: TrainedRun) -> None:
        run = self._shared.registry.in_slot(slot)
        (self._output_dir / "trainer").mkdir(exist_ok=True)  # it may have been mounted since the start
        self._shared.checkpoints.complete(run_id)  # of its former slot
        run.progress = RunProgress(checkpoint.newest_step(self._output_dir, run_id))
        run.failure = behind.refusal(self._output_dir, run, self._shared.registry.durable(run_id))
        if run.failure is None:
            self._shared.requests.start(run)

    def _admit(self, run: Run, assembled: Assembled | None) -> None:
        shared, step, steps = self._shared, run.progress.step, run.config.last_step
        config, shell = shared.config, self._shell_of(run)
        shared.broadcasters[run.slot] = Broadcaster(
            self._manager, self._output_dir, run.run_id, config.model, config.keep_broadcasts,
            config.whole_broadcast_every, config.server_dtypes,
        )  # fmt: skip
        try:
            self._check_base(run, shell, assembled)
        except ValueError as error:
            self._refuse(run, str(error))
            return
        except AdapterProbeFailed as error:
            shared.evict(run, str(error))
            return
        self._keep_start(run)  # first: once version 0 is there, batches are generated that must be trained from it
        if shell.publishes_first(run) and not shared.publish(run, anew=True, assembled=assembled):
            return
        run.durable_step = shared.checkpoints.durable_step(run)
        shared.orders[run.slot] = shell.order(run)
        shared.sessions.admit(run)
        if run.finished:
            logger.info("run %s is trained to its end, step %d of %s", run.run_id, step, steps)
        else:
            logger.info("run %s is ready for step %d of %s", run.run_id, step + 1, steps)

    def _check_base(self, run: Run, shell: StepsShell | AskedShell, assembled: Assembled | None) -> None:
        """Checks that this model can be the one over which the run's adapter was trained so far.

        Raises `ValueError` if it is another, and `AdapterProbeFailed` if the adapter's answers cannot be had.
        """
        learner, step = self._shared.learner, run.progress.step
        adapter, key = run.beginning, f"training.lora.start_from = {str(run.beginning)!r}"
        if step:  # unless updates are published, the directory may hold other weights than those of its step
            published = self._shared.broadcasters[run.slot].directory / f"step_{step}"
            adapter = published if run.config.training.lora is not None and shell.publishes_updates else None
            key = f"trainer.model = {self._shared.config.model!r}, which goes on from {str(adapter)!r}"
        if adapter is None:
            return
        try:
            assembled = assembled or learner.assemble(run.slot)
            answers = assembled.answers if assembled else ask(learner.loaded.model, run.slot)
        except Exception as error:
            if is_fatal(error):
                raise
            logger.warning("run %s: the probe of its adapter failed", run.run_id, exc_info=True)
            raise AdapterProbeFailed(f"the probe of its adapter failed: {error!r}") from error
        try:
            check_base(adapter, answers)
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from error

    def _keep_start(self, run: Run) -> None:
        """Makes a new run independent of where its first adapter is from."""
        training, output_dir = run.config.training, self._output_dir
        lora = training.lora
        starts = run.beginning is not None or training.reference_is_start
        if lora is None or not starts or run.progress.step or run.beginning == start_directory(output_dir, run.run_id):
            return
        with self._shared.learner.kept_alive():
            keep_start(output_dir, run.run_id, lora, self._shared.config.model, self._manager.modules, run.slot)

    def _on_forgotten(self, slot: int, run_id: str) -> None:
        shared = self._shared
        shared.sessions.forget(run_id)
        shared.drop(slot)
        shared.telemetry.left(run_id)
        shared.broadcasters.pop(slot, None)
        shared.endpoint.forget(run_id)
        if self._manager.is_deleted(slot):
            self._on_directory_deleted(run_id)
            shared.registry.end(run_id, RunStage.DELETED)
            shared.sessions.deleted(shared.registry.in_slot(slot))
        else:
            if slot in shared.learner.runs:
                shared.checkpoints.begin(shared.learner.runs[slot])
            if control_files.eviction(self._output_dir, run_id) is not None:
                shared.registry.end(run_id, RunStage.EVICTED)
            logger.info("run %s has left its slot", run_id)
        shared.orders.pop(slot, None)  # last: a checkpoint that was waited for has asked for it

    def _on_directory_deleted(self, run_id: str) -> None:
        logger.info("the directory of run %s was deleted: the run ends", run_id)
        self._shared.checkpoints.complete(run_id)
        checkpoint.set_aside(self._output_dir, run_id)
