"""Admits the runs of a job to this trainer's slots, alike on every rank, and calls the hooks when one is admitted or leaves.

Rank 0 scans the job's directory (`discover_runs`); then all ranks take over its slots (`synchronize_state`) and call their hooks
in one order, so that collective calls inside hooks meet. `counterpoint/trainer/runs/admission.py` checks which runs may be
trained, `counterpoint/trainer/runs/registry.py` keeps the runs and decides which have a slot, and the hooks of
`counterpoint/trainer/learner.py` make what torch holds of them.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterpoint.run.trained import LoraConfig, TrainedRun
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.lora.adapter_file import beginning, load_adapter
from counterpoint.trainer.lora.multi_lora import peft_state
from counterpoint.trainer.lora.targets import is_target
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.runs import control_files
from counterpoint.trainer.runs.admission import Admission, ConfigValidationHook, hook_name
from counterpoint.trainer.runs.registry import RunRegistry
from counterpoint.trainer.runs.run import Run, RunProgress

logger = logging.getLogger(__name__)

_STORE_KEY = "counterpoint/runs"

DiscoveredHook = Callable[[int, str, TrainedRun], object]
CreationHook = Callable[[int, str], object]
ForgottenHook = Callable[[int, str], object]
DeletionHook = Callable[[int, str], object]
DirectoryDeletedHook = Callable[[str], object]


class HookError(RuntimeError):
    """A hook raised an error that is not fatal (`faults.py`); the message names the hook, the run and the error."""


class ScalingFactors(Mapping[int, float]):
    """The quotient alpha over rank, by slot, of the runs that train adapters. A discovered hook may set the factor of its run.

    They are kept in the configurations with which the runs were admitted, so that layers, exports and digests agree.
    """

    def __init__(self, registry: RunRegistry) -> None:
        """Reads and changes the configurations in `registry`."""
        self._registry = registry

    def __getitem__(self, idx: int) -> float:
        """Returns the factor of a run. Raises `KeyError`: the slot is free, or its run trains full weights."""
        lora = self._registry.in_slot(idx).config.training.lora
        if lora is None:
            raise KeyError(idx)
        return lora.alpha / lora.rank

    def __iter__(self) -> Iterator[int]:
        """Iterates over the slots whose runs train adapters."""
        return (run.slot for run in self._registry.at() if run.config.training.lora is not None)

    def __len__(self) -> int:
        """Returns how many runs train adapters."""
        return sum(1 for _ in self)

    def __setitem__(self, idx: int, factor: float) -> None:
        """Sets the factor of a run that is being admitted, on every rank, as another `training.lora.alpha` would.

        Raises:
            KeyError: the slot is free, or its run trains full weights.
            RuntimeError: the run's adapter has been made.
            ValueError: the factor is not a positive number.
        """
        if self[idx] == factor:
            return  # alpha is not rounded
        run = self._registry.in_slot(idx)
        if run.created or run.admitted_with is None:
            raise RuntimeError(
                f"scaling_factors[{idx}] of run {run.run_id!r} was set after its adapter was made, or on another rank than "
                "0; set it in a discovered hook"
            )
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"scaling_factors[{idx}] = {factor}: expected a positive number")
        training = run.config.training
        assert training.lora is not None
        lora = training.lora.model_copy(update={"alpha": factor * training.lora.rank})
        run.config = run.config.model_copy(update={"training": training.model_copy(update={"lora": lora})})


class MultiRunManager:
    """The slots of one trainer: their runs in `registry`, their hooks, and their adapters in the model."""

    def __init__(self, output_dir: Path, max_runs: int, seed: int = 0) -> None:
        """Starts with `max_runs` free slots. `seed` is that of an initial adapter without its own, whatever its slot."""
        self._output_dir = output_dir
        self.registry = RunRegistry(max_runs)
        self._seed = seed
        self._synchronized = 0
        self._admission = Admission(output_dir, self.registry)
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._modules: dict[str, MultiLora] = {}
        self.scaling_factors = ScalingFactors(self.registry)
        """The factors of the products of adapters, alpha over rank, by slot. A discovered hook may set one."""

    @property
    def max_runs(self) -> int:
        """The number of slots."""
        return self.registry.max_runs

    # --- hooks ---

    def register_discovered_hook(self, hook: DiscoveredHook) -> None:
        """Registers a hook that rank 0 calls with slot, id and configuration when a run gets a slot."""
        self._register("discovered", hook)

    def register_forgotten_hook(self, hook: ForgottenHook) -> None:
        """Registers a hook that rank 0 calls with slot and id before a run loses its slot."""
        self._register("forgotten", hook)

    def register_creation_hook(self, hook: CreationHook) -> None:
        """Registers a hook that every rank calls with slot and id in `synchronize_state`, after all deletions."""
        self._register("creation", hook)

    def register_deletion_hook(self, hook: DeletionHook) -> None:
        """Registers a hook that every rank calls with slot and id in `synchronize_state`, before any creation."""
        self._register("deletion", hook)

    def register_directory_deleted_hook(self, hook: DirectoryDeletedHook) -> None:
        """Registers a hook that rank 0 calls with the id of a run whose directory was deleted after it had lost its slot."""
        self._register("directory deleted", hook)

    def register_config_validation_hook(self, hook: ConfigValidationHook) -> None:
        """Registers a hook that rank 0 calls with every new configuration, before the run gets a slot."""
        self._admission.hooks.append(hook)

    def _register(self, kind: str, hook: Callable[..., Any]) -> None:
        self._hooks.setdefault(kind, []).append(hook)

    def _call(self, kind: str, run_id: str, *arguments: object) -> None:
        for hook in self._hooks.get(kind, []):
            try:
                hook(*arguments)
            except Exception as error:
                if is_fatal(error):  # no error of the hook
                    raise
                raise HookError(
                    f"the {kind} hook {hook_name(hook)} failed for run {run_id!r} on rank {_rank()}: {error!r}"
                ) from error

    # --- rank 0 ---

    def discover_runs(self, present: Collection[str] | None = None) -> bool:
        """Scans the job's directory, gives and takes slots, and calls the forgotten and the discovered hooks; on rank 0.

        In this order: the directories are scanned; the forgotten hooks are called for runs that were deleted or evicted; the
        configurations of new runs are checked; the forgotten hooks are called for runs that lose their slots by what was
        checked (a configuration that is refused or has changed, or a run that yields); the discovered hooks are called.

        Args:
            present: the runs whose orchestrators are present; no other gets a slot. None: all count as present.

        Returns:
            Whether any slot changed, so that `synchronize_state` is due on every rank.

        Raises:
            HookError: a hook raised.
            RuntimeError: called on another rank.
        """
        self._require_rank_zero("discover_runs")
        new = self._admission.scan()
        for run_id, inode in self.registry.missing:
            if self.is_gone(run_id, inode):
                self.registry.directory_deleted(run_id)
                self._call("directory deleted", run_id, run_id)
        gone, before = self.registry.gone, self.registry.queue
        self._forget(gone)
        self._admission.check(new)
        changes = self.registry.plan(present)
        self._forget(changes.leaving)
        for slot, run_id in changes.admitted.items():
            run = self.registry.occupy(slot, run_id, self._open_directory(run_id))
            run.beginning = beginning(self._output_dir, run.config)
            self._call("discovered", run_id, slot, run_id, run.config)
        if changes.waiting and changes.waiting != before:
            logger.info(
                "all %d slots are taken; waiting, oldest first: %s", self.registry.max_runs, ", ".join(changes.waiting)
            )
        return bool(gone or changes.leaving or changes.admitted)

    def _forget(self, leaving: Mapping[int, str]) -> None:
        for slot, run_id in leaving.items():
            self._call("forgotten", run_id, slot, run_id)
            self._vacate(slot)

    def _open_directory(self, run_id: str) -> int | None:
        with suppress(FileNotFoundError):  # deleted since the scan, as the next one finds out
            return os.open(control_files.run_directory(self._output_dir, run_id), os.O_PATH | os.O_CLOEXEC)
        return None

    def _vacate(self, slot: int) -> None:
        if (descriptor := self.registry.vacate(slot).descriptor) is not None:
            os.close(descriptor)

    def is_deleted(self, slot: int) -> bool:
        """Returns whether the directory from which the run was admitted is gone, or replaced by another; on rank 0.

        Raises `OSError` if not the directory is gone but the file system that it was on.
        """
        run = self.registry.in_slot(slot)
        if not self.is_gone(run.run_id, run.directory):
            return False
        if run.descriptor is not None and os.fstat(run.descriptor).st_dev != self._output_dir.stat().st_dev:
            raise OSError(errno.ENOTCONN, "its file system is not mounted any more", str(self._output_dir))
        return True

    def is_gone(self, run_id: str, inode: int) -> bool:
        """Returns whether a run's directory is gone, or is not the one of that inode any more; on rank 0."""
        try:
            found = control_files.run_directory(self._output_dir, run_id).lstat()  # a link is not a run
        except FileNotFoundError:
            return True
        return found.st_ino != inode

    def evict_run(self, idx: int, reason: str) -> None:
        """Writes `control/evicted.txt`; the run in slot `idx` leaves it at the next discovery. On rank 0.

        A slot that is free is warned of. If the file cannot be written, the run is refused until its configuration changes or the
        trainer restarts.
        """
        self._require_rank_zero("evict_run")
        if (run_id := self.registry.run_ids.get(idx)) is None:
            logger.warning("no run is evicted: slot %s is free (%s)", idx, reason)
            return
        logger.warning("run %s is evicted: %s", run_id, reason)
        self.registry.leave(idx)
        try:
            control_files.evict(self._output_dir, run_id, reason)
        except OSError as error:
            if not self.is_deleted(idx):
                self._admission.refuse(run_id, f"{reason} ({error})")

    def refuse_run(self, slot: int, reason: str) -> None:
        """Refuses a configuration that was accepted: the run loses its slot at the next discovery. On rank 0.

        The reason is written for the orchestrator, and the configuration is checked again when its file changes.
        """
        self._require_rank_zero("refuse_run")
        self.registry.leave(slot)
        self._admission.refuse(self.registry.in_slot(slot).run_id, reason)

    def _require_rank_zero(self, what: str) -> None:
        if _rank() != 0:
            raise RuntimeError(
                f"{what} was called on rank {_rank()}; call it on rank 0, and synchronize_state on every rank"
            )

    # --- every rank ---

    def synchronize_state(self) -> None:
        """Takes over rank 0's slots on every rank, then calls all deletion hooks and then all creation hooks.

        Every rank must call it. The hooks are called run by run, in the order of their registration. With one process nothing is
        communicated.

        Raises:
            HookError: a hook raised.
        """
        self._synchronized += 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._exchange(f"{_STORE_KEY}/{self._synchronized}")
        for departed in self.registry.take_departed():
            self._call("deletion", departed.run_id, departed.slot, departed.run_id)
        for run in self.registry.at():
            if not run.created:
                self._call("creation", run.run_id, run.slot, run.run_id)
                run.created = True

    def _exchange(self, key: str) -> None:
        """Sends rank 0's slots to all ranks by the process group's store, in msgpack. The last reader removes the key."""
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set(key, msgpack.packb([_packed(run) for run in self.registry.at()]))
        else:
            self._take_over(msgpack.unpackb(store.get(key)))
        if store.add(f"{key}/read", 1) == dist.get_world_size():
            store.delete_key(key)
            store.delete_key(f"{key}/read")

    def _take_over(self, state: list[dict[str, Any]]) -> None:
        numbers = {each["slot"]: each["admission"] for each in state}
        for run in self.registry.at():
            if numbers.get(run.slot) != run.number:
                self._vacate(run.slot)
        for each in state:
            if each["slot"] not in self.registry.run_ids:
                config = TrainedRun.model_validate(json.loads(each["config"]))
                progress = RunProgress(**each["progress"])
                start = Path(each["beginning"]) if each["beginning"] is not None else None
                self.registry.adopt(each["slot"], each["run_id"], each["admission"], config, progress, start)

    # --- adapters ---

    def register_module(self, prefix: str, module: MultiLora) -> None:
        """Adds a layer that holds adapters, at module path `prefix`; replaces a former layer of that path."""
        self._modules[prefix] = module

    def forget_modules(self) -> None:
        """Removes all layers: the model is given back and no slot has an adapter, or they are registered anew."""
        self._modules.clear()

    @property
    def modules(self) -> Mapping[str, MultiLora]:
        """The layers that hold adapters, by module path, in the model's order."""
        return self._modules

    def get_named_parameters_for_run(self, idx: int) -> list[tuple[str, nn.Parameter]]:
        """Returns the leaf parameters of the adapter in a slot, which its optimizer owns, as `named_parameters` of torch does.

        Returns:
            Pairs of module path and name (`model.layers.0.self_attn.q_proj.lora_A`), and parameter: float32 A `[rank, in]` and
            B `[out, rank]`, and for experts `[experts, rank, in]` and `[experts, out, rank]`. None for a free slot.
        """
        return [
            (f"{prefix}.{name}", parameter)
            for prefix, module in self._modules.items()
            for name, parameter in module.adapter_parameters(idx).items()
        ]

    def get_state_dict_for_run(self, idx: int) -> dict[str, Tensor]:
        """Returns the adapter in a slot under PEFT's names, which vLLM loads.

        Returns:
            `base_model.model.<module path>.lora_A.weight` `[rank, in]` and `.lora_B.weight` `[out, rank]`, float32, on the
            trainer's device; detached, and in the memory of the parameters. Empty for a free slot.
        """
        return peft_state(self._modules, idx)

    def reset_run_parameters(self, idx: int) -> None:
        """Puts a fresh adapter into a slot, on the target modules of the run's configuration, whatever the slot held before.

        Parameters of the same shape keep their identity: an optimizer that has them goes on.

        Raises:
            ValueError: the run trains full weights.
        """
        lora = self._lora(idx)
        generator = torch.Generator().manual_seed(self._seed if lora.seed is None else lora.seed)
        for prefix, module in self._modules.items():
            module.release(idx + self.registry.max_runs)
            if is_target(prefix, lora):
                module.admit(idx, lora.rank, lora.alpha, generator)
            else:
                module.release(idx)

    def keep_adapter(self, slot: int, directory: Path | None = None) -> int:
        """Keeps a second adapter for the run in a slot, which is not trained; returns the slot that it has in the layers.

        It is a copy of the run's as it is now, or that in `directory`. Raises `ValueError`: there is none, or it does not fit.
        """
        lora, kept = self._lora(slot), slot + self.registry.max_runs
        generator = torch.Generator()
        for module in self._modules.values():
            if parameters := module.adapter_parameters(slot):
                module.release(kept)
                module.admit(kept, lora.rank, lora.alpha, generator)
                for name, parameter in module.adapter_parameters(kept).items():
                    parameter.requires_grad_(False).copy_(parameters[name].detach())
        if directory is not None:
            load_adapter(lambda: peft_state(self._modules, kept), lora, directory)
        return kept

    def release_run_parameters(self, slot: int) -> None:
        """Removes the adapter from a slot, with what `keep_adapter` has kept. A slot without an adapter stays empty."""
        for module in self._modules.values():
            module.release(slot)
            module.release(slot + self.registry.max_runs)

    def _lora(self, slot: int) -> LoraConfig:
        run = self.registry.in_slot(slot)
        lora = run.config.training.lora
        if lora is None:
            raise ValueError(f"run {run.run_id!r} trains full weights: it has no adapter")
        return lora


_manager: MultiRunManager | None = None


def setup_multi_run_manager(output_dir: Path | str, max_runs: int, seed: int = 0) -> MultiRunManager:
    """Makes this process's manager, and the job's directory if there is none yet.

    Raises:
        OSError: the directory cannot be made.
        RuntimeError: the process has one.
        ValueError: `max_runs` is no number of runs.
    """
    global _manager
    if _manager is not None:
        raise RuntimeError("this process has its multi-run manager; get_multi_run_manager() returns it")
    if type(max_runs) is not int or max_runs < 1:
        raise ValueError(f"max_runs = {max_runs!r}: expected how many runs may train at once, 1 or more")
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    _manager = MultiRunManager(Path(output_dir), max_runs, seed)
    return _manager


def get_multi_run_manager() -> MultiRunManager:
    """Returns this process's manager.

    Raises:
        RuntimeError: `setup_multi_run_manager` was not called.
    """
    if _manager is None:
        raise RuntimeError("there is no multi-run manager yet; call setup_multi_run_manager first")
    return _manager


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _packed(run: Run) -> dict[str, Any]:
    return {
        "slot": run.slot,
        "run_id": run.run_id,
        "admission": run.number,
        # Not pydantic's own JSON, which has no infinity.
        "config": json.dumps(run.config.model_dump(mode="json", include=set(TrainedRun.model_fields))),
        "progress": asdict(run.progress),
        "beginning": None if run.beginning is None else str(run.beginning),
    }
