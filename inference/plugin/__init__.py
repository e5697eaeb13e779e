"""What runs inside vLLM, reached through its own entry points only: `vllm.general_plugins` and `vllm.endpoint_plugins`.

Both must be named in `VLLM_PLUGINS`, as `inference.server` does. vllm is imported when vLLM calls us, never before.
"""

from __future__ import annotations

from typing import Any

BACKEND = "counterpoint"
"""Name of the plugin in `VLLM_PLUGINS` and of its weight-transfer backend."""


def register() -> None:
    """General plugin, run once in each vLLM process: ties the process to its parent and offers the weight-transfer backend."""
    from cluster.parent_death import bind_worker_to_parent

    bind_worker_to_parent()

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "inference.plugin.weights", "DirectoryWeightTransferEngine")


def endpoint_plugin() -> Any:
    """Endpoint plugin, made once in the API server: adds our routes."""
    from inference.plugin.routes import CounterpointRoutes

    return CounterpointRoutes()
