"""The first phase of a job with `[sft]`: supervised fine-tuning, whose weights all of its runs begin with.

It is `counterpoint sft` in the directory `sft/` of the job's, as a process of its own before any role starts. It resumes by
itself, exactly, and `done.json` is written once it is done: it is never trained again, nor with other settings.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from counterpoint.job.check import SAFE_PATH
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.layers import without_configuration
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.derive import sft_of
from counterpoint.job.directory import steps_of
from counterpoint.job.placement import devices
from counterpoint.job.reading.fine_tuning import DIRECTORY, DONE, MOST_BYTES, NEWEST_BYTES, RUN_ID, fine_tuning_of
from counterpoint.job.reading.metrics.metrics_lines import Follower, Line
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps, write_atomically
from counterpoint.transport.files.untrusted import read_json
from counterpoint.transport.process.child import Child, last_lines
from counterpoint.transport.process.notify import notify_ready
from counterpoint.transport.process.stop_requests import StopSignals

LOG = "sft.log"

LOOK_SECONDS = 0.25
SAY_SECONDS = 10.0
"""Pause between two lines of progress."""

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes after which it is not started again: it was asked to end."""


def check_resumed(job: JobConfig, has_steps: bool) -> None:
    """Raises `UserError` for a resume whose weights would not be those that the job began with. `has_steps`: of a run."""
    known = fine_tuning_of(job.output_dir)
    done = known is not None and known.weights is not None
    if job.sft is None and done:
        raise UserError(
            "--resume: the job began with supervised fine-tuning: put [sft] back, or start anew with --fresh"
        )
    if job.sft is not None and has_steps and not done:
        raise UserError(
            "--resume: [sft] comes before the first step, and the job has steps already: remove it, or start anew with --fresh"
        )
    if job.sft is not None and done:
        before = read_json(job.output_dir / DIRECTORY / DONE, MOST_BYTES)["settings"]
        now = _settings(job)
        if changed := [f"sft.{key}" for key in sorted({*before, *now}) if before.get(key, ...) != now.get(key, ...)]:
            raise UserError(
                f"--resume: supervised fine-tuning is done, with another {', '.join(changed)}: put it back, or start anew with "
                "--fresh"
            )


def begun_with(job: JobConfig, weights: Path) -> JobConfig:
    """Returns the job whose runs begin with `weights`: a model, or an adapter over the job's."""
    lora = job.orchestrator.training.lora
    if lora is None:
        return job.with_model(weights)

    def of(run: Any) -> Any:
        begun = run.training.lora.model_copy(update={"start_from": weights})
        same = run.training.start_from is not None  # of another run, which begins with them
        training = run.training if same else run.training.model_copy(update={"lora": begun})
        return run.model_copy(update={"training": training})

    return job.model_copy(update={"orchestrator": of(job.orchestrator), "runs": [of(run) for run in job.runs]})


def as_begun(job: JobConfig) -> JobConfig:
    """Returns the job whose runs begin with the weights of its fine-tuning, once that is done."""
    found = fine_tuning_of(job.output_dir.absolute()) if job.sft is not None else None
    return job if found is None or found.weights is None else begun_with(job, found.weights)


def fine_tune(job: JobConfig, say: Callable[[str], None]) -> int:
    """Trains until the end, unless that was reached before; returns the exit code of a job that goes no further, or 0.

    Call it from the main thread. SIGTERM and SIGINT end it in order, with a checkpoint.
    """
    found = fine_tuning_of(job.output_dir)
    if found is not None and found.weights is not None:
        return 0
    config = sft_of(job)
    config.output_dir.mkdir(exist_ok=True)
    file, log = config.output_dir / "sft.toml", config.output_dir / LOG
    write_atomically(file, to_toml(config).encode())
    say(f"supervised fine-tuning first; its log is {log}")
    notify_ready()
    code = 0
    for attempt in range(job.max_restarts + 1):
        if attempt:
            say(f"supervised fine-tuning ended with exit code {code}; start {attempt + 1} of {job.max_restarts + 1}")
        code = _train(job, file, log, say)
        if code in (0, UserError.code, *_STOPPED):
            break
    if code:
        if code not in _STOPPED:
            said = last_lines(log, 1) or ["it has said nothing"]
            say(f"supervised fine-tuning ended with exit code {code}: {said[-1]}; its log is {log}")
        return code
    broadcast = Path(f"run_{RUN_ID}") / "broadcast"
    step = published_steps(config.output_dir / broadcast)[-1]
    weights = broadcast / f"step_{step}"
    done = {"weights": str(weights), "steps": step, "settings": _settings(job)}
    write_atomically(config.output_dir / DONE, orjson.dumps(done))
    say(
        f"supervised fine-tuning is done after {step} steps; rollouts begin with its weights, {config.output_dir / weights}"
    )
    return 0


def _settings(job: JobConfig) -> dict[str, Any]:
    """Returns what decides about the weights, for JSON."""
    others = {"output_dir", "model", "run_id", "resume", "trainer"}
    settings = sft_of(job).model_dump(mode="json", exclude_unset=True, exclude=others)
    for key in ("checkpoint_interval", "keep_every"):
        settings["training"].pop(key, None)
    return settings


def _train(job: JobConfig, file: Path, log: Path, say: Callable[[str], None]) -> int:
    """Runs the command once, and says how far it is; returns its exit code."""
    visible = devices(job)["trainer"] if job.gpus.trainer is not None else []
    placed = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))} if visible else {}
    follower, total = Follower(file.parent / "trainer" / "metrics.jsonl", NEWEST_BYTES), None
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "sft", str(file)]
    variables = {**without_configuration(os.environ), **SAFE_PATH, **placed}
    said, newest = time.monotonic(), dict[str, Any]()
    with (
        Child("supervised fine-tuning", command, environment=variables, log=log) as process,
        StopSignals(lambda request, number: process.signal(signal.SIGTERM)) as signals,
    ):
        while (code := process.code) is None:
            time.sleep(LOOK_SECONDS)
            newest = [newest, *follower.new_lines(lambda: None)][-1]
            if newest and time.monotonic() - said > SAY_SECONDS:
                total = total or steps_of(file.parent, RUN_ID)
                say(f"sft step {newest['step']}/{total or '?'}{_loss(newest)}")
                said, newest = time.monotonic(), {}
    return signals.exit_code or code


def _loss(line: Line) -> str:
    loss = line.get("loss")
    return f"  loss {loss:.4g}" if isinstance(loss, float) else ""
