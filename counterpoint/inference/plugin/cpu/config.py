"""vLLM's configuration, with routed experts allowed for its first model runner (`routed_experts`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig


class FirstRunnerConfig(VllmConfig):
    """Is vLLM's own configuration in everything else."""

    def _verify_aux_output_compatibility(self) -> None:
        seen: Any = SimpleNamespace(**vars(self) | {"use_v2_model_runner": True})
        VllmConfig._verify_aux_output_compatibility(seen)
