"""The factors of the adapters in a trainer's slots: alpha over rank, by which the product of an adapter is multiplied.

They are kept in the configurations with which the runs were admitted, so that layers, exports and digests agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trainer.runs.registry import RunRegistry


class ScalingFactors(Mapping[int, float]):
    """By slot, of the runs that train adapters. A discovered hook may set the factor of its run."""

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
        occupancy = self._registry.in_slot(idx)
        if occupancy.created or occupancy.admitted_with is None:
            raise RuntimeError(
                f"scaling_factors[{idx}] of run {occupancy.run_id!r} was set after its adapter was made, or on another rank than "
                "0; set it in a discovered hook"
            )
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"scaling_factors[{idx}] = {factor}: expected a positive number")
        training = occupancy.config.training
        assert training.lora is not None
        lora = training.lora.model_copy(update={"alpha": factor * training.lora.rank})
        occupancy.config = occupancy.config.model_copy(update={"training": training.model_copy(update={"lora": lora})})
