"""Trains one trial of a sweep in the worker that claimed it: what a body calls that trains a model on conversations.

The trial's configuration is that of `counterpoint sft`, with names in place of paths (`counterpoint/sweep/placeholders.py`). They
are resolved here, under the root of the region in which the worker runs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.cluster.spec import Resources
from counterpoint.job.check import SAFE_PATH
from counterpoint.job.claim_directory import claim_directory
from counterpoint.sweep.placeholders import resolve_names
from counterpoint.sweep.regions import ROOT_VARIABLE, region_root
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import describe_exit

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1

STOP_SECONDS = 240.0
"""How long a training may take to end in order, with a checkpoint."""

CONFIG_FILE = "trial.toml"


class TrainingFailed(Exception):
    """The training of a trial ended before it was complete."""


def resolve_training_env(base_env: Mapping[str, str] | None, resources: Resources) -> dict[str, str]:
    """Returns the variables of a process that trains with these resources; those of `base_env` come first.

    Its threads are as many as its cores: without a limit each of several processes of a machine takes all. Where regions keep
    their files is taken along; in which region it runs is for its node to say.
    """
    threads = {"OMP_NUM_THREADS": str(int(resources.cpu))} if resources.cpu >= 1 else {}
    place = {ROOT_VARIABLE: os.environ[ROOT_VARIABLE]} if ROOT_VARIABLE in os.environ else {}
    return threads | place | dict(base_env or {})


def extras_for_resources(resources: Resources) -> list[str]:
    """Returns the project's extras that a process with these resources needs."""
    return ["gpu"] if resources.gpu else ["cpu"]


def run_training_on_worker(
    name: str,
    raw_config: Mapping[str, Any],
    override_output_path: str | None = None,
    resources: Resources | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Trains a trial to its end, or goes on where an earlier worker of this region was.

    What was trained with another configuration, by an attempt that failed, is moved aside as by `counterpoint sft --fresh`.
    `raw_config` has the keys of a file for `counterpoint sft` without `output_dir`, which is `override_output_path`, or `name`
    below the root of this worker's region. An exception in this thread, or `stop`, ends the training in order. Call it in the
    main thread. Raises `TrainingFailed` if it ends before it is complete, `UserError` for an output that is no directory,
    `ValueError` as `region_root`.
    """
    output_path = override_output_path or f"{region_root()}/{name}"
    if "://" in output_path:
        raise UserError(
            f"trial {name}: its output {output_path} is no directory: the trainer writes files; mount the bucket"
        )
    config = resolve_names(dict(raw_config), output_path, region_root()) | {"output_dir": output_path}
    file, text = Path(output_path) / CONFIG_FILE, tomli_w.dumps(config)
    if file.exists() and tomllib.loads(file.read_text()) != tomllib.loads(text):
        with claim_directory(file.parent, fresh=True) as moved:
            logger.warning("trial %s has another configuration now; its earlier training was moved to %s", name, moved)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())
    command = [sys.executable, "-m", "counterpoint.cli.main", "sft", str(file), "--resume"]
    variables = resolve_training_env(None, resources or Resources()) | SAFE_PATH
    with Child(f"the training of trial {name}", command, environment=dict(os.environ) | variables) as process:
        try:
            while (code := process.code) is None and not (stop is not None and stop.is_set()):
                time.sleep(POLL_SECONDS)
        finally:
            process.stop(STOP_SECONDS)
    if code != 0:
        how = "was stopped" if code is None else describe_exit(code)
        raise TrainingFailed(f"the training of trial {name} in {output_path} {how}; its output is in this worker's")
