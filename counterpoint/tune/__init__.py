"""Experiments over trials: search algorithms propose configurations, executors run them, schedulers stop, pause and copy them.

The model and the names are those of Ray Tune 1.x (`docs/tune.md`); the engine is our own. What users import is here, and is
loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.tune.analysis import Analysis as Analysis
    from counterpoint.tune.analysis import ExperimentAnalysis as ExperimentAnalysis
    from counterpoint.tune.callbacks.callback import Callback as Callback
    from counterpoint.tune.callbacks.cli_reporter import CLIReporter as CLIReporter
    from counterpoint.tune.callbacks.csv_logger import CSVLoggerCallback as CSVLoggerCallback
    from counterpoint.tune.callbacks.json_logger import JsonLoggerCallback as JsonLoggerCallback
    from counterpoint.tune.callbacks.logger_callback import LoggerCallback as LoggerCallback
    from counterpoint.tune.callbacks.tensorboard_logger import TBXLoggerCallback as TBXLoggerCallback
    from counterpoint.tune.checkpoint import Checkpoint as Checkpoint
    from counterpoint.tune.errors import AbortTrialExecution as AbortTrialExecution
    from counterpoint.tune.errors import TuneError as TuneError
    from counterpoint.tune.executors.attempt import Deadlines as Deadlines
    from counterpoint.tune.executors.local import LocalTrialExecutor as LocalTrialExecutor
    from counterpoint.tune.executors.on_ray import RayTrialExecutor as RayTrialExecutor
    from counterpoint.tune.executors.trial_executor import TrialExecutor as TrialExecutor
    from counterpoint.tune.experiment import Experiment as Experiment
    from counterpoint.tune.export_formats import ExportFormat as ExportFormat
    from counterpoint.tune.registry import env_creator as env_creator
    from counterpoint.tune.registry import register_env as register_env
    from counterpoint.tune.registry import register_trainable as register_trainable
    from counterpoint.tune.resources import Resources as Resources
    from counterpoint.tune.runner.resume import SyncConfig as SyncConfig
    from counterpoint.tune.runner.trial_runner import TrialRunner as TrialRunner
    from counterpoint.tune.schedulers.async_hyperband import ASHAScheduler as ASHAScheduler
    from counterpoint.tune.schedulers.async_hyperband import AsyncHyperBandScheduler as AsyncHyperBandScheduler
    from counterpoint.tune.schedulers.hyperband import HyperBandScheduler as HyperBandScheduler
    from counterpoint.tune.schedulers.median_stopping import MedianStoppingRule as MedianStoppingRule
    from counterpoint.tune.schedulers.pbt import PopulationBasedTraining as PopulationBasedTraining
    from counterpoint.tune.schedulers.pbt_replay import PopulationBasedTrainingReplay as PopulationBasedTrainingReplay
    from counterpoint.tune.schedulers.scheduler import FIFOScheduler as FIFOScheduler
    from counterpoint.tune.schedulers.scheduler import TrialScheduler as TrialScheduler
    from counterpoint.tune.search.ask_tell import AskTellSearch as AskTellSearch
    from counterpoint.tune.search.basic_variant import BasicVariantGenerator as BasicVariantGenerator
    from counterpoint.tune.search.creation import create_searcher as create_searcher
    from counterpoint.tune.search.generator import SearchGenerator as SearchGenerator
    from counterpoint.tune.search.optuna_search import OptunaSearch as OptunaSearch
    from counterpoint.tune.search.search_alg import SearchAlg as SearchAlg
    from counterpoint.tune.search.searcher import Searcher as Searcher
    from counterpoint.tune.search.spaces import choice as choice
    from counterpoint.tune.search.spaces import grid_search as grid_search
    from counterpoint.tune.search.spaces import lograndint as lograndint
    from counterpoint.tune.search.spaces import loguniform as loguniform
    from counterpoint.tune.search.spaces import qlograndint as qlograndint
    from counterpoint.tune.search.spaces import qloguniform as qloguniform
    from counterpoint.tune.search.spaces import qrandint as qrandint
    from counterpoint.tune.search.spaces import qrandn as qrandn
    from counterpoint.tune.search.spaces import quniform as quniform
    from counterpoint.tune.search.spaces import randint as randint
    from counterpoint.tune.search.spaces import randn as randn
    from counterpoint.tune.search.spaces import sample_from as sample_from
    from counterpoint.tune.search.spaces import uniform as uniform
    from counterpoint.tune.search.wrappers import ConcurrencyLimiter as ConcurrencyLimiter
    from counterpoint.tune.search.wrappers import Repeater as Repeater
    from counterpoint.tune.start import run as run
    from counterpoint.tune.start import run_experiments as run_experiments
    from counterpoint.tune.stoppers.standard import CombinedStopper as CombinedStopper
    from counterpoint.tune.stoppers.standard import ExperimentPlateauStopper as ExperimentPlateauStopper
    from counterpoint.tune.stoppers.standard import FunctionStopper as FunctionStopper
    from counterpoint.tune.stoppers.standard import MaximumIterationStopper as MaximumIterationStopper
    from counterpoint.tune.stoppers.standard import NoopStopper as NoopStopper
    from counterpoint.tune.stoppers.standard import TimeoutStopper as TimeoutStopper
    from counterpoint.tune.stoppers.standard import TrialPlateauStopper as TrialPlateauStopper
    from counterpoint.tune.stoppers.stopper import Stopper as Stopper
    from counterpoint.tune.trainable.session import checkpoint_dir as checkpoint_dir
    from counterpoint.tune.trainable.session import get_trial_dir as get_trial_dir
    from counterpoint.tune.trainable.session import get_trial_id as get_trial_id
    from counterpoint.tune.trainable.session import get_trial_name as get_trial_name
    from counterpoint.tune.trainable.session import report as report
    from counterpoint.tune.trainable.trainable import Trainable as Trainable
    from counterpoint.tune.trainable.with_parameters import with_parameters as with_parameters
    from counterpoint.tune.trial import Trial as Trial
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
