"""vLLM's platform of a CPU, with adapters computed by `GroupedPunicaWrapper`.

vLLM imports this module while it decides on its platform, so nothing here may import what asks for the platform.
"""

from __future__ import annotations

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
