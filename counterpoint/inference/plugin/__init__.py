"""The part that runs inside vLLM, through its entry points only.

They are `vllm.general_plugins`, `vllm.endpoint_plugins` and, for a CPU, `vllm.platform_plugins`. `VLLM_PLUGINS` must name
them, as in `inference.server`. vllm is imported when vLLM calls this package, never before.
"""

from __future__ import annotations

import logging
from typing import Any

BACKEND = "counterpoint"
"""Name of the plugin in `VLLM_PLUGINS` and of its weight-transfer backend."""


def register() -> None:
    """Registers what is ours, binds the process to its parent, lets our modules log and the garbage collector run again.

    vLLM calls it once in each process that is not forked, as a general plugin, when most modules are imported.
    """
    import multiprocessing

    from counterpoint.transport.process.parent_death import bind_worker_to_parent
    from counterpoint.transport.telemetry.start_phases import ENGINE, enter

    if multiprocessing.parent_process() is not None:  # a forked engine enters it at once
        enter("loads the model, takes memory", ENGINE)
    bind_worker_to_parent()
    _log_as_vllm_does()

    from counterpoint.inference.plugin.images import stand_in_for_torchvision

    stand_in_for_torchvision()

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "counterpoint.inference.plugin.weights", "DirectoryWeightTransferEngine"
    )

    from vllm import envs

    if BACKEND in (envs.VLLM_PLUGINS or ()):  # else the server is not ours, as below
        from vllm.platforms import current_platform

        from counterpoint.inference.plugin.engine.ends import end_as_the_model_does
        from counterpoint.inference.plugin.engine.groups import share_a_thread
        from counterpoint.inference.plugin.tokenizer import read_by_file

        read_by_file()
        end_as_the_model_does()
        share_a_thread()
        if current_platform.is_cpu():
            from counterpoint.inference.plugin.cpu.norms import compute_norms_by_kernel
            from counterpoint.inference.plugin.cpu.small_matrices import leave_small_matrices

            compute_norms_by_kernel()
            leave_small_matrices()

    from counterpoint.inference.plugin.program import resume_gc

    resume_gc()


def _log_as_vllm_does() -> None:
    """Gives our modules the handlers and the level of vLLM's, which vLLM sets later. The root logger would drop warnings."""
    logging.getLogger("counterpoint").parent = logging.getLogger("vllm")


def endpoint_plugin() -> Any:
    """Returns the plugin that adds our routes; vLLM calls it once in the API server."""
    from counterpoint.inference.plugin.routes import CounterpointRoutes

    return CounterpointRoutes()


def platform_plugin() -> str | None:
    """Returns the name of our platform where vLLM would choose that of a CPU, else None; vLLM calls it once in each process.

    Where `VLLM_PLUGINS` is not set, vLLM calls every plugin that is installed: a vLLM that is not ours keeps its own platform.
    """
    from vllm import envs
    from vllm.platforms import cpu_platform_plugin

    if BACKEND not in (envs.VLLM_PLUGINS or ()):
        return None
    return None if cpu_platform_plugin() is None else "counterpoint.inference.plugin.cpu.platform.GroupedCpuPlatform"
