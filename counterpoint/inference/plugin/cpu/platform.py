"""vLLM's platform of a CPU, with adapters computed by `GroupedPunicaWrapper`, and routed experts.

vLLM imports this module while it decides on its platform, so nothing here may import what asks for the platform.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

_OWN = cpu_platform_plugin()
"""The platform that vLLM itself would choose: there is another one for some processors."""
assert _OWN is not None, "counterpoint.inference.plugin.platform_plugin is for a CPU only"


class GroupedCpuPlatform(resolve_obj_by_qualname(_OWN)):  # type: ignore[misc]  # chosen when it is imported
    """Is vLLM's own platform in everything else."""

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """Returns the name of the class that computes adapters."""
        return "counterpoint.inference.plugin.cpu.adapters.GroupedPunicaWrapper"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Completes vLLM's configuration."""
        super().check_and_update_config(vllm_config)
        if vllm_config.aux_output_config.enabled:
            from counterpoint.inference.plugin.cpu.config import FirstRunnerConfig

            vllm_config.__class__ = FirstRunnerConfig
