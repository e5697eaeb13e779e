"""The part that runs inside vLLM, through its entry points only: `vllm.general_plugins` and `vllm.endpoint_plugins`.

Both must be named in `VLLM_PLUGINS`, as `inference.server` does. vllm is imported when vLLM calls this package, never
before.
"""

from __future__ import annotations

from typing import Any

BACKEND = "counterpoint"
"""Name of the plugin in `VLLM_PLUGINS` and of its weight-transfer backend."""


def register() -> None:
    """Registers the weight-transfer backend, binds the process to its parent, and lets the garbage collector run again.

    vLLM calls it once in each process that is not forked, as a general plugin, when most modules are imported.
    """
    from cluster.parent_death import bind_worker_to_parent

    bind_worker_to_parent()

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "inference.plugin.weights", "DirectoryWeightTransferEngine")

    from inference.plugin.program import resume_gc

    resume_gc()


def endpoint_plugin() -> Any:
    """Returns the plugin that adds our routes; vLLM calls it once in the API server."""
    from inference.plugin.routes import CounterpointRoutes

    return CounterpointRoutes()
