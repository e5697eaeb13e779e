"""An experiment as its file describes it: `counterpoint tune FILE` makes it, runs it, and resumes it from its directory."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from counterpoint.environments.import_path import search_working_directory
from counterpoint.job.check import check_run, import_paths
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, merge, to_toml
from counterpoint.job.derive import check_fits
from counterpoint.job.join import FROM_THE_JOB, named_imports, values_of_job
from counterpoint.job.sweep.grid import with_value_at
from counterpoint.run.config import RunConfig
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.config import PbtConfig, TuneConfig
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import EventExecutor
from counterpoint.tune.executors.local import LocalTrialExecutor
from counterpoint.tune.experiment import Experiment
from counterpoint.tune.from_file import check_keys, leaves, listed_values, scheduler_of, search_of, space_of, stopper_of
from counterpoint.tune.runner.resume import Resume
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.runs.executor import RunTrialExecutor
from counterpoint.tune.runs.host_job import HostJob
from counterpoint.tune.runs.varied_run import VariedRun
from counterpoint.tune.schedulers.explore import of_whole_numbers
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.search.spaces import choice, extremes
from counterpoint.tune.trial import TRAINABLE_OF_RUNS

FILE = "tune.toml"
"""The experiment's file as resolved, in its directory: what `tune resume` reads."""


class FileExperiment:
    """One experiment, from its file."""

    def __init__(self, config: TuneConfig, file: Path) -> None:
        """`file` is for error messages. Raises `UserError` for what is wrong with it; `check.py` checks what it names."""
        self.config, self.file = config, file
        check_keys(config, file)
        self.experiment = self._experiment()
        self.directory = Path(self.experiment.directory)
        if config.executor == "runs":
            self._check_run()
        else:
            self._check_trainable()
        scheduler_of(config, file)
        search_of(config, file)

    @classmethod
    def in_directory(cls, directory: Path) -> FileExperiment:
        """Returns the experiment of a directory. Raises `UserError` if there is none."""
        file = directory / FILE
        if not file.exists():
            raise UserError(
                f"{directory}: there is no experiment of a file ({FILE} is missing); one that a script has begun with tune.run "
                "goes on by the same script, with resume='AUTO'"
            )
        found = cls(load(TuneConfig, file, []), file)
        if found.directory != directory.absolute():
            raise UserError(f"{directory}: its {FILE} is of the experiment in {found.directory}; was it moved?")
        return found

    def write(self) -> None:
        """Writes the file from which it can be resumed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        here = self.config.model_copy(update={"local_dir": self.directory.parent})
        write_atomically(self.directory / FILE, to_toml(here).encode())

    def runner(self, executor: EventExecutor, callbacks: Sequence[Callback], resume: Resume) -> TrialRunner:
        """Returns its runner. Raises `UserError`."""
        config, file = self.config, self.file
        scheduler, search = scheduler_of(config, file), self._search()
        try:
            scheduler.set_search_properties(config.metric, config.mode)
        except TuneError as error:
            raise UserError(f"{file}: {error}") from None
        defaults = importlib.import_module("counterpoint.tune.callbacks.defaults").with_default_loggers(callbacks)
        try:
            return TrialRunner(
                search_alg=search,
                scheduler=scheduler,
                local_checkpoint_dir=self.directory,
                stopper=stopper_of(config),
                resume=resume,
                fail_fast=config.fail_fast,
                trial_executor=executor,
                callbacks=defaults,
                metric=config.metric,
            )
        except TuneError as error:
            raise UserError(str(error)) from None

    def executor(self) -> EventExecutor:
        """Returns its executor, which has not started anything yet."""
        config = self.config
        if config.executor == "runs":
            assert config.job is not None
            directory = self._job_directory()
            run = VariedRun(config.name, directory, config.run)
            return RunTrialExecutor(HostJob(directory, config.job.file, self._imports()), run, config.max_concurrent)
        if config.executor == "local":
            return LocalTrialExecutor()
        on_ray = importlib.import_module("counterpoint.tune.executors.on_ray")  # which needs an extra
        made: EventExecutor = on_ray.RayTrialExecutor(ray_auto_init=False)
        return made

    def _imports(self) -> list[str]:
        """Returns what the job that is started lets its trials import: what its own file allows, and what this one names."""
        assert self.config.job is not None
        if self.config.job.file is None:
            return []
        return sorted({*self.job().trainer.allowed_imports, *named_imports(self.config.model_dump(mode="json"))})

    def _experiment(self) -> Experiment:
        config = self.config
        space = space_of(config.space, f"{self.file}: space")
        is_run = config.executor == "runs"
        try:
            return Experiment(
                config.name,
                TRAINABLE_OF_RUNS if is_run else str(config.trainable),
                stop=config.stop.metrics or None,
                config=space if is_run else merge(config.run, space),
                resources_per_trial=config.resources,
                num_samples=config.num_samples,
                local_dir=str(config.local_dir),
                checkpoint_freq=config.checkpoint_freq,
                checkpoint_at_end=config.checkpoint_at_end,
                keep_checkpoints_num=config.keep_checkpoints,
                max_failures=config.failures_allowed,
            )
        except TuneError as error:
            raise UserError(f"{self.file}: {error}") from None

    def _job_directory(self) -> Path:
        assert self.config.job is not None
        if self.config.job.join is not None:
            return self.config.job.join
        return self.job().output_dir.absolute()

    def job(self) -> JobConfig:
        """Returns the job that is to be started. Raises `UserError`."""
        assert self.config.job is not None
        assert self.config.job.file is not None
        job = load(JobConfig, self.config.job.file, [])
        if not job.stay:
            raise UserError(
                f"{self.config.job.file}: stay = false: the job of trials runs until the tuner stops it; set stay = true"
            )
        return job

    def _search(self) -> SearchAlg:
        """Returns a search with the experiment's metric and space, of which nothing is drawn yet."""
        search = search_of(self.config, self.file)
        try:
            search.set_search_properties(self.config.metric, self.config.mode, self.experiment.config)
            search.add_configurations([self.experiment])
        except TuneError as error:
            raise UserError(f"{self.file}: {error}") from None
        return search

    def runs_that_load(self) -> list[RunConfig]:
        """Returns the run of the first draw, and one for each value that space or mutations list with another import path.

        What a function draws may depend on other values, so that with one only the first draw is known to be possible.
        """
        runs = [self._run_with(first := self._first_values())]
        known = {*import_paths(runs[0])}
        tables = [self.config.space]
        if isinstance(self.config.scheduler, PbtConfig):
            tables.append(self.config.scheduler.mutations)
        for path, value in listed_values(tables):
            if ":" not in str(value):
                continue
            try:
                run = self._run_with(with_value_at(first, path, value))
            except UserError:  # this value and the others of the first draw may never come together
                continue
            if not known.issuperset(import_paths(run)):
                runs.append(run)
                known.update(import_paths(run))
        return runs

    def _first_values(self) -> dict[str, Any]:
        try:
            trial = self._search().next_trial()
        except TuneError as error:
            raise UserError(f"{self.file}: {error}") from None
        return {} if trial is None else trial.config

    def _check_run(self) -> None:
        """Checks the first draw of the space as a run of the job."""
        values = self._first_values()
        try:
            run = self._run_with(values)
            check_run(run)
            if self.config.job is not None and self.config.job.file is not None:
                job = self.job()
                check_fits("", run, job.inference, job.trainer)
        except ValueError as error:
            raise UserError(f"{self.file}: {error}") from None

    def check_domains(self) -> None:
        """Raises `UserError` for a domain of space or mutations, of a run's key, with a value that the key cannot have."""
        first, of = self._first_values(), self.config.scheduler
        domains = [*leaves(self.experiment.config)]
        if isinstance(of, PbtConfig):
            held = dict(leaves(first))
            for path, values in leaves(space_of(of.mutations, "")):
                listed = choice(values) if isinstance(values, list) else values
                domains.append((path, of_whole_numbers(listed, held.get(path))))
        for path, domain in domains:
            for value in extremes(domain):
                try:
                    RunConfig.model_validate(self._settings_with(with_value_at(first, path, value)))
                except ValidationError as error:
                    for one in error.errors(include_url=False):
                        place = map(str, one["loc"])  # with the names of alternatives between its keys
                        if all(key in place for key in path.split(".")):
                            raise UserError(
                                f"{self.file}: {path} may become {value!r}, by its domain {domain}: {one['msg']}"
                            ) from None

    def _run_with(self, values: dict[str, Any]) -> RunConfig:
        """Returns the run of a trial with these values of the space. Raises `UserError`."""
        return validate(RunConfig, self._settings_with(values), f"{self.file}, run with the first values of space")

    def _settings_with(self, values: dict[str, Any]) -> Table:
        assert self.config.job is not None
        if self.config.job.file is not None:
            job = self.job()
            shared = job.orchestrator.model_dump(mode="json", exclude_none=True)
            below: Table = {"output_dir": str(job.output_dir)} | {
                key: shared[key] for key in FROM_THE_JOB if key in shared
            }
        else:
            below = values_of_job(str(self.config.job.join))
        settings = VariedRun(self.config.name, Path(below["output_dir"]), self.config.run).settings("first", values)
        return merge(below, settings)

    def _check_trainable(self) -> None:
        module, _, name = str(self.config.trainable).partition(":")
        if not name:
            raise UserError(
                f"{self.file}: trainable = {self.config.trainable!r}: expected an import path 'module:name'"
            )
        search_working_directory()
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise UserError(
                f"{self.file}: trainable = {self.config.trainable!r}: there is no module {module!r}; install it, "
                "put its directory on PYTHONPATH, or start where it is"
            )


async def run_to_end(runner: TrialRunner, stop: asyncio.Event) -> None:
    """Runs until every trial has ended, or until `stop` is set: then all ends in order, to be resumed. Raises `TuneError`."""
    try:
        if isinstance(runner.trial_executor, RunTrialExecutor):
            await _or_stop(runner.trial_executor.ready(), stop)
        while not runner.is_finished() and not stop.is_set():
            await runner.step_async()
    finally:
        await runner.cleanup()


async def _or_stop(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
    finally:
        for task in (doing, stopping):
            task.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)
