"""The runs of this trainer: which has which place, alike on every rank, and what is done when one comes or goes.

Rank 0 looks at the job's directory (`discover_runs`); then all ranks take over what it found (`synchronize_state`) and call
their hooks in one order, so that collective calls inside hooks meet. `trainer/runs/admission.py` says which runs may come in,
`trainer/runs/slot_plan.py` which of them get a place, and the hooks of `trainer/learner.py` make what a place holds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn

from run.config import LoraConfig, RunConfig
from trainer.lora.layer import MultiLora
from trainer.lora.multi_lora import is_target, peft_state
from trainer.loss import Loss
from trainer.optimizer import Optimizer
from trainer.runs import control_files
from trainer.runs.admission import Admissible, Admission, ConfigValidationHook, hook_name
from trainer.runs.slot_plan import plan
from transport.records import Batch

logger = logging.getLogger(__name__)

_STORE_KEY = "counterpoint/runs"

DiscoveredHook = Callable[[int, str, RunConfig], object]
CreationHook = Callable[[int, str, RunConfig], object]
ForgottenHook = Callable[[int, str], object]
DeletionHook = Callable[[int, str], object]


class HookError(RuntimeError):
    """A hook raised; the message names it, its run and what it raised."""


@dataclass(slots=True)
class Progress:
    """How far a run has been trained."""

    step: int = 0
    """The last step trained, which is the policy version of the weights."""
    total_tokens: int = 0
    total_samples: int = 0


@dataclass(slots=True)
class Run:
    """One run with a place: its configuration, what is trained, and how far."""

    index: int
    """Its place among the trainer's `max_runs`."""
    run_id: str
    config: RunConfig
    optimizer: Optimizer
    loss: Loss
    progress: Progress = field(default_factory=Progress)
    intact: bool = True
    """Whether the weights are those of `progress`. After an update that failed half-way they are not, and are never saved."""
    durable_step: int = 0
    """Acknowledged as durable: the batches up to this step will not be asked for again."""
    waiting: dict[int, Batch] = field(default_factory=dict)
    """Batches received and not yet trained, by step; on rank 0."""

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.steps


class MultiRunManager:
    """The places of one trainer. `config` and `progress` are those of the runs that have one, by index."""

    def __init__(self, output_dir: Path, max_runs: int, device: torch.device, seed: int = 0) -> None:
        """`seed`: of every run's initial adapter, whatever its index, so that the result does not depend on it."""
        self.output_dir = output_dir
        self.max_runs = max_runs
        self.device = device
        self.config: dict[int, RunConfig] = {}
        self.progress: dict[int, Progress] = {}
        """Set by rank 0's discovered hooks to where a run goes on, which all ranks then know."""
        self.waiting: list[str] = []
        """Runs without a place, in the order in which they get one; on rank 0."""
        self._seed = seed
        self._ids: dict[int, str] = {}
        self._admissions: dict[int, int] = {}
        """By index, the number of the admission that its present run came by: two of one run are not the same."""
        self._created: dict[int, tuple[int, str]] = {}
        """What the creation hooks have been called for on this rank: index to admission and run id."""
        self._admitted = self._synchronized = 0
        self._admission = Admission(output_dir)
        self._directories: dict[int, int] = {}
        """By index, the inode of the run's directory when it was admitted."""
        self._held: dict[int, int] = {}
        """By index, a descriptor of that directory: while it is open, no other one is given the inode."""
        self._given_up: set[int] = set()
        """Indices of runs that were evicted or refused since: should they be let in again at once, they begin anew."""
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._modules: dict[str, MultiLora] = {}

    # --- ids and indices ---

    @property
    def run_ids(self) -> dict[int, str]:
        """Index to run id."""
        return dict(self._ids)

    def index_of(self, run_id: str) -> int | None:
        """The index of a run; None where it has no place."""
        return next((index for index, held in self._ids.items() if held == run_id), None)

    # --- hooks ---

    def register_discovered_hook(self, hook: DiscoveredHook) -> None:
        """Rank 0 calls it with index, id and configuration when a run gets a place."""
        self._register("discovered", hook)

    def register_forgotten_hook(self, hook: ForgottenHook) -> None:
        """Rank 0 calls it with index and id when a run loses its place; what it holds is still there."""
        self._register("forgotten", hook)

    def register_creation_hook(self, hook: CreationHook) -> None:
        """Every rank calls it with index, id and configuration in `synchronize_state`."""
        self._register("creation", hook)

    def register_deletion_hook(self, hook: DeletionHook) -> None:
        """Every rank calls it with index and id in `synchronize_state`, before any creation."""
        self._register("deletion", hook)

    def register_config_validation_hook(self, hook: ConfigValidationHook) -> None:
        """Rank 0 calls it with every new configuration, before the run gets a place."""
        self._admission.hooks.append(hook)

    def _register(self, kind: str, hook: Callable[..., Any]) -> None:
        self._hooks.setdefault(kind, []).append(hook)

    def _call(self, kind: str, index: int, run_id: str, *more: object) -> None:
        for hook in self._hooks.get(kind, []):
            try:
                hook(index, run_id, *more)
            except Exception as error:
                raise HookError(
                    f"the {kind} hook {hook_name(hook)} failed for run {run_id!r} at index {index} on rank {_rank()}: {error!r}"
                ) from error

    # --- rank 0 ---

    def discover_runs(self, present: Collection[str] | None = None) -> bool:
        """Looks at the job's directory, lets runs go and come, and calls the forgotten and the discovered hooks. Rank 0 only.

        Args:
            present: the runs whose orchestrators are there; no other gets a place. None: every run does.

        Returns:
            Whether any place changed, so that `synchronize_state` is due on every rank.

        Raises:
            HookError: a hook raised.
            RuntimeError: called on another rank.
        """
        self._require_rank_zero("discover_runs")
        found = self._admission.look()
        places = self.run_ids
        since = {run_id: admissible.sighting.since for run_id, admissible in found.items()}
        renewed = {run_id for index, run_id in places.items() if self._is_renewed(index, found.get(run_id))}
        changes = plan(places, since, max_runs=self.max_runs, renewed=renewed, present=present)
        for index, run_id in changes.leaving.items():
            self._call("forgotten", index, run_id)
            self._vacate(index)
        for index, run_id in changes.admitted.items():
            self._occupy(index, found[run_id])
            self._call("discovered", index, run_id, self.config[index])
        if changes.waiting and changes.waiting != self.waiting:
            logger.info("all %d places are taken; waiting, oldest first: %s", self.max_runs, ", ".join(changes.waiting))
        self.waiting = changes.waiting
        return bool(changes.leaving or changes.admitted)

    def _occupy(self, index: int, admissible: Admissible) -> None:
        self._admitted += 1
        self._ids[index], self._admissions[index] = admissible.sighting.run_id, self._admitted
        self._directories[index] = admissible.sighting.directory
        with suppress(FileNotFoundError):  # gone since it was seen, as the next look will find
            directory = control_files.run_directory(self.output_dir, admissible.sighting.run_id)
            self._held[index] = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        self.config[index], self.progress[index] = admissible.config, Progress()

    def _vacate(self, index: int) -> None:
        for held in (self._ids, self._admissions, self._directories, self.config, self.progress):
            held.pop(index, None)
        self._given_up.discard(index)
        if (descriptor := self._held.pop(index, None)) is not None:
            os.close(descriptor)

    @property
    def refused(self) -> dict[str, str]:
        """Runs that get no place as they are, and why, for people; on rank 0, as of the last discovery."""
        return self._admission.refused

    def is_deleted(self, idx: int) -> bool:
        """Whether the directory that the run was admitted from is gone, be there another in its place or not. On rank 0."""
        try:
            found = control_files.run_directory(self.output_dir, self._ids[idx]).lstat().st_ino  # a link is no run
        except FileNotFoundError:
            return True
        return found != self._directories[idx]

    def evict_run(self, idx: int, reason: str) -> None:
        """Writes `control/evicted.txt`; the run loses its place at the next discovery. Where the file cannot be written, the run
        is refused until its configuration changes or the trainer starts anew. Rank 0 only."""
        self._require_rank_zero("evict_run")
        logger.warning("run %s is evicted: %s", self._ids[idx], reason)
        self._given_up.add(idx)
        try:
            control_files.evict(self.output_dir, self._ids[idx], reason)
        except OSError as error:
            if not self.is_deleted(idx):
                self._admission.refuse(self._ids[idx], f"{reason} ({error})")

    def refuse_run(self, idx: int, reason: str) -> None:
        """Takes the run's configuration for invalid after all: as with any such, its orchestrator shows why, the run loses its
        place at the next discovery, and is looked at again when its file has changed. Rank 0 only."""
        self._require_rank_zero("refuse_run")
        self._given_up.add(idx)
        self._admission.refuse(self._ids[idx], reason)

    def _require_rank_zero(self, what: str) -> None:
        if _rank() != 0:
            raise RuntimeError(
                f"{what} is rank 0's business, and this is rank {_rank()}: it follows by synchronize_state"
            )

    def _is_renewed(self, index: int, found: Admissible | None) -> bool:
        """Whether a run is to be admitted anew: it is another of the same name, or its configuration has changed in what the
        trainer uses."""
        return found is not None and (
            index in self._given_up
            or found.sighting.directory != self._directories[index]
            or _used(found.config) != _used(self.config[index])
        )

    # --- every rank ---

    def synchronize_state(self) -> None:
        """Takes over rank 0's places on every rank, which must all call it; then all deletion hooks are called, run by run and
        in the order of their registration, and then all creation hooks. With one process nothing is communicated.

        Raises:
            HookError: a hook raised.
        """
        self._synchronized += 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._exchange(f"{_STORE_KEY}/{self._synchronized}")
        for index, (admission, run_id) in sorted(self._created.items()):
            if self._admissions.get(index) != admission:
                self._call("deletion", index, run_id)
                del self._created[index]
        for index, admission in sorted(self._admissions.items()):
            if index not in self._created:
                self._call("creation", index, self._ids[index], self.config[index])
                self._created[index] = (admission, self._ids[index])

    def _exchange(self, key: str) -> None:
        """Rank 0's state to all ranks by the process group's store, in msgpack. The last reader clears it away."""
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set(key, msgpack.packb([self._state_of(index) for index in sorted(self._ids)]))
        else:
            self._take_over(msgpack.unpackb(store.get(key)))
        if store.add(f"{key}/read", 1) == dist.get_world_size():
            store.delete_key(key)
            store.delete_key(f"{key}/read")

    def _state_of(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "run_id": self._ids[index],
            "admission": self._admissions[index],
            "config": json.dumps(self.config[index].model_dump(mode="json")),  # pydantic's own JSON has no infinity
            "progress": asdict(self.progress[index]),
        }

    def _take_over(self, state: list[dict[str, Any]]) -> None:
        kept = {each["index"] for each in state if self._admissions.get(each["index"]) == each["admission"]}
        for index in self._ids.keys() - kept:
            self._vacate(index)
        for each in state:
            if (index := each["index"]) not in kept:
                self._ids[index], self._admissions[index] = each["run_id"], each["admission"]
                self.config[index] = RunConfig.model_validate(json.loads(each["config"]))
                self.progress[index] = Progress(**each["progress"])

    # --- adapters ---

    def register_module(self, prefix: str, module: MultiLora) -> None:
        """A layer with an adapter a run, at module path `prefix`; replaces a former one of that path."""
        self._modules[prefix] = module

    def get_named_parameters_for_run(self, idx: int) -> dict[str, nn.Parameter]:
        """The parameters of a run's adapter, by module path and name; float32."""
        return {
            f"{prefix}.{name}": parameter
            for prefix, module in self._modules.items()
            for name, parameter in module.adapter_parameters(idx).items()
        }

    def get_state_dict_for_run(self, idx: int) -> dict[str, Tensor]:
        """A run's adapter as PEFT names it, and vLLM loads it; detached, on the trainer's device."""
        return peft_state(self._modules, idx)

    def reset_run_parameters(self, idx: int) -> None:
        """Gives a run a fresh adapter on its target modules, whatever was in its slot before."""
        lora = self._lora(idx)
        generator = torch.Generator().manual_seed(self._seed)
        self.release_run_parameters(idx)
        for prefix, module in self._modules.items():
            if is_target(prefix, lora):
                module.admit(idx, lora.rank, lora.alpha, generator)

    def release_run_parameters(self, idx: int) -> None:
        """Empties the slot: nothing of the adapter remains."""
        for module in self._modules.values():
            module.release(idx)

    def scaling_factor(self, idx: int) -> float:
        """What a run's adapter is multiplied by: alpha over rank."""
        lora = self._lora(idx)
        return lora.alpha / lora.rank

    def _lora(self, idx: int) -> LoraConfig:
        lora = self.config[idx].training.lora
        if lora is None:
            raise ValueError(f"run {self._ids[idx]!r} trains full weights: it has no adapter")
        return lora


_manager: MultiRunManager | None = None


def setup_multi_run_manager(output_dir: Path, max_runs: int, device: torch.device, seed: int = 0) -> MultiRunManager:
    """Makes this process's manager. Raises `RuntimeError` when there is one."""
    global _manager
    if _manager is not None:
        raise RuntimeError("this process has its multi-run manager; get_multi_run_manager() returns it")
    _manager = MultiRunManager(output_dir, max_runs, device, seed)
    return _manager


def get_multi_run_manager() -> MultiRunManager:
    """This process's manager. Raises `RuntimeError` before `setup_multi_run_manager`."""
    if _manager is None:
        raise RuntimeError("there is no multi-run manager yet; call setup_multi_run_manager first")
    return _manager


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _used(config: RunConfig) -> tuple[object, ...]:
    """What the trainer uses of a configuration."""
    return config.steps, config.training, config.trainer_timeout_seconds
