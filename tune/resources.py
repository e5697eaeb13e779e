"""What a trial needs of a machine or a job, and arithmetic with it. The names are those of Ray Tune 1.x."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from transport.config import Config


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

    def __init__(self, cpu: float = 1.0, gpu: float = 0.0, memory: float = 0, **others: Any) -> None:
        super().__init__(**{"cpu": cpu, "gpu": gpu, "memory": memory, **others})

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
