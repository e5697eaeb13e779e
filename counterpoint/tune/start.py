"""`run` and `run_experiments`: from arguments to a finished experiment. The arguments are those of Ray Tune 1.x's `tune.run`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.callbacks.defaults import with_default_loggers
from counterpoint.tune.errors import TuneError, in_one_line
from counterpoint.tune.executors.trial_executor import TrialExecutor
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.resources import Resources
from counterpoint.tune.runner.resume import Resume, Sync, SyncConfig
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.schedulers.scheduler import TrialScheduler
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.stoppers.standard import as_stopper
from counterpoint.tune.stoppers.stopper import Stopper
from counterpoint.tune.trial import Trial

logger = logging.getLogger(__name__)


def run(
    run_or_experiment: str | Callable[..., Any] | type | Experiment,
    name: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    stop: Any = None,
    time_budget_s: float | timedelta | None = None,
    config: Mapping[str, Any] | None = None,
    resources_per_trial: Resources | Mapping[str, Any] | None = None,
    num_samples: int = 1,
    local_dir: str | None = None,
    search_alg: Any = None,
    scheduler: TrialScheduler | str | None = None,
    keep_checkpoints_num: int | None = None,
    checkpoint_score_attr: str | None = None,
    checkpoint_freq: int = 0,
    checkpoint_at_end: bool = False,
    verbose: int = 1,
    log_to_file: bool | str | tuple[str, str] = False,
    trial_name_creator: Callable[[Trial], str] | None = None,
    trial_dirname_creator: Callable[[Trial], str] | None = None,
    export_formats: list[str] | None = None,
    max_failures: int = 0,
    fail_fast: bool | str = False,
    restore: str | None = None,
    upload_dir: str | None = None,
    sync_to_cloud: Sync | None = None,
    resume: Resume = False,
    reuse_actors: bool = False,
    queue_trials: bool = False,
    trial_executor: TrialExecutor | None = None,
    callbacks: Sequence[Callback] | None = None,
    checkpoint_period: float | None = None,
    raise_on_failed_trial: bool = True,
    server_port: int | None = None,
    sync_config: SyncConfig | None = None,
    progress_reporter: Callback | None = None,
) -> Any:
    """Runs trials of a trainable until all have ended; returns the `Analysis` of them.

    With `resume`, `name` and `local_dir` say which experiment goes on. Raises `TuneError` for arguments that do not fit, and at
    the end if trials are in ERROR, unless `raise_on_failed_trial` is False; with
    `fail_fast="raise"` what the first of them raised; `KeyboardInterrupt` after Ctrl-C, when the
    experiment can be resumed.
    """
    given = dict(locals())
    experiment = _experiment(given.pop("run_or_experiment"), {each: given.pop(each) for each in _OF_AN_EXPERIMENT})
    trials = _run([experiment], **given)
    analysis = importlib.import_module("counterpoint.tune.analysis")
    return analysis.Analysis(experiment.directory, trials=trials, default_metric=metric, default_mode=mode)


_OF_AN_EXPERIMENT = tuple(name for name in inspect.signature(Experiment).parameters if name != "run")
"""Those of the parameters of `run` that describe the experiment."""


def _experiment(given: str | Callable[..., Any] | type | Experiment, described: dict[str, Any]) -> Experiment:
    if not isinstance(given, Experiment):
        return Experiment(run=given, **described)
    defaults = inspect.signature(run).parameters
    beside = [name for name, value in described.items() if value != defaults[name].default]
    if beside:
        raise TuneError(f"{', '.join(beside)}: an Experiment is given to run, which has its own; give them to that")
    return given


def run_experiments(
    experiments: Experiment | Mapping[str, Any] | Iterable[Experiment],
    scheduler: TrialScheduler | str | None = None,
    verbose: int = 1,
    resume: Resume = False,
    reuse_actors: bool = False,
    queue_trials: bool = False,
    trial_executor: TrialExecutor | None = None,
    raise_on_failed_trial: bool = True,
    callbacks: Sequence[Callback] | None = None,
    fail_fast: bool | str = False,
) -> list[Trial]:
    """Runs several experiments as one: their trials share the executor and the scheduler. Returns all trials.

    A mapping has `Experiment`'s arguments by name. The state is in the directory of the first. Raises
    `TuneError` as `run` does.
    """
    given = dict(locals())
    del given["experiments"]
    if isinstance(experiments, Experiment):
        described = [experiments]
    elif isinstance(experiments, Mapping):
        described = [Experiment(name, **fields) for name, fields in experiments.items()]
    else:
        described = list(experiments)
    if not described or not all(isinstance(each, Experiment) for each in described):
        raise TuneError("run_experiments needs one experiment or more, each a tune.Experiment")
    return _run(described, **given)


def _run(
    experiments: list[Experiment],
    *,
    metric: str | None = None,
    mode: str | None = None,
    time_budget_s: float | timedelta | None = None,
    search_alg: Any = None,
    scheduler: TrialScheduler | str | None,
    verbose: int,
    fail_fast: bool | str,
    upload_dir: str | None = None,
    sync_to_cloud: Sync | None = None,
    resume: Resume,
    reuse_actors: bool,
    queue_trials: bool,
    trial_executor: TrialExecutor | None,
    callbacks: Sequence[Callback] | None,
    checkpoint_period: float | None = None,
    raise_on_failed_trial: bool,
    server_port: int | None = None,
    sync_config: SyncConfig | None = None,
    progress_reporter: Callback | None = None,
) -> list[Trial]:
    if sync_config is not None:
        if upload_dir is not None or sync_to_cloud is not None:
            raise TuneError(
                "upload_dir or sync_to_cloud are given to run beside sync_config; give them to one of the two"
            )
        upload_dir, sync_to_cloud = sync_config.upload_dir, sync_config.sync_to_cloud
    reporters = [] if progress_reporter is None else [progress_reporter]
    if mode not in (None, "min", "max"):
        raise TuneError(f"mode = {mode!r}: expected 'min' or 'max'")
    first = experiments[0]
    executor = _executor(trial_executor, reuse_actors, queue_trials)
    _take_over_from_script(experiments, executor)
    algorithm = _search_algorithm(search_alg)
    if not algorithm.set_search_properties(metric, mode, first.config) and (metric or mode):
        raise TuneError(
            f"metric or mode are given to run and to {type(algorithm).__qualname__}, too; give them to one of the two"
        )
    algorithm.add_configurations(experiments)
    chosen = _scheduler(scheduler)
    if (metric or mode) and not chosen.set_search_properties(metric, mode):
        raise TuneError(
            f"metric or mode are given to run and to {type(chosen).__qualname__}, too; give them to one of the two"
        )
    runner = TrialRunner(
        algorithm,
        scheduler=chosen,
        local_checkpoint_dir=first.directory,
        remote_checkpoint_dir=None if upload_dir is None else str(Path(upload_dir) / first.name),
        sync_to_cloud=sync_to_cloud,
        stopper=_stopper(experiments, time_budget_s),
        resume=resume,
        fail_fast=fail_fast,
        checkpoint_period=checkpoint_period,
        trial_executor=executor,
        callbacks=with_default_loggers([*(callbacks or ()), *reporters]),
        verbose=verbose,
        metric=metric,
        server_port=server_port,
    )
    asyncio.run(_to_the_end(runner))
    failed = [trial for trial in runner.get_trials() if trial.status == Trial.ERROR]
    if failed and raise_on_failed_trial:
        shown = "\n".join(f"  {trial}: {in_one_line(trial.error_msg)}; see {trial.error_file}" for trial in failed[:10])
        more = f"\n  and {len(failed) - 10} more" if len(failed) > 10 else ""
        raise TuneError(f"{len(failed)} of {len(runner.get_trials())} trials failed:\n{shown}{more}")
    return runner.get_trials()


def _take_over_from_script(experiments: list[Experiment], executor: TrialExecutor) -> None:
    """Has trials forked from this process if the script that runs would start another experiment in each that loaded it."""
    from counterpoint.tune import registry
    from counterpoint.tune.executors.forked_here import reason_against_a_fork
    from counterpoint.tune.executors.local import LocalTrialExecutor

    if isinstance(executor, LocalTrialExecutor) and registry.is_at_top_level() and not reason_against_a_fork():
        for experiment in experiments:
            experiment.run_identifier = registry.without_reload(experiment.run_identifier)


async def _to_the_end(runner: TrialRunner) -> None:
    """Steps until all has ended. The first signal to end leaves an experiment that can be resumed; the second ends at once."""
    interrupted: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        if interrupted:
            os._exit(128 + number)
        interrupted.append(number)
        logger.warning("%s: ending the trials' processes; the experiment can be resumed", number.name)

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError, RuntimeError):  # not the main thread: its owner handles signals
            loop.add_signal_handler(number, interrupt, number)
    try:
        while not runner.is_finished() and not interrupted:
            await runner.step_async()
    finally:
        await runner.cleanup()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)
    if interrupted and not runner.is_finished():
        raise KeyboardInterrupt(f"{interrupted[0].name}: the experiment in {runner.directory} can be resumed")


def _search_algorithm(given: Any) -> SearchAlg:
    """The algorithm of what a user gave: one, a searcher, a name, or None for grids and random samples."""
    creation = importlib.import_module("counterpoint.tune.search.creation")  # imports numpy: not for a name alone
    made: SearchAlg = creation.as_search_alg(given)
    return made


def _scheduler(given: TrialScheduler | str | None) -> TrialScheduler:
    if given is None:
        return TrialScheduler()
    if isinstance(given, TrialScheduler):
        return given
    raise TuneError(f"scheduler = {given!r}: expected a tune.TrialScheduler, such as AsyncHyperBandScheduler()")


def _stopper(experiments: list[Experiment], time_budget_s: float | timedelta | None) -> Stopper:
    """What each experiment's `stop` says beyond the criteria, which its trials carry themselves."""
    given = [each.stopper for each in experiments if each.stopper is not None]
    if len(given) > 1 or (given and len(experiments) > 1):
        raise TuneError(
            "a stopper or a function as `stop` is for one experiment at a time; give several experiments dicts"
        )
    return as_stopper(given[0] if given else None, time_budget_s)


def _executor(given: TrialExecutor | None, reuse_actors: bool, queue_trials: bool) -> TrialExecutor:
    from counterpoint.tune.executors.local import LocalTrialExecutor

    if given is not None and reuse_actors:
        raise TuneError("reuse_actors is for the executor that run makes; give it to yours")
    executor = LocalTrialExecutor(reuse_actors=reuse_actors) if given is None else given
    executor.queue_trials = executor.queue_trials or queue_trials
    return executor
