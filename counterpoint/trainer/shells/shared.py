"""What the loop and its shells share: what is in progress of each run in a slot, and its way out, by publication or eviction."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from safetensors import SafetensorError

from counterpoint.trainer.broadcast import Assembled, Broadcaster
from counterpoint.trainer.fair_share import FairShare, Row
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricsFile
from counterpoint.trainer.probe import BrokenWeights, ask_together
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.trainer.runs.requested import RunRequests
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.telemetry.endpoint import TrainerEndpoint
from counterpoint.trainer.telemetry.mismatch import MismatchWatch
from counterpoint.trainer.telemetry.published import TrainerTelemetry
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.order import Order
from counterpoint.trainer.work.sessions import Sessions
from counterpoint.trainer.work.sources import Item
from counterpoint.transport.files.atomic import DISK_FAULTS
from counterpoint.transport.wires.base import BatchReceiver

logger = logging.getLogger(__name__)


class Shared:
    """The parts of one trainer, and what is in progress by slot."""

    def __init__(
        self, learner: Learner, receiver: BatchReceiver, endpoint: TrainerEndpoint, on_durable: Callable[[str], object]
    ) -> None:
        """Receives by `receiver`. `on_durable` is called with the id of each run that has a new durable checkpoint."""
        config = self.config = learner.config
        self.learner = learner
        self.registry = learner.manager.registry
        self.orders: dict[int, Order[Item]] = {}
        """The orders of the runs whose items are taken."""
        self.broadcasters: dict[int, Broadcaster] = {}
        """Each writes one run's directory, and holds a tensor of its last probe."""
        self.sessions = Sessions(config, receiver, learner.manager, self.orders)
        self.metrics = MetricsFile(config.output_dir / "trainer" / "metrics.jsonl")
        self.mismatches = MismatchWatch(config.output_dir)
        self.endpoint = endpoint
        self.telemetry = TrainerTelemetry(config.output_dir, config.max_runs, self.registry)
        self.checkpoints = Checkpoints(
            config.output_dir, config.keep_checkpoints, learner.kept_alive, on_durable, self.telemetry.spans
        )
        self.requests = RunRequests(config.output_dir, self.checkpoints)
        self.shares = FairShare(config.row_tokens, learner.ranks.count // config.context_parallel)
        self.slots_change = True
        """Whether a run is known to enter or leave a slot soon."""
        self._spent: defaultdict[int, float] = defaultdict(float)
        """The seconds of all ranks that the rows of each slot's item in progress have taken."""

    @property
    def open_slots(self) -> list[int]:
        """The slots of which an item is carried out."""
        return [slot for slot, order in sorted(self.orders.items()) if order.taken is not None]

    def share(self, run: Run, step: Contribution) -> None:
        """Gives the samples of the step's current pass to the rows."""
        lengths = {each: step.length(each) for each in step.samples}
        self.shares.add(run.slot, run.config.training.weight, lengths, run.config.share)

    def spend(self, rows: Sequence[Row], seconds: float) -> None:
        """Divides the time of rows among the runs that share them, by tokens."""
        tokens: defaultdict[int, int] = defaultdict(int)
        for slot, samples in (part for row in rows for part in row):
            step = self.learner.contributions[slot][-1]
            tokens[slot] += sum(map(step.length, samples))
        for slot, count in tokens.items():
            self._spent[slot] += seconds * self.learner.ranks.count * count / sum(tokens.values())

    def take_spent(self, slot: int) -> float:
        """Returns the seconds of all ranks that the rows of the slot's item have taken, and forgets them."""
        return self._spent.pop(slot, 0.0)

    def drop(self, slot: int) -> None:
        """Drops the item that is in progress in a slot, if there is one."""
        order = self.orders.get(slot)
        if order is not None and (item := order.drop()) is not None and item.batch is not None:
            self.drop_contributions(slot)

    def drop_contributions(self, slot: int) -> None:
        """Drops the contributions of a run since its last update."""
        self.shares.remove(slot)
        self._spent.pop(slot, None)
        self.learner.drop_step(slot)

    def evict(self, run: Run, reason: str) -> None:
        """Evicts a run; what it has trained is kept."""
        self.drop(run.slot)
        self.orders.pop(run.slot, None)
        self.learner.manager.evict_run(run.slot, reason)
        self.sessions.send_away(run.run_id, reason)
        self.slots_change = True

    def probe(self, runs: Sequence[Run]) -> dict[int, Assembled]:
        """Has the adapters of several runs answer the probe together, for `publish`; returns what there is by slot.

        That is nothing of a divided model, whose ranks answer together, of a single run, and if the model raises an error:
        `publish` then asks each run by itself, and an error is of that run.
        """
        learner = self.learner
        if self.config.divided or len(runs) < 2:
            return {}
        slots = [run.slot for run in runs]
        try:
            with learner.kept_alive():
                answers = ask_together(learner.loaded.model, slots, self.config.row_tokens)
        except Exception as error:
            if is_fatal(error):
                raise
            logger.debug("%d runs are asked one by one: %s", len(runs), error)
            return {}
        return {slot: Assembled({}, {}, each) for slot, each in zip(slots, answers, strict=True)}

    def publish(self, run: Run, anew: bool = False, assembled: Assembled | None = None) -> bool:
        """Publishes the weights; returns False if it failed, and the run leaves. `anew` first removes later versions.

        `assembled` is the run's, of `probe`.
        """
        broadcaster, learner = self.broadcasters[run.slot], self.learner
        try:
            assembled = assembled or learner.assemble(run.slot)
            with learner.kept_alive():
                if anew:
                    self.requests.note_published(run)
                    broadcaster.remove_beyond(run.progress.step or -1)
                broadcaster.publish(learner.loaded.model, run, assembled)
        except BrokenWeights as error:
            self.evict(run, str(error))
            return False
        except OSError as error:
            alone = self.config.max_runs == 1
            if error.errno in DISK_FAULTS and (alone or broadcaster.is_on_disk_of_job):
                raise
            if not learner.manager.is_deleted(run.slot):  # not writable, or about to be deleted
                self.evict(run, f"version {run.progress.step} of its weights cannot be published: {error}")
            self.slots_change = True
            return False
        except Exception as error:
            if is_fatal(error) or isinstance(error, SafetensorError):
                raise
            logger.warning("run %s cannot be published", run.run_id, exc_info=True)
            self.evict(run, f"version {run.progress.step} of its weights cannot be published: {error}")
            return False
        return True
