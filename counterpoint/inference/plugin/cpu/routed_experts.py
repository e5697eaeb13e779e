"""Routed experts in the answers of vLLM's first model runner, its only one on a CPU without a Triton for it.

vLLM 0.32 captures them for its second model runner alone, and refuses the setting without it (`config`). What captures and keeps
them knows no runner: it is told of each step, and of its batch once it is computed. `CapturingRunner` tells it so.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class CapturingRunner(CPUModelRunner):
    """Is vLLM's own runner in everything else."""

    captured: AuxOutputWorkerConnector

    def execute_model(self, scheduler_output: Any, *further: Any, **named: Any) -> Any:
        """Computes a step."""
        self.captured.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, *further, **named)

    def sample_tokens(self, *given: Any, **named: Any) -> Any:
        """Samples a step's tokens."""
        step = self.execute_model_state
        output = super().sample_tokens(*given, **named)
        if step is not None:
            drafted = step.scheduler_output.scheduled_spec_decode_tokens
            output.aux_output_connector_output = self._routed(output, drafted)
        return output

    def _routed(self, output: Any, drafted: dict[str, list[int]]) -> dict[str, Any] | None:
        requests = self.input_batch.req_ids
        batch = SimpleNamespace(
            req_ids=requests,
            query_start_loc_np=self.query_start_loc.np,
            num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(requests)],
        )
        if (pending := self.captured.prepare_output(batch)) is None:
            return None
        sampled = [len(token_ids) for token_ids in output.sampled_token_ids]
        rejected = [
            len(drafted[request]) + 1 - count if request in drafted else 0
            for request, count in zip(requests, sampled, strict=True)
        ]
        pending.enqueue_cpu_copy(np.array(sampled), np.array(rejected))
        return pending.process_output()


def capture_routed_experts(model_runner: Any, config: VllmConfig) -> None:
    """Lets the first model runner of a CPU capture; others, and any that is not vLLM's own, stay as they are."""
    if type(model_runner) is CPUModelRunner:
        model_runner.__class__ = CapturingRunner
        model_runner.captured = get_aux_output_connector(model_runner.model, config, model_runner.kv_cache_config)
