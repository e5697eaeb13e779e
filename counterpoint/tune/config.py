"""The file of `counterpoint tune`: what is searched, by which search and scheduler, on which executor.

The space and the values that all trials share are free tables; `counterpoint/tune/from_file.py` checks their keys. The arguments
of schedulers and searches are those of their classes, by the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from counterpoint.transport.config import Config
from counterpoint.tune.resources import Resources

LONGEST_NAME = 40
"""The longest name of an experiment, in characters; the rest of a run's id is the trial's."""

Mode = Literal["min", "max"]

AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]


class SearchConfig(Config):
    """Which configurations are tried."""

    kind: Literal["random", "optuna"] = "random"
    """`random`: every combination of the grids, and of the rest `num_samples` draws. `optuna`: proposals that learn from results
    (extra `optuna`)."""

    sampler: Literal["tpe", "cmaes", "gp", "nsgaii", "random"] = "tpe"
    """Optuna's sampler, with `kind = "optuna"`."""

    repeat: int = Field(default=1, ge=1)
    """How often each proposal of Optuna is tried; it learns the mean."""

    seed: int | None = None
    """The seed of everything that the search draws. Unset: the experiment's."""

    @model_validator(mode="after")
    def _only_optuna_repeats(self) -> SearchConfig:
        if self.kind == "random" and self.repeat != 1:
            raise ValueError(f"repeat = {self.repeat}: with kind = 'random', raise num_samples instead")
        return self


class FifoConfig(Config):
    """Every trial runs to its end, in order."""

    kind: Literal["fifo"] = "fifo"
    """First in, first out."""


class AshaConfig(Config):
    """Asynchronous successive halving: of the trials at a milestone, all but the best stop."""

    kind: Literal["asha"]
    """The scheduler is ASHA (asynchronous successive halving)."""
    time_attr: str = "training_iteration"
    """What counts as time."""
    max_t: float = Field(default=100, gt=0)
    """A trial stops at this time."""
    grace_period: float = Field(default=1, gt=0)
    """No trial stops before."""
    reduction_factor: float = Field(default=4, gt=1)
    """One of so many trials at a milestone goes on."""
    brackets: int = Field(default=1, ge=1)
    """Successive halvings with different grace periods."""


class HyperBandConfig(Config):
    """HyperBand: synchronous successive halving in brackets; trials are paused until their bracket is full."""

    kind: Literal["hyperband"]
    """The scheduler is HyperBand."""
    time_attr: str = "training_iteration"
    """What counts as time."""
    max_t: int = Field(default=81, ge=1)
    """A trial stops at this time."""
    reduction_factor: float = Field(default=3, gt=1)
    """One of so many trials of a bracket goes on."""
    stop_last_trials: bool = True
    """Whether the last trials stop at `max_t`."""


class MedianConfig(Config):
    """A trial stops whose best result is worse than the median of the others' running means."""

    kind: Literal["median"]
    """The median stopping rule."""
    time_attr: str = "training_iteration"
    """What counts as time."""
    grace_period: float = Field(default=60.0, ge=0)
    """No trial stops before."""
    min_samples_required: int = Field(default=3, ge=1)
    """Results of so many trials are needed for a median."""
    hard_stop: bool = True
    """Whether a trial that loses is stopped; false pauses it instead."""


class PbtConfig(Config):
    """Population based training: the worst trials copy the best and go on with changed values."""

    kind: Literal["pbt"]
    """The scheduler is PBT (population based training)."""
    time_attr: str = "training_iteration"
    """What counts as time."""
    perturbation_interval: float = Field(default=5, gt=0)
    """Time between two decisions about a trial."""
    burn_in_period: float = Field(default=0, ge=0)
    """The scheduler decides nothing about a trial before this time."""
    mutations: dict[str, Any] = {}
    """The keys that change, with the domain from which they are drawn anew, or a list of values. A copied value is otherwise
    multiplied by 0.8 or 1.2 within its domain, or moves to a neighbour in its list or choice. Unset: every key of `[space]`."""
    quantile_fraction: float = Field(default=0.25, ge=0, le=0.5)
    """The share of the population that copies, and that is copied."""
    resample_probability: float = Field(default=0.25, ge=0, le=1)
    """How often a value is drawn anew instead of being multiplied."""
    synch: bool = False
    """Whether all trials wait for one another at each interval."""


SchedulerConfig = Annotated[
    FifoConfig | AshaConfig | HyperBandConfig | MedianConfig | PbtConfig, Field(discriminator="kind")
]


class StopperConfig(Config):
    """When a trial, or the experiment, is over. What is reached first counts."""

    training_iteration: int | None = Field(default=None, ge=1)
    """Results of a trial."""
    metrics: dict[str, float] = {}
    """A trial stops at a result with a metric at or above its value."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """The experiment ends after so many seconds."""
    plateau: PlateauConfig | None = None
    """Stop the experiment when its best results no longer change."""


class PlateauConfig(Config):
    """The best results of the experiment have settled."""

    std: float = Field(default=0.001, gt=0)
    """Their standard deviation is below this."""
    top: int = Field(default=10, ge=2)
    """How many of the best results are compared."""
    patience: int = Field(default=0, ge=0)
    """The plateau must last for so many results in a row."""


class JobOfTrials(Config):
    """The job whose runs the trials are."""

    join: AbsolutePath | None = None
    """The directory of a live job."""
    file: AbsolutePath | None = None
    """A job's file, with `stay = true`: the tuner starts that job, and stops it at its end."""

    @model_validator(mode="after")
    def _is_one(self) -> JobOfTrials:
        if (self.join is None) == (self.file is None):
            raise ValueError("give one of join (a live job's directory) and file (a job to start)")
        return self


class TuneConfig(Config):
    """An experiment: trials of a trainable, or of a run in a live job."""

    name: Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{LONGEST_NAME - 1}}}$")]
    """The experiment's name: its directory below `local_dir`, and the beginning of its runs' ids."""

    local_dir: Path = Path("outputs/tune")
    """The experiment's directory is made in this one."""

    executor: Literal["local", "ray", "runs"] = "local"
    """Trials run as processes of this machine, on Ray (extra `ray`), or as runs of a live job."""

    trainable: str | None = None
    """What each trial runs, with the executors `local` and `ray`: an import path `module:name`."""

    job: JobOfTrials | None = None
    """The job that trials join, with the executor `runs`."""

    run: dict[str, Any] = {}
    """The values that all trials share: keys of a run with the executor `runs`, else of the trainable's configuration."""

    space: dict[str, Any] = {}
    """What differs between trials, by key: a value, or a table with one domain and its arguments, such as
    `{ loguniform = [1e-5, 1e-3] }`, `{ choice = ["a", "b"] }`, `{ grid_search = [1, 2] }`. `environments.0.ratio` reaches into
    a list."""

    metric: str = "reward/mean"
    """What is compared. The default is that of runs; a trainable has its own."""

    mode: Mode = "max"
    """Whether the metric is to be large or small."""

    num_samples: int = Field(default=1, ge=1)
    """How often the space is sampled; times the size of its grids, that is the number of trials."""

    seed: int = 0
    """The seed of everything that search and scheduler draw."""

    search: SearchConfig = SearchConfig()
    """Which configurations are tried."""

    scheduler: SchedulerConfig = FifoConfig()
    """The rule that says when a trial stops, pauses or copies another."""

    stop: StopperConfig = StopperConfig()
    """The conditions that end a trial, or the experiment."""

    resources: Resources = Resources()
    """What each trial needs, with the executors `local` and `ray`. A run needs a slot of the trainer."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Most trials at once. Unset: as many as there are resources for."""

    max_failures: int | None = Field(default=None, ge=-1)
    """How often a trial is started again after a failure; -1 for without end. Unset: 2 for runs, whose job may lose processes,
    else 0, since a trainable that raises will most likely raise again."""

    fail_fast: bool = False
    """Whether the first failed trial ends the experiment."""

    checkpoint_freq: int = Field(default=0, ge=0)
    """A checkpoint after every so many results of a trial; 0 for those that the scheduler asks for."""

    checkpoint_at_end: bool = False
    """A checkpoint when a trial ends."""

    keep_checkpoints: int | None = Field(default=2, ge=1)
    """How many of a trial's checkpoints are kept."""

    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Loopback port of the tuner's metrics; 0 takes a free one, which its log names."""

    @property
    def failures_allowed(self) -> int:
        """`max_failures`, or its default for this executor."""
        if self.max_failures is not None:
            return self.max_failures
        return 2 if self.executor == "runs" else 0

    @model_validator(mode="after")
    def _says_what_runs(self) -> TuneConfig:
        if self.executor == "runs":
            if self.job is None:
                raise ValueError(
                    "executor = 'runs' needs [job]: join (a live job's directory) or file (a job to start)"
                )
            if self.trainable is not None:
                raise ValueError(
                    f"trainable = {self.trainable!r}: with executor = 'runs', a trial is a run; leave it out"
                )
        elif self.trainable is None:
            raise ValueError(f"executor = {self.executor!r} needs trainable = 'module:name'")
        elif "metric" not in self.model_fields_set:
            raise ValueError(
                f"executor = {self.executor!r} needs metric = 'the name of a number that the trainable reports'"
            )
        elif self.job is not None:
            raise ValueError(f"[job] has no meaning with executor = {self.executor!r}; use executor = 'runs'")
        return self
