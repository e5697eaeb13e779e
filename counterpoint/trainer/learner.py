"""The part that every rank does alike: it holds the model and the runs' torch state, and carries out commands on them.

Rank 0 (`counterpoint/trainer/loop.py`) sends each command (`counterpoint/trainer/commands.py`) to all ranks, and then all carry
it out. The manager (`counterpoint/trainer/runs/manager.py`) admits and removes runs, and its hooks here make and delete their
torch state.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.environments.import_path import not_allowed
from counterpoint.inference.digest import Digest
from counterpoint.run.items import Objective, UpdateValues
from counterpoint.run.trained import LoraConfig, TrainedRun
from counterpoint.trainer import commands
from counterpoint.trainer.broadcast import Assembled, digests_over_ranks
from counterpoint.trainer.commands import AnyCommand, Command, Result
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import Row
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.loaded_model import LoadedModel
from counterpoint.trainer.lora.adapter_file import load_adapter, start_of
from counterpoint.trainer.lora.targets import check_targets
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.context import shared_rows
from counterpoint.trainer.model.deterministic import advice_on, use_deterministic_algorithms
from counterpoint.trainer.model.experts import expert_weights
from counterpoint.trainer.model.passes import PassDiscarded
from counterpoint.trainer.model.sharding import rest, rows_of, whole_weights
from counterpoint.trainer.optimizer import Optimizer
from counterpoint.trainer.packer import InvalidBatch, check
from counterpoint.trainer.probe import BrokenWeights, ask
from counterpoint.trainer.ranks import HEARTBEAT_SECONDS, Ranks
from counterpoint.trainer.rows import StepRow
from counterpoint.trainer.runs import checkpoint, copies
from counterpoint.trainer.runs.copies import Copy
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run, Shards
from counterpoint.trainer.runs.slices import OtherSlices, SlicesLost, SliceWriter
from counterpoint.trainer.telemetry.step_times import StepTimes
from counterpoint.trainer.updates.passes import optional_inputs
from counterpoint.trainer.updates.reference import References
from counterpoint.trainer.updates.value_head import ValueHead
from counterpoint.trainer.work import batch_parts
from counterpoint.trainer.work.contribution import Contribution, StepOutcome, given_columns
from counterpoint.trainer.work.measure import measure_row
from counterpoint.trainer.work.step import conclude, described, finish, next_pass, refuse_if_any, train_row
from counterpoint.transport import codec
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.process.cores import own_cores
from counterpoint.transport.records import Batch

logger = logging.getLogger(__name__)


class Learner:
    """The learner of one rank. Rank 0 calls the methods that are commands; the other ranks call `follow`."""

    def __init__(self, config: TrainerConfig, ranks: Ranks, manager: MultiRunManager) -> None:
        """Loads the model, and registers the hooks with the manager.

        Raises:
            ValueError: the model cannot be loaded or trained, or its router cannot be replayed.
        """
        use_deterministic_algorithms(config.deterministic)
        torch.manual_seed(config.seed)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        elif ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and (cores := own_cores()) is not None:
            torch.set_num_threads(cores)
        self.config = config
        self.ranks = ranks
        self.manager = manager
        self.runs: dict[int, Run] = {}
        """The runs that could be made, by slot; the records of the others say why not."""
        self.contributions: dict[int, list[Contribution]] = {}
        """The contributions, by slot, of a run since its last update, in order."""
        self.heartbeat_seconds = min(HEARTBEAT_SECONDS, config.rank_silence_seconds / 4)
        self._slices = SliceWriter(config.output_dir, ranks.index)
        self._references = References(config.model, config.dtype, ranks, sharded=config.sharded)
        self.loaded = LoadedModel.load(config, ranks)
        manager.register_config_validation_hook(self._fits_the_slots)
        manager.register_config_validation_hook(self._fits_the_model)
        manager.register_config_validation_hook(self._has_a_loss)
        manager.register_creation_hook(self._create)
        manager.register_deletion_hook(self._delete)

    # --- commands, on rank 0 ---

    def synchronize(self) -> None:
        """Takes over the manager's slots: removes the runs that lost theirs, and makes those that got one, at their steps."""
        self._tell(commands.Synchronize())

    def open_step(self, slot: int, batch: Batch, objective: Objective | None = None) -> Contribution:
        """Opens a contribution of a run's batch, for the configured loss or `objective`, beside those since the last update.

        Raises `InvalidBatch`, with nothing opened, when it cannot be trained.
        """
        check(batch, self.loaded.limits)
        if objective is None:
            objective = Objective()
        elif objective.loss is not None:
            kind = str(objective.loss.get("kind", ""))
            if ":" in kind and kind not in self.config.allowed_imports:
                raise InvalidBatch(not_allowed(kind, "loss.kind"))
        header, arrays = dict[str, Any](), b""
        if self.ranks.count > 1:
            try:
                header, arrays = batch_parts.outline(batch)
            except MemoryError as error:  # before any other rank knows of the step
                raise InvalidBatch(described(error, f"opening step {batch.step}")) from error
        step = self._tell(commands.Begin(slot, batch.step, header, arrays, objective), batch)
        step.sent = [set() for _ in range(self.ranks.count)]
        return step

    def train_rows(self, rows: Sequence[Row]) -> None:
        """Trains one micro-batch on each rank; `rows`: of each rank, samples of open steps by slot."""
        count = self.ranks.count
        # Several ranks share a row, or each has its own.
        parts = [self._parts(rank, rows[rank * len(rows) // count]) if rank else [] for rank in range(count)]
        sizes = [[(slot, samples, [f.nbytes for f in frames]) for slot, samples, frames in own] for own in parts]
        self._share(command := commands.Train(rows, sizes))
        for rank, own in enumerate(parts):
            for _, _, frames in own:
                self.ranks.send(rank, b"".join(frames))
        self.carry_out(command)

    def _parts(self, rank: int, row: Row) -> list[tuple[int, list[int], list[memoryview]]]:
        """Returns the samples of a rank's row that it has not got yet, by slot, with the frames of their batches."""
        parts: list[tuple[int, list[int], list[memoryview]]] = []
        for slot, samples in row:
            step = self._step(slot)
            if new := [sample for sample in samples if sample not in step.sent[rank]]:
                step.sent[rank].update(new)
                frames = codec.encode(batch_parts.part(step.batch, new))
                parts.append((slot, new, [as_bytes_view(frame) for frame in frames]))
        return parts

    def next_pass(self, slot: int, values: UpdateValues) -> Contribution | None:
        """Ends the current pass of a run's step, whose samples are trained, if another one follows; returns the step then.

        An update that ends it has these values. The samples are those of the next pass then.

        Raises `InvalidBatch`: the run is as before the step, and all contributions since the last update are dropped.
        """
        step = self._step(slot)
        if step.is_last_pass:
            return None
        self._tell(commands.EndPass(slot, values))
        return step

    def conclude(self, slot: int) -> StepOutcome:
        """Adds up what the newest contribution has come to, whose samples are trained; its gradients wait for an update.

        Raises `InvalidBatch`: all contributions since the last update are dropped.
        """
        return self._tell(commands.Conclude(slot))

    def times(self, slot: int) -> StepTimes:
        """Returns the times of a run's open step, on this rank."""
        return self._step(slot).times

    def finish_step(self, slot: int, values: UpdateValues) -> dict[str, MetricValue]:
        """Updates a run whose samples are trained, with these values; returns its metrics.

        Raises `InvalidBatch`: the run is as before the step.
        """
        return self._tell(commands.Finish(slot, values))

    def copy_step(self, slot: int, step: int) -> Copy:
        """Puts the copy that a run has accepted for `step` in place of its update. Raises `InvalidBatch`, on every rank."""
        return self._tell(commands.PutCopy(slot, step))

    def assemble(self, slot: int) -> Assembled | None:
        """Puts together what a broadcast of the run needs of all ranks; None if nothing, as the model is not divided.

        Raises `BrokenWeights`: the model raises an error.
        """
        return self._tell(commands.Assemble(slot)) if self.config.divided else None

    def drop_step(self, slot: int) -> None:
        """Drops the run's contributions since its last update, if there are any: the run is as after that update."""
        self._tell(commands.Drop(slot))

    def keep_alive(self) -> None:
        """Sends the other ranks an empty command, before their wait for a command times out."""
        self._share(commands.Wait())

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Calls `keep_alive` every `heartbeat_seconds` while the block runs, which may wait for the disk but send no command."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(self.heartbeat_seconds):
                self.keep_alive()

        if self.ranks.count == 1:
            yield
            return
        heart = threading.Thread(target=beat, name="ranks-heartbeat", daemon=True)
        heart.start()
        try:
            yield
        finally:
            done.set()
            heart.join()

    def stop(self) -> None:
        """Ends the other ranks' `follow`."""
        self._share(commands.Stop())

    def _share(self, command: AnyCommand) -> None:
        if self.ranks.count > 1:
            self.ranks.share(commands.encode(command))

    def _tell(self, command: Command[Result], batch: Batch | None = None) -> Result:
        """Has all ranks carry out a command; raises what rank 0's `carry_out` raises."""
        assert isinstance(command, AnyCommand)
        self._share(command)
        result: Result = self.carry_out(command, batch)
        return result

    # --- on every rank ---

    def follow(self) -> None:
        """Carries out rank 0's commands until `Stop`; on every rank but 0."""
        while not isinstance(command := commands.decode(self.ranks.share(None)), commands.Stop):
            try:
                self.carry_out(command)
            except (InvalidBatch, BrokenWeights, SlicesLost) as error:  # rank 0 has the same error and handles it
                logger.debug("rank %d: %s", self.ranks.index, error)

    def carry_out(self, command: AnyCommand, batch: Batch | None = None) -> Any:
        """Carries out a command, as all ranks do. `batch`, which rank 0 has, is that of a step to begin.

        Raises `InvalidBatch`, `BrokenWeights` or `SlicesLost`, on every rank alike.
        """
        match command:
            case commands.Synchronize():
                self.manager.synchronize_state()
            case commands.Begin(slot, number, header, arrays, objective):
                return self._begin(slot, number, lambda: batch or batch_parts.unfilled(header, arrays), objective)
            case commands.Train(rows, parts):
                self._receive(parts[self.ranks.index])
                self._train(rows)
            case commands.Conclude(slot):
                return self._conclude(slot)
            case commands.EndPass(slot, values):
                self._end_pass(slot, values)
            case commands.Finish(slot, values):
                return finish(self.contributions.pop(slot), self.ranks, values)
            case commands.PutCopy(slot, step):
                return self._copy(slot, step)
            case commands.Assemble(slot):
                return self._assemble(slot)
            case commands.Drop(slot):
                self._drop(slot)
            case commands.BeginSlices(slot):
                self._begin_slice(slot)
            case commands.AskForSlices(run_id):
                return self._ranks_that_write(run_id)
        return None

    def _receive(self, parts: Sequence[tuple[int, list[int], list[int]]]) -> None:
        """Fills in the samples that rank 0 sends to this rank."""
        for slot, samples, sizes in parts if self.ranks.index else ():
            frames = _split(self.ranks.receive(sum(sizes)), sizes)
            given = codec.decode(frames, self.config.transport.max_batch_bytes)
            batch_parts.fill(self._step(slot).batch, samples, given)

    def _begin(self, slot: int, number: int, batch: Callable[[], Batch], objective: Objective) -> Contribution:
        """Opens a contribution to the step of that number, of what `batch` returns.

        Raises `InvalidBatch` on every rank, with nothing opened, if any lacks memory for it or for what the step measures.
        """
        run, together, fault = self.runs[slot], self.contributions.setdefault(slot, []), None
        try:
            whole = batch()
            given = given_columns(objective, whole, self.loaded.limits.vocabulary)
            step = Contribution(run, whole, self.ranks.device, self._export_directory(run), objective, given, together)
            if step.width > 1 and self.ranks.context is not None:
                raise InvalidBatch(f"{step.width} targets of each token: ranks that share rows take one")
        except InvalidBatch as error:
            fault = str(error)
        except Exception as error:  # noqa: BLE001 - any error is sent to the other ranks
            fault = described(error, f"opening step {number}")
        refuse_if_any(self.ranks, fault)
        together.append(step)
        return step

    def _step(self, slot: int) -> Contribution:
        """Returns the run's newest contribution since its last update."""
        assert self.contributions.get(slot), f"the run in slot {slot} has no contribution"
        return self.contributions[slot][-1]

    def _end_pass(self, slot: int, values: UpdateValues) -> None:
        try:
            next_pass(self._step(slot), self.ranks, values)
        except InvalidBatch:  # no gradient is left
            self._drop(slot)
            raise

    def _conclude(self, slot: int) -> StepOutcome:
        step = self._step(slot)
        try:
            outcome = conclude(step, self.ranks)
        except InvalidBatch:
            if step.objective.forward_only:
                self.contributions[slot].pop()
            else:
                self._drop(slot)
            raise
        if step.objective.forward_only:
            self.contributions[slot].pop()
        return outcome

    def _train(self, rows: Sequence[Row]) -> None:
        own = [(self._step(slot), samples) for slot, samples in rows[self.ranks.row]]
        self._watch_references()
        # Of divided experts, owners have gradients from the rows of other ranks, also of adapters.
        everyones = self.ranks.experts is not None
        summed = [
            steps[-1]
            for slot, steps in self.contributions.items()
            if steps and (everyones or self.runs[slot].torch.shards is not None)
        ]
        self.loaded.rows.train(own, self._train_row, summed)

    def _train_row(self, row: StepRow) -> None:
        measured = [part for part in row if part[0].current.measures]
        trained = [part for part in row if not part[0].current.measures]
        model, replay, limits = self.loaded.model, self.loaded.replay, self.loaded.limits
        with ExitStack() as stack:
            for each in {
                model,
                *(step.run.torch.reference for step, _ in measured if step.run.torch.reference is not None),
            }:
                stack.enter_context(shared_rows(each, self.ranks.context))
            if measured:
                began = time.perf_counter()
                measure_row(model, replay, limits, measured)
                for step, _ in measured:
                    step.times.add("measure", began, time.perf_counter())
            with torch.no_grad():
                train_row(model, replay, limits, [part for part in trained if part[0].objective.forward_only])
            train_row(model, replay, limits, [part for part in trained if not part[0].objective.forward_only])

    def _copy(self, slot: int, step: int) -> Copy:
        run, state, fault = self.runs[slot], None, None
        try:
            state = copies.read(run, self.config.output_dir, step)
        except copies.CopyRefused as error:
            fault = str(error)
        refuse_if_any(self.ranks, fault)
        assert state is not None
        try:
            copies.put(run, state)
        except copies.CopyRefused as error:
            fault = str(error)
        refuse_if_any(self.ranks, fault, run)
        return state.copy

    def _assemble(self, slot: int) -> Assembled:
        rest(self.loaded.model)
        weights, digests = dict[str, Tensor](), dict[str, Digest]()
        if self.runs[slot].torch.shards is not None:
            weights = whole_weights(self.loaded.model, self.ranks.index == 0)
            digests = digests_over_ranks(self.loaded.model, self.config.server_dtypes, self.ranks)
        assert self.loaded.passes is not None
        self.loaded.passes.begin()
        answers = fault = None
        try:
            answers = ask(self.loaded.model, slot)
        except PassDiscarded as error:
            logger.debug("rank %d: %s", self.ranks.index, error)
        except Exception as error:  # any error of a model
            if is_fatal(error):
                raise
            logger.warning("the probe failed", exc_info=True)
            fault = f"the probe failed: {type(error).__name__}: {error}{advice_on(error)}"
        self.loaded.passes.end(failed=fault is not None)
        rest(self.loaded.model)
        if faults := self.ranks.faults(fault):
            raise BrokenWeights("; ".join(dict.fromkeys(faults)))
        assert answers is not None
        return Assembled(weights, digests, answers)

    def _write_others(self, slot: int) -> OtherSlices:
        self._tell(commands.BeginSlices(slot))
        run = self.runs[slot]
        assert run.torch.shards is not None
        return OtherSlices(run.torch.shards.ranks, lambda: self._tell(commands.AskForSlices(run.run_id)))

    def _begin_slice(self, slot: int) -> None:
        run = self.runs[slot]
        shards = run.torch.shards
        assert shards is not None
        if self.ranks.index < shards.ranks:
            rows = shards.rows
            self._slices.begin(
                run.run_id,
                lambda: {key: each for key, each in run.torch.newest().items() if key.partition(".")[2] in rows},
            )

    def _ranks_that_write(self, run_id: str) -> list[int]:
        """Returns the ranks whose slices are not on the disk yet.

        Raises `SlicesLost`, on every rank, if one cannot be written.
        """
        writing = torch.zeros(self.ranks.count)
        writing[self.ranks.index] = float(self._slices.is_writing(run_id))
        self.ranks.agree(writing)
        late = writing.nonzero().flatten().tolist()
        if not late and (faults := self.ranks.faults(self._slices.fault(run_id))):
            raise SlicesLost("; ".join(dict.fromkeys(faults)))
        return late

    def _drop(self, slot: int) -> None:
        if self.contributions.pop(slot, None):
            self.runs[slot].torch.optimizer.zero_grad()
            self.runs[slot].torch.restore()

    def _export_directory(self, run: Run) -> Path | None:
        exported = run.config.training.token_export
        return self.config.output_dir / "trainer" / "tokens" / run.run_id if exported else None

    # --- the manager's hooks ---

    def _fits_the_slots(self, config: TrainedRun) -> tuple[bool, str]:
        if config.training.lora is None and self.config.max_runs > 1:
            return False, (
                f"training.lora is not set: full weights are trained by a trainer with max_runs = 1, and this one has "
                f"max_runs = {self.config.max_runs}; add [training.lora], or use another trainer for this run"
            )
        refusal = self.config.refuses_value_head(config.training)
        return refusal is None, refusal or ""

    def _fits_the_model(self, config: TrainedRun) -> tuple[bool, str]:
        try:
            if config.training.lora is not None:
                check_targets(self.loaded.model, config.training.lora, self.config.max_lora_rank)
        except ValueError as error:
            return False, str(error)
        return True, ""

    def _has_a_loss(self, config: TrainedRun) -> tuple[bool, str]:
        loss = config.training.loss
        if ":" in loss.kind and loss.kind not in self.config.allowed_imports:
            return False, not_allowed(loss.kind, "training.loss.kind")
        try:
            load_loss(loss, optional_inputs(config))
        except ValueError as error:
            return False, str(error)
        return True, ""

    def _create(self, slot: int, run_id: str) -> None:
        """Makes a run at the step that rank 0 has found. An error concerns this run alone; all ranks note it in the record."""
        run = self.manager.registry.in_slot(slot)
        config = run.config
        try:
            # First: all ranks load it together, and an error of one of them is that of all.
            reference = self._references.open(slot, config.training, self.loaded.limits.vocabulary)
            parameters = (
                self._full_weights() if config.training.lora is None else self._adapter(slot, config.training.lora)
            )
            head = self._value_head() if config.training.value_head is not None else None
            optimizer = Optimizer(
                parameters | (head.parameters() if head else {}),
                config.training.optimizer,
                offload=self.config.optimizer_offload,
            )
            run.torch.loss = load_loss(config.training.loss, optional_inputs(config))
            run.torch.optimizer, run.torch.value_head, run.torch.reference = optimizer, head, reference
            if self.config.divided and config.training.lora is None:
                run.torch.shards = self._shards(slot)
            if step := run.progress.step:
                checkpoint.load(run, self.config.output_dir, step, random_state=self.config.max_runs == 1)
            elif config.training.start_from is not None:
                copies.put(run, copies.read(run, self.config.output_dir, 0))
            if config.training.reference_is_start:
                run.torch.reference_slot = self.manager.keep_adapter(
                    slot, start_of(self.config.output_dir, run_id, run.progress.step)
                )
            failure = ""
        except (ValueError, CheckpointError) as error:
            failure = run.failure or str(error)
        except Exception as error:  # a lack of memory, or any error of an adapter or optimizer
            if is_fatal(error):
                raise
            failure = f"{type(error).__name__}: {error}{advice_on(error)}"
        failed = torch.tensor([float(bool(failure))], device=self.ranks.device)
        self.ranks.maximum(failed)
        if float(failed):
            run.failure = failure or "it could not be made on another rank; see that rank's log"
            logger.warning("rank %d: run %s cannot be trained: %s", self.ranks.index, run_id, run.failure)
            run.torch.release()
            self._close_reference(slot)  # at once: ranks that share rows must agree on the models of a row
        else:
            self.runs[slot] = run

    def _delete(self, slot: int, run_id: str) -> None:
        self._drop(slot)
        if (run := self.runs.pop(slot, None)) is not None:
            run.torch.release()
        self._close_reference(slot)
        self.manager.release_run_parameters(slot)

    def _close_reference(self, slot: int) -> None:
        self._references.close(slot)
        self._watch_references()

    def _watch_references(self) -> None:
        if self.loaded.passes is not None and (self.ranks.context is not None or self.config.sharded):
            self.loaded.passes.watch(self._references.models)

    def _adapter(self, slot: int, lora: LoraConfig) -> dict[str, nn.Parameter]:
        if self.loaded.trained_in_full:
            self.loaded = self.loaded.loaded_again(self.manager)
        self.loaded.add_adapters(self.manager, lora)
        self.manager.reset_run_parameters(slot)
        run = self.manager.registry.in_slot(slot)
        if run.beginning is not None and not run.progress.step:
            load_adapter(lambda: self.manager.get_state_dict_for_run(slot), lora, run.beginning)
        return dict(self.manager.get_named_parameters_for_run(slot))

    def _shards(self, slot: int) -> Shards:
        ranks, group = self.ranks, self.ranks.experts
        rows, write_others = rows_of(self.loaded.model), partial(self._write_others, slot)
        if not self.config.sharded:
            assert group is not None
            return Shards(group.index, group.size, rows, {}, write_others, group)
        parallel = {} if group is None else dict.fromkeys(expert_weights(self.loaded.model), group.size)
        return Shards(ranks.index, ranks.count, rows, parallel, write_others)

    def _value_head(self) -> ValueHead:
        return ValueHead(self.loaded.model.get_output_embeddings().weight.shape[-1], self.ranks.device)

    def _full_weights(self) -> dict[str, nn.Parameter]:
        if not self.loaded.is_as_loaded:
            self.loaded = self.loaded.loaded_again(self.manager)
        return self.loaded.train_in_full()


def _split(data: bytes, sizes: list[int]) -> list[memoryview]:
    view = memoryview(data)
    ends = [0, *accumulate(sizes)]
    return [view[start:end] for start, end in pairwise(ends)]
