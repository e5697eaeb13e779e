"""Starts the trainer in this process, joins its ranks, runs its loop (`loop.py`), and tells how it has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing

from safetensors import SafetensorError

from counterpoint.trainer import ranks
from counterpoint.trainer.config import READY_SECONDS, TrainerConfig
from counterpoint.trainer.faults import LacksMemory, ModelLost, is_out_of_memory
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.loop import Trainer
from counterpoint.trainer.model.deterministic import advice_on
from counterpoint.trainer.model.load import choose_device
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.epochs import Epochs
from counterpoint.trainer.runs.manager import setup_multi_run_manager
from counterpoint.trainer.telemetry.endpoint import TrainerEndpoint
from counterpoint.trainer.work.sources import NoWire, Sources
from counterpoint.transport.process.notify import StatusLine, beating, notify_failure
from counterpoint.transport.process.permanent_errors import DISK_FULL, exit_code_of, is_disk_full, not_written, way_on
from counterpoint.transport.process.priority import wake_soon
from counterpoint.transport.process.start_time import asking_for_time
from counterpoint.transport.process.stop_requests import StopSignals, end_at_second_request
from counterpoint.transport.telemetry.start_phases import enter
from counterpoint.transport.wires.open import open_receiver

logger = logging.getLogger(__name__)


def train(config: TrainerConfig, on_ready: Callable[[], object], sources: Sources | None = None) -> int:
    """Trains in this process, as one rank of several if it is one; arguments and result are those of `trainer.launch.run`.

    With `sources` no orchestrator is heard.
    """
    wake_soon()
    enter("loads and proves the model")
    if not config.resume and (found := checkpoint.holds_any(config.output_dir)) is not None:
        advice = "continue it with --resume (in a file: resume = true), or use another output_dir"
        return _failed(2, f"{found} is from an earlier training; {advice}")
    stop = StopSignals(end_at_second_request)
    with ExitStack() as stack:
        if not ranks.is_follower():
            stack.enter_context(stop)
        try:
            device = choose_device(config.device)
            (status := StatusLine()).show(f"loading {config.model}")
            begins = stack.enter_context(ExitStack())
            begins.enter_context(asking_for_time(READY_SECONDS))
            group = stack.enter_context(ranks.join(config, device))
            if ranks.is_follower():  # not before, since no handler runs while it waits for a rank that has died
                stack.enter_context(stop)
            manager = setup_multi_run_manager(config.output_dir, config.max_runs, config.seed)
            learner = Learner(config, group, manager)
            if group.index > 0:
                return _follow(learner)
            refusal = Epochs(config.output_dir, manager).refusal
            receiver = stack.enter_context(
                closing(NoWire() if sources else open_receiver(config.transport, config.output_dir, refusal))
            )
            endpoint = stack.enter_context(TrainerEndpoint(config))
        except (ValueError, OSError) as error:
            return _failed(exit_code_of(error), str(error))
        except (MemoryError, RuntimeError) as error:
            if advice := advice_on(error):
                return _failed(2, f"{config.model} cannot be loaded: {error}{advice}")
            if not is_out_of_memory(error):
                raise
            return _failed(1, f"there is not enough memory to load {config.model}: {error}")
        begins.close()
        status.show("")
        enter("waits for a run")
        on_ready()
        stack.enter_context(beating())
        try:
            with closing(Trainer(learner, receiver, sources, endpoint)) as trainer:
                code = trainer.serve(stop)
        except (LacksMemory, ModelLost) as error:
            return _failed(1, str(error))
        except (OSError, SafetensorError) as error:
            said = f"{not_written(error, config.output_dir)}. What was published before is intact{way_on(error)}"
            return _failed(DISK_FULL if is_disk_full(error) else 1, said)
        except RuntimeError as error:
            if silence := group.silence(error):
                return _failed(1, silence)
            raise
        learner.stop()
        return code


def _failed(code: int, reason: str) -> int:
    """Says why the trainer ends, in its log and to its supervisor; returns its exit code."""
    logger.error("%s", reason)
    notify_failure(reason)
    return code


def _follow(learner: Learner) -> int:
    try:
        learner.follow()
    except Exception as error:
        logger.exception("rank %d of %d failed, and with it the trainer", learner.ranks.index, learner.ranks.count)
        if silence := learner.ranks.silence(error):
            logger.error("%s", silence)
        return 1
    return 0
