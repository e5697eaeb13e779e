"""Experiments over trials: search algorithms propose configurations, executors run them, schedulers stop, pause and copy them.

The model and the names are those of Ray Tune 1.x (`docs/tune.md`); the engine is our own. What users import is here, and is
loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune.analysis import Analysis
    from tune.callbacks.callback import Callback
    from tune.callbacks.csv_logger import CSVLoggerCallback
    from tune.callbacks.json_logger import JsonLoggerCallback
    from tune.callbacks.logger_callback import LoggerCallback
    from tune.callbacks.tensorboard_logger import TBXLoggerCallback
    from tune.callbacks.wandb_logger import WandbLoggerCallback
    from tune.checkpoint import Checkpoint
    from tune.errors import AbortTrialExecution, TuneError
    from tune.executors.local import LocalTrialExecutor
    from tune.executors.on_ray import RayTrialExecutor
    from tune.executors.trial_executor import TrialExecutor
    from tune.experiment import Experiment
    from tune.export_formats import ExportFormat
    from tune.registry import env_creator, register_env, register_trainable
    from tune.resources import Resources
    from tune.runner.trial_runner import TrialRunner
    from tune.schedulers.async_hyperband import ASHAScheduler, AsyncHyperBandScheduler
    from tune.schedulers.fifo import FIFOScheduler
    from tune.schedulers.hyperband import HyperBandScheduler
    from tune.schedulers.hyperband_bohb import HyperBandForBOHB
    from tune.schedulers.median_stopping import MedianStoppingRule
    from tune.schedulers.pb2 import PB2
    from tune.schedulers.pbt import PopulationBasedTraining
    from tune.schedulers.pbt_replay import PopulationBasedTrainingReplay
    from tune.schedulers.scheduler import TrialScheduler
    from tune.search.ask_tell import AskTellSearch
    from tune.search.basic_variant import BasicVariantGenerator
    from tune.search.creation import create_searcher
    from tune.search.generator import SearchGenerator
    from tune.search.optuna_search import OptunaSearch
    from tune.search.search_alg import SearchAlg
    from tune.search.searcher import Searcher
    from tune.search.spaces import (
        choice,
        grid_search,
        lograndint,
        loguniform,
        qlograndint,
        qloguniform,
        qrandint,
        qrandn,
        quniform,
        randint,
        randn,
        sample_from,
        uniform,
    )
    from tune.search.wrappers import ConcurrencyLimiter, Repeater
    from tune.start import run, run_experiments
    from tune.stoppers.standard import (
        CombinedStopper,
        ExperimentPlateauStopper,
        FunctionStopper,
        MaximumIterationStopper,
        NoopStopper,
        TimeoutStopper,
        TrialPlateauStopper,
    )
    from tune.stoppers.stopper import Stopper
    from tune.trainable.session import checkpoint_dir, get_trial_dir, get_trial_id, get_trial_name, report
    from tune.trainable.trainable import Trainable
    from tune.trial import Trial

_HOMES = {
    "tune.analysis": ("Analysis",),
    "tune.callbacks.callback": ("Callback",),
    "tune.callbacks.csv_logger": ("CSVLoggerCallback",),
    "tune.callbacks.json_logger": ("JsonLoggerCallback",),
    "tune.callbacks.logger_callback": ("LoggerCallback",),
    "tune.callbacks.tensorboard_logger": ("TBXLoggerCallback",),
    "tune.callbacks.wandb_logger": ("WandbLoggerCallback",),
    "tune.checkpoint": ("Checkpoint",),
    "tune.errors": ("AbortTrialExecution", "TuneError"),
    "tune.executors.local": ("LocalTrialExecutor",),
    "tune.executors.on_ray": ("RayTrialExecutor",),
    "tune.executors.trial_executor": ("TrialExecutor",),
    "tune.experiment": ("Experiment",),
    "tune.export_formats": ("ExportFormat",),
    "tune.registry": ("env_creator", "register_env", "register_trainable"),
    "tune.resources": ("Resources",),
    "tune.runner.trial_runner": ("TrialRunner",),
    "tune.schedulers.async_hyperband": ("ASHAScheduler", "AsyncHyperBandScheduler"),
    "tune.schedulers.fifo": ("FIFOScheduler",),
    "tune.schedulers.hyperband": ("HyperBandScheduler",),
    "tune.schedulers.hyperband_bohb": ("HyperBandForBOHB",),
    "tune.schedulers.median_stopping": ("MedianStoppingRule",),
    "tune.schedulers.pb2": ("PB2",),
    "tune.schedulers.pbt": ("PopulationBasedTraining",),
    "tune.schedulers.pbt_replay": ("PopulationBasedTrainingReplay",),
    "tune.schedulers.scheduler": ("TrialScheduler",),
    "tune.search.ask_tell": ("AskTellSearch",),
    "tune.search.basic_variant": ("BasicVariantGenerator",),
    "tune.search.creation": ("create_searcher",),
    "tune.search.generator": ("SearchGenerator",),
    "tune.search.optuna_search": ("OptunaSearch",),
    "tune.search.search_alg": ("SearchAlg",),
    "tune.search.searcher": ("Searcher",),
    "tune.search.spaces": (
        "choice",
        "grid_search",
        "lograndint",
        "loguniform",
        "qlograndint",
        "qloguniform",
        "qrandint",
        "qrandn",
        "quniform",
        "randint",
        "randn",
        "sample_from",
        "uniform",
    ),
    "tune.search.wrappers": ("ConcurrencyLimiter", "Repeater"),
    "tune.start": ("run", "run_experiments"),
    "tune.stoppers.standard": (
        "CombinedStopper",
        "ExperimentPlateauStopper",
        "FunctionStopper",
        "MaximumIterationStopper",
        "NoopStopper",
        "TimeoutStopper",
        "TrialPlateauStopper",
    ),
    "tune.stoppers.stopper": ("Stopper",),
    "tune.trainable.session": ("checkpoint_dir", "get_trial_dir", "get_trial_id", "get_trial_name", "report"),
    "tune.trainable.trainable": ("Trainable",),
    "tune.trial": ("Trial",),
}
"""Where each public name is defined."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PB2",
    "ASHAScheduler",
    "AbortTrialExecution",
    "Analysis",
    "AskTellSearch",
    "AsyncHyperBandScheduler",
    "BasicVariantGenerator",
    "CSVLoggerCallback",
    "Callback",
    "Checkpoint",
    "CombinedStopper",
    "ConcurrencyLimiter",
    "Experiment",
    "ExperimentPlateauStopper",
    "ExportFormat",
    "FIFOScheduler",
    "FunctionStopper",
    "HyperBandForBOHB",
    "HyperBandScheduler",
    "JsonLoggerCallback",
    "LocalTrialExecutor",
    "LoggerCallback",
    "MaximumIterationStopper",
    "MedianStoppingRule",
    "NoopStopper",
    "OptunaSearch",
    "PopulationBasedTraining",
    "PopulationBasedTrainingReplay",
    "RayTrialExecutor",
    "Repeater",
    "Resources",
    "SearchAlg",
    "SearchGenerator",
    "Searcher",
    "Stopper",
    "TBXLoggerCallback",
    "TimeoutStopper",
    "Trainable",
    "Trial",
    "TrialExecutor",
    "TrialPlateauStopper",
    "TrialRunner",
    "TrialScheduler",
    "TuneError",
    "WandbLoggerCallback",
    "checkpoint_dir",
    "choice",
    "create_searcher",
    "env_creator",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "register_env",
    "register_trainable",
    "report",
    "run",
    "run_experiments",
    "sample_from",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tune' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
