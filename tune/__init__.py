"""Experiments over trials: search algorithms propose configurations, executors run them, schedulers stop, pause and copy them.

The model and the names are those of Ray Tune 1.x (`docs/tune.md`); the engine is our own. What users import is here, and is
loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from tune.analysis import Analysis as Analysis
    from tune.callbacks.callback import Callback as Callback
    from tune.callbacks.csv_logger import CSVLoggerCallback as CSVLoggerCallback
    from tune.callbacks.json_logger import JsonLoggerCallback as JsonLoggerCallback
    from tune.callbacks.logger_callback import LoggerCallback as LoggerCallback
    from tune.callbacks.tensorboard_logger import TBXLoggerCallback as TBXLoggerCallback
    from tune.callbacks.wandb_logger import WandbLoggerCallback as WandbLoggerCallback
    from tune.checkpoint import Checkpoint as Checkpoint
    from tune.errors import AbortTrialExecution as AbortTrialExecution
    from tune.errors import TuneError as TuneError
    from tune.executors.attempt import Deadlines as Deadlines
    from tune.executors.local import LocalTrialExecutor as LocalTrialExecutor
    from tune.executors.on_ray import RayTrialExecutor as RayTrialExecutor
    from tune.executors.trial_executor import TrialExecutor as TrialExecutor
    from tune.experiment import Experiment as Experiment
    from tune.export_formats import ExportFormat as ExportFormat
    from tune.registry import env_creator as env_creator
    from tune.registry import register_env as register_env
    from tune.registry import register_trainable as register_trainable
    from tune.resources import Resources as Resources
    from tune.runner.trial_runner import TrialRunner as TrialRunner
    from tune.schedulers.async_hyperband import ASHAScheduler as ASHAScheduler
    from tune.schedulers.async_hyperband import AsyncHyperBandScheduler as AsyncHyperBandScheduler
    from tune.schedulers.hyperband import HyperBandScheduler as HyperBandScheduler
    from tune.schedulers.median_stopping import MedianStoppingRule as MedianStoppingRule
    from tune.schedulers.pbt import PopulationBasedTraining as PopulationBasedTraining
    from tune.schedulers.pbt_replay import PopulationBasedTrainingReplay as PopulationBasedTrainingReplay
    from tune.schedulers.scheduler import FIFOScheduler as FIFOScheduler
    from tune.schedulers.scheduler import TrialScheduler as TrialScheduler
    from tune.search.ask_tell import AskTellSearch as AskTellSearch
    from tune.search.basic_variant import BasicVariantGenerator as BasicVariantGenerator
    from tune.search.creation import create_searcher as create_searcher
    from tune.search.generator import SearchGenerator as SearchGenerator
    from tune.search.optuna_search import OptunaSearch as OptunaSearch
    from tune.search.search_alg import SearchAlg as SearchAlg
    from tune.search.searcher import Searcher as Searcher
    from tune.search.spaces import choice as choice
    from tune.search.spaces import grid_search as grid_search
    from tune.search.spaces import lograndint as lograndint
    from tune.search.spaces import loguniform as loguniform
    from tune.search.spaces import qlograndint as qlograndint
    from tune.search.spaces import qloguniform as qloguniform
    from tune.search.spaces import qrandint as qrandint
    from tune.search.spaces import qrandn as qrandn
    from tune.search.spaces import quniform as quniform
    from tune.search.spaces import randint as randint
    from tune.search.spaces import randn as randn
    from tune.search.spaces import sample_from as sample_from
    from tune.search.spaces import uniform as uniform
    from tune.search.wrappers import ConcurrencyLimiter as ConcurrencyLimiter
    from tune.search.wrappers import Repeater as Repeater
    from tune.start import run as run
    from tune.start import run_experiments as run_experiments
    from tune.stoppers.standard import CombinedStopper as CombinedStopper
    from tune.stoppers.standard import ExperimentPlateauStopper as ExperimentPlateauStopper
    from tune.stoppers.standard import FunctionStopper as FunctionStopper
    from tune.stoppers.standard import MaximumIterationStopper as MaximumIterationStopper
    from tune.stoppers.standard import NoopStopper as NoopStopper
    from tune.stoppers.standard import TimeoutStopper as TimeoutStopper
    from tune.stoppers.standard import TrialPlateauStopper as TrialPlateauStopper
    from tune.stoppers.stopper import Stopper as Stopper
    from tune.trainable.session import checkpoint_dir as checkpoint_dir
    from tune.trainable.session import get_trial_dir as get_trial_dir
    from tune.trainable.session import get_trial_id as get_trial_id
    from tune.trainable.session import get_trial_name as get_trial_name
    from tune.trainable.session import report as report
    from tune.trainable.trainable import Trainable as Trainable
    from tune.trial import Trial as Trial
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
