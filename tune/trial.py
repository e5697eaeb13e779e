"""A trial: one configuration under evaluation, its state and its history. Fields and states are those of Ray Tune 1.x.

A trial holds data only. The experiment's state machine (`tune/runner/`) is the only one that changes it; executors, schedulers,
search algorithms and loggers read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tune.checkpoint import Checkpoint
from tune.resources import Resources
from tune.result import Result


@dataclass(eq=False)
class Trial:
    """One configuration, from its proposal to its end. Two trials are equal only if they are the same object."""

    PENDING: ClassVar[str] = "PENDING"
    RUNNING: ClassVar[str] = "RUNNING"
    PAUSED: ClassVar[str] = "PAUSED"
    TERMINATED: ClassVar[str] = "TERMINATED"
    ERROR: ClassVar[str] = "ERROR"

    trainable_name: str
    """A name given to `register_trainable`, or an import path `module:name`."""
    config: dict[str, Any] = field(default_factory=dict)
    """JSON values only. Schedulers may replace it (`TrialScheduler`'s `exploit`)."""
    trial_id: str = ""
    """Unique in the experiment; part of paths, so `transport.config.IDENTIFIER_PATTERN` holds."""
    local_dir: str = ""
    """The experiment's directory, in which `logdir` is made."""
    evaluated_params: dict[str, Any] = field(default_factory=dict)
    """What the search chose, by flat name (`"optimizer/lr"`)."""
    experiment_tag: str = ""
    """The index and the evaluated parameters in one word, as file names show it."""
    resources: Resources = field(default_factory=Resources)
    stopping_criterion: dict[str, float] = field(default_factory=dict)
    """Stops the trial at the first result with a metric at or above its value."""
    checkpoint_freq: int = 0
    """A checkpoint after every so many results; 0 for none."""
    checkpoint_at_end: bool = False
    keep_checkpoints_num: int | None = None
    """The best so many are kept; None keeps all."""
    checkpoint_score_attr: str = "training_iteration"
    """The metric by which checkpoints are ranked; a leading `min-` prefers the lowest."""
    export_formats: list[str] = field(default_factory=list)
    restore_path: str | None = None
    """A checkpoint directory to begin from."""
    log_to_file: bool | str | tuple[str, str] = False
    """Files for stdout and stderr below `logdir`: True for `stdout` and `stderr`, one name, or two."""
    max_failures: int = 0
    """How often it is started again after a failure; -1 for without end. The loss of a process's node counts, too."""
    custom_name: str = ""
    """What `trial_name_creator` returned."""
    dirname: str = ""
    """The name of `logdir` below `local_dir`."""

    status: str = "PENDING"
    last_result: Result = field(default_factory=dict)
    num_results: int = 0
    """How many of its results were counted: delivered to the scheduler, the search and the callbacks, each once."""
    num_failures: int = 0
    error_msg: str | None = None
    checkpoint: Checkpoint | None = None
    """The newest that is durable, from which it resumes."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """The durable ones that are kept, oldest first."""

    @property
    def logdir(self) -> str:
        """The directory of its results, logs and checkpoints."""
        return str(Path(self.local_dir) / (self.dirname or self.trial_id))

    @property
    def error_file(self) -> str | None:
        """Where its errors are written, once it has one."""
        return None if self.error_msg is None else str(Path(self.logdir) / "error.txt")

    def is_finished(self) -> bool:
        """Whether it will never run again."""
        return self.status in (self.TERMINATED, self.ERROR)

    def __str__(self) -> str:
        return self.custom_name or f"{self.trainable_name.rpartition(':')[2]}_{self.trial_id}"

    __repr__ = __str__
