"""A trial: one configuration under evaluation, its state and its history. Fields and states are those of Ray Tune 1.x.

A trial holds data only. The experiment's state machine (`counterpoint/tune/runner/`) is the only one that changes it; executors,
schedulers, search algorithms and loggers read it.
"""

from __future__ import annotations

import importlib
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.export_formats import check_formats
from counterpoint.tune.json_values import without_numpy
from counterpoint.tune.resources import Resources, resources_of
from counterpoint.tune.result import Result

ERROR_FILE = "error.txt"
"""A trial's failures, in its `logdir`."""

TRAINABLE_OF_RUNS = "run"
"""What trials that are runs have for a trainable's name."""

DEFAULT_RESULTS_DIRECTORY = "~/counterpoint_results"

LONGEST_DIRECTORY_NAME = 130
"""Characters; beyond that, the file names in a trial's directory could become too long for a path."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.,=+-]")

Creator = Callable[["Trial"], str]


@dataclass(eq=False)
class Trial:
    """One configuration, from its proposal to its end. Two trials are equal only if they are the same object.

    The arguments are those of Ray Tune 1.x, in that order, then the state; None stands for a default. Raises `TuneError` for what
    means nothing: an export format that there is not, a criterion that is no number, a name that no file can have.
    """

    PENDING: ClassVar[str] = "PENDING"
    RUNNING: ClassVar[str] = "RUNNING"
    PAUSED: ClassVar[str] = "PAUSED"
    TERMINATED: ClassVar[str] = "TERMINATED"
    ERROR: ClassVar[str] = "ERROR"
    STATUSES: ClassVar[tuple[str, ...]] = ("PENDING", "RUNNING", "PAUSED", "TERMINATED", "ERROR")

    trainable_name: str
    """A name given to `register_trainable`, or an import path `module:name`."""
    config: dict[str, Any] = None  # type: ignore[assignment]  # none is made a default below, here and at other fields
    """JSON values only. Schedulers may replace it (`TrialScheduler`'s `exploit`)."""
    trial_id: str = None  # type: ignore[assignment]
    """Unique in the experiment; part of paths, so `transport.config.IDENTIFIER_PATTERN` holds. By default a random one."""
    local_dir: str = DEFAULT_RESULTS_DIRECTORY
    """The experiment's directory, in which `logdir` is made."""
    evaluated_params: dict[str, Any] = None  # type: ignore[assignment]
    """What the search chose, by flat name (`"optimizer/lr"`)."""
    experiment_tag: str = ""
    """The index and the evaluated parameters in one word, as file names show it."""
    resources: Resources = None  # type: ignore[assignment]
    stopping_criterion: dict[str, float] = None  # type: ignore[assignment]
    """Stops the trial at the first result with a metric at or above its value."""
    remote_checkpoint_dir: str | None = None
    """A directory of a mounted file system (elsewhere with the runner's `sync_to_cloud`), in which a copy of `logdir` is kept."""
    checkpoint_freq: int = 0
    """A checkpoint after every so many results; 0 for none."""
    checkpoint_at_end: bool = False
    sync_on_checkpoint: bool = True
    """Whether the copies are made at each checkpoint, and not only at the trial's end."""
    keep_checkpoints_num: int | None = None
    """The best so many are kept; None keeps all."""
    checkpoint_score_attr: str = "training_iteration"
    """The metric by which checkpoints are ranked; a leading `min-` prefers the lowest."""
    export_formats: list[str] = None  # type: ignore[assignment]
    """Some of `tune.ExportFormat`."""
    restore_path: str | None = None
    """A checkpoint directory to begin from."""
    trial_name_creator: InitVar[Creator | None] = None
    """The user's function that makes `custom_name`."""
    trial_dirname_creator: InitVar[Creator | None] = None
    """The user's function that makes `dirname`."""
    loggers: Sequence[Callable[..., Any]] | None = field(default=None, metadata={"is_code": True})
    """See `tune.callbacks.trial_loggers`. Functions are not journalled: after a resume, set them again."""
    log_to_file: bool | str | tuple[str, str] = None  # type: ignore[assignment]
    """Files for stdout and stderr below `logdir`: True for `stdout` and `stderr`, one name, or two."""
    sync_to_driver_fn: Callable[[str, str], None] | None = field(default=None, metadata={"is_code": True})
    """Called with `logdir` as source and target, for an executor whose trials write elsewhere. As `loggers`, not journalled."""
    max_failures: int = 0
    """How often it is started again after a failure; -1 for without end. The loss of a process's node counts, too."""

    custom_name: str = ""
    """The name that `trial_name_creator` returned."""
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

    def __post_init__(self, trial_name_creator: Creator | None, trial_dirname_creator: Creator | None) -> None:
        if not isinstance(self.trainable_name, str):
            raise TuneError(
                f"trainable_name = {self.trainable_name!r}: expected text, module:name or the name given to register_trainable"
            )
        if ":" not in self.trainable_name and self.trainable_name != TRAINABLE_OF_RUNS:
            # This imports the module of trainables.
            importlib.import_module("counterpoint.tune.registry").trainable_path(self.trainable_name)
        self.config = {} if self.config is None else without_numpy(self.config)
        self.trial_id = self.trial_id or self.generate_id()
        if not re.fullmatch(IDENTIFIER_PATTERN, self.trial_id):
            raise TuneError(
                f"trial_id = {self.trial_id!r}: expected up to 64 letters, digits, '_', '.' and '-', the first no sign"
            )
        if self.local_dir.startswith("~"):
            self.local_dir = str(Path(self.local_dir).expanduser())
        self.evaluated_params = {} if self.evaluated_params is None else without_numpy(self.evaluated_params)
        self.resources = resources_of(self.resources, "resources")
        self.stopping_criterion = checked_criteria(self.stopping_criterion, "stopping_criterion")
        for count in ("checkpoint_freq", "keep_checkpoints_num", "max_failures"):
            setattr(self, count, without_numpy(getattr(self, count)))
        check_counts(self.checkpoint_freq, self.keep_checkpoints_num, self.max_failures)
        self.export_formats = check_formats(self.export_formats)
        self.log_to_file = False if self.log_to_file is None else self.log_to_file
        _check_log_files(self.log_to_file)
        if self.loggers is not None and not (isinstance(self.loggers, Sequence) and all(map(callable, self.loggers))):
            raise TuneError(
                f"loggers = {self.loggers!r}: expected a list of classes, called with (config, logdir, trial)"
            )
        if trial_name_creator is not None:
            self.custom_name = _creators_answer("trial_name_creator", trial_name_creator(self))
        if trial_dirname_creator is not None:
            self.dirname = _creators_answer("trial_dirname_creator", trial_dirname_creator(self))

    @classmethod
    def generate_id(cls) -> str:
        """Returns a random id."""
        return uuid.uuid4().hex[:8]

    def named_by_tag(self) -> str:
        """The name of a directory that says which trial it is and how it was configured."""
        plain = f"{self}_{self.experiment_tag}" if self.experiment_tag else str(self)
        return _UNSAFE.sub("_", plain)[:LONGEST_DIRECTORY_NAME]

    def as_dict(self) -> dict[str, Any]:
        """All fields that are data. Its checkpoints stay objects."""
        return {name: getattr(self, name) for name in _DATA} | {
            "resources": self.resources.model_dump(exclude_defaults=True)
        }

    @property
    def logdir(self) -> str:
        """The directory of its results, logs and checkpoints."""
        return str(Path(self.local_dir) / (self.dirname or self.trial_id))

    @property
    def error_file(self) -> str | None:
        """The file of the trial's errors, once it has one."""
        return None if self.error_msg is None else str(Path(self.logdir) / ERROR_FILE)

    def write_error(self, number: int, text: str) -> None:
        """Appends the failure of that number to the error file, unless it is there already. Raises `OSError`."""
        path = Path(self.logdir) / ERROR_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        heading = f"Failure # {number} "
        if path.exists() and any(line.startswith(heading) for line in path.read_text(errors="replace").splitlines()):
            return
        with path.open("a") as file:
            file.write(f"{heading}(at {datetime.now():%Y-%m-%d %H:%M:%S})\n{text.rstrip()}\n\n")

    def is_finished(self) -> bool:
        """Whether it will never run again."""
        return self.status in (self.TERMINATED, self.ERROR)

    def __str__(self) -> str:
        return self.custom_name or f"{self.trainable_name.rpartition(':')[2]}_{self.trial_id}"

    __repr__ = __str__


_DATA = tuple(each.name for each in fields(Trial) if not each.metadata.get("is_code"))


def _creators_answer(creator: str, answer: object) -> str:
    if not isinstance(answer, str) or not answer or _UNSAFE.search(answer) or answer.startswith("."):
        raise TuneError(f"{creator} returned {answer!r}: expected a name of letters, digits and '_.,=+-'")
    return answer[:LONGEST_DIRECTORY_NAME]


def check_counts(checkpoint_freq: int, keep_checkpoints_num: int | None, max_failures: int) -> None:
    """Raises `TuneError` for a number of checkpoints or failures that means nothing."""
    if checkpoint_freq < 0:
        raise TuneError(f"checkpoint_freq = {checkpoint_freq}: expected 0 or more")
    if keep_checkpoints_num is not None and keep_checkpoints_num < 1:
        raise TuneError(f"keep_checkpoints_num = {keep_checkpoints_num}: expected 1 or more, or None for all")
    if max_failures < -1:
        raise TuneError(f"max_failures = {max_failures}: expected 0 or more, or -1 for without end")


def checked_criteria(given: object, where: str) -> dict[str, float]:
    """The value at which to stop, by metric. Raises `TuneError` for what no result could reach."""
    if given is not None and not isinstance(given, Mapping):
        raise TuneError(f"{where} = {given!r}: expected a dict of metrics and the numbers at which to stop")
    criteria: dict[str, float] = {}
    for metric, value in without_numpy(dict(given or {})).items():
        if not isinstance(metric, str) or isinstance(value, str) or not isinstance(value, int | float):
            raise TuneError(
                f"{where}[{metric!r}] = {value!r}: expected a metric's name and the number at which to stop"
            )
        if math.isnan(value):
            raise TuneError(f"{where}[{metric!r}] is not a number, which no result reaches")
        criteria[metric] = float(value) if isinstance(value, bool) else value
    return criteria


def _check_log_files(given: object) -> None:
    names = given if isinstance(given, tuple | list) else (given, given)
    if not isinstance(given, bool) and (len(names) != 2 or not all(isinstance(name, str) for name in names)):
        raise TuneError(f"log_to_file = {given!r}: expected True, False, a file's name, or two of them")
