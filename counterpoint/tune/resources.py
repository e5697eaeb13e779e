"""What a trial needs of a machine or a job, and arithmetic with it. The names are those of Ray Tune 1.x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from counterpoint.transport.config import Config
from counterpoint.tune.errors import TuneError


class Resources(Config):
    """What one trial takes while it runs.

    `extra_*` are for what the trial starts itself: they are taken together with the rest, all or nothing, so that no trial ever
    holds half of what it needs.
    """

    cpu: float = Field(default=1.0, ge=0)
    gpu: float = Field(default=0.0, ge=0)
    memory: int = Field(default=0, ge=0)
    """Bytes; 0 reserves none."""
    object_store_memory: int = Field(default=0, ge=0)
    """Bytes of Ray's object store; means nothing to the other executors, which still count it."""
    extra_cpu: float = Field(default=0.0, ge=0)
    extra_gpu: float = Field(default=0.0, ge=0)
    extra_memory: int = Field(default=0, ge=0)
    extra_object_store_memory: int = Field(default=0, ge=0)
    custom_resources: dict[str, float] = Field(default_factory=dict)
    extra_custom_resources: dict[str, float] = Field(default_factory=dict)

    def __init__(
        self,
        cpu: float = 1.0,
        gpu: float = 0.0,
        memory: float = 0,
        object_store_memory: float = 0,
        extra_cpu: float = 0.0,
        extra_gpu: float = 0.0,
        extra_memory: float = 0,
        extra_object_store_memory: float = 0,
        custom_resources: Mapping[str, float] | None = None,
        extra_custom_resources: Mapping[str, float] | None = None,
        **unknown: Any,
    ) -> None:
        """Takes the amounts in Ray Tune's order. Raises `ValueError` for one that is none, and for a name that there is not."""
        custom_resources, extra_custom_resources = custom_resources or {}, extra_custom_resources or {}
        given = locals()
        amounts: dict[str, Any] = {name: given[name] for name in type(self).model_fields}
        super().__init__(**amounts, **unknown)

    def cpu_total(self) -> float:
        """CPUs, with those of what the trial starts."""
        return self.cpu + self.extra_cpu

    def gpu_total(self) -> float:
        """GPUs, with those of what the trial starts."""
        return self.gpu + self.extra_gpu

    def summary_string(self) -> str:
        """Returns all in one line, as Ray Tune: `2.0 CPUs, 1.0 GPUs, 0.5 GiB heap (3.0 licences)`."""
        totals = self.totals()
        line = f"{self.cpu_total()} CPUs, {self.gpu_total()} GPUs"
        for name, shown in (("memory", "heap"), ("object_store_memory", "objects")):
            if name in totals:
                line += f", {round(totals[name] / 2**30, 2)} GiB {shown}"
        known = ("cpu", "gpu", "memory", "object_store_memory")
        custom = ", ".join(f"{amount} {name}" for name, amount in totals.items() if name not in known)
        return f"{line} ({custom})" if custom else line

    def totals(self) -> dict[str, float]:
        """The sum by name (`cpu`, `gpu`, `memory`, `object_store_memory` and the custom names); zeros are left out."""
        sums = {
            "cpu": self.cpu + self.extra_cpu,
            "gpu": self.gpu + self.extra_gpu,
            "memory": float(self.memory + self.extra_memory),
            "object_store_memory": float(self.object_store_memory + self.extra_object_store_memory),
        }
        for custom in (self.custom_resources, self.extra_custom_resources):
            for name, amount in custom.items():
                sums[name] = sums.get(name, 0.0) + amount
        return {name: amount for name, amount in sums.items() if amount}


def resources_of(given: object, where: str) -> Resources:
    """The resources that were given: themselves, as a dict, or None for the default. Raises `TuneError` for anything else."""
    if isinstance(given, Resources):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise TuneError(f"{where} = {given!r}: expected tune.Resources or a dict of amounts")
    try:
        return Resources(**(given or {}))
    except ValueError as error:
        if unknown := [name for name in given or {} if name not in Resources.model_fields]:
            names = ", ".join(Resources.model_fields)
            raise TuneError(f"{where}: there is no {unknown[0]!r}; expected some of {names}") from None
        raise TuneError(f"{where} = {given!r}: {error}") from None
