"""Runs a trainer that belongs to no job: in this process, or as several ranks, which this process starts and supervises.

The ranks are on this machine, under torch's elastic agent (`transport/process/ranks/node.py`), and use the loopback
interface only. `counterpoint/trainer/sft/launch.py` uses it for supervised fine-tuning. A job's trainer runs here if it has one
rank; several are a role with an ElasticMaster (`counterpoint/job/workers.py`). This module does not import torch, so that the
process above the ranks starts at once and needs little memory.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress

from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.config import Config
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.process.imports import trainer_imports
from counterpoint.transport.process.notify import Heartbeat, StatusLine, notify, notify_failure
from counterpoint.transport.process.permanent_errors import exit_code_of
from counterpoint.transport.process.ranks.node import RanksProcess, alone, python_command
from counterpoint.transport.process.stop_requests import StopSignals, end_at_second_request

logger = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
"""Rank 0's exit code after a SIGTERM: ours, or that of torch's agent, which ends all ranks when one has died."""

AGENT_STOP_SECONDS = 60.0
"""torch's agent itself kills ranks that have not ended 30 s after its SIGTERM."""


def run(config: TrainerConfig, on_ready: Callable[[], object]) -> int:
    """Runs the trainer until its runs are done, a stop signal, or a failure. Call it from the main thread, once a process.

    Args:
        config: `model` is a directory.
        on_ready: called once the model is loaded and the wire is open.

    Returns:
        0 done; 1 failed; 2 bad configuration; 3 every run was evicted; 74 the disk is full; 75 an obstacle that may pass; 128 +
        a signal that ended it before it was done, with a checkpoint.
    """
    try:
        (config.output_dir / "trainer").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"output_dir = {config.output_dir}: cannot be written: {error.strerror}"
        logger.error("%s", reason)
        notify_failure(reason)
        return exit_code_of(error)
    if config.nodes > 1:
        logger.error("nodes = %d: only a job has its trainer on several nodes; use processes here", config.nodes)
        return 2
    if config.processes > 1:
        return run_ranks(config, "counterpoint.trainer.rank_process", config, on_ready)
    with trainer_imports():
        from counterpoint.trainer.train import train
    return train(config, on_ready)


def run_ranks(config: TrainerConfig, module: str, given: Config, on_ready: Callable[[], object]) -> int:
    """Runs the trainer as `config.processes` ranks under torch's agent, until they end; returns rank 0's exit code.

    The command of each is `python -m module FILE`; the file has what was set of `given`, in JSON. A stop signal is forwarded to
    rank 0 alone, which finishes its step and ends the others' loops: the agent would end them all. If this process dies, the
    agent's guardian kills everything.
    """
    file = config.output_dir / "trainer" / "ranks.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(given.model_dump(mode="json", exclude_unset=True))  # pydantic's own JSON has no infinity
    write_atomically(file, text.encode())
    environment = {
        "OMP_NUM_THREADS": str(config.threads or 1),
        "PYTHONSAFEPATH": "1",  # as -P does, which the agent itself is started with
    }
    if (period := os.environ.get("WATCHDOG_USEC")) is not None:  # of this process, for rank 0's heartbeat
        environment["WATCHDOG_USEC"] = period
    command = python_command(module=module, arguments=(str(file),))
    ranks = alone(command, config.processes, environment)
    try:
        with StopSignals(end_at_second_request) as stop:
            return _supervise(ranks, stop, on_ready)
    finally:
        ranks.end(AGENT_STOP_SECONDS)


def _supervise(ranks: RanksProcess, stop: StopSignals, on_ready: Callable[[], object]) -> int:
    forwarded = ready = ended = False
    heartbeat, status = Heartbeat(), StatusLine()
    while not ended:
        if not (ended := ranks.code is not None):
            select.select([ranks], [], [], 0.2)
        for message in ranks.hear():
            if message.get("READY") == "1" and not ready:
                ready = True
                on_ready()
            if "STATUS" in message:
                status.show(message["STATUS"])
            if message.get("WATCHDOG") == "1":  # rank 0's heartbeat: this process only waits
                heartbeat.beat()
            if message.get("EXTEND_TIMEOUT_USEC", "").isdecimal():
                notify(f"EXTEND_TIMEOUT_USEC={message['EXTEND_TIMEOUT_USEC']}")
            if "X_FAILURE" in message:
                notify_failure(message["X_FAILURE"])
        if stop.count and not forwarded and not ended:
            forwarded = True
            if (rank_zero := ranks.number("MAINPID")) is None:
                logger.info("stopped before the ranks had started")
                ranks.terminate()
            else:
                with suppress(ProcessLookupError):  # it has died, and the agent will notice
                    os.kill(rank_zero, signal.SIGTERM)
    ranks.poll()
    code = ranks.number("EXIT_STATUS")
    if code is None and forwarded and not ready:
        return stop.exit_code
    if code is None or (code == TERMINATED and not forwarded):
        logger.error("a rank of the trainer died (%s); its last output is above", ranks.failure)
        return 1
    return stop.exit_code if code == TERMINATED else code  # rank 0 got a SIGTERM, whatever came here
