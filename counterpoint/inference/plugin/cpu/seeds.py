"""Requests with a seed in vLLM's first model runner on a CPU, also where a prompt is prefilled in parts.

A step that prefills a part of a prompt samples a token that is discarded. vLLM then turns the request's generator back by its
offset, which a CPU's generator has not: that ended the engine. Here nothing is drawn from the generator in such a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def spare_generators(model_runner: Any) -> None:
    """Lets the first model runner of a CPU do so; others stay as they are."""
    if not isinstance(model_runner, CPUModelRunner):
        return
    sample, bookkeep, spared = model_runner._sample, model_runner._bookkeeping_sync, dict[int, Any]()

    def sampled(*given: Any, **named: Any) -> Any:
        batch = model_runner.input_batch
        for place in np.flatnonzero(model_runner.discard_request_mask.np[: batch.num_reqs]).tolist():
            if (generator := batch.generators.pop(place, None)) is not None:
                spared[place] = generator
        return sample(*given, **named)

    def kept(*given: Any, **named: Any) -> Any:
        try:
            return bookkeep(*given, **named)
        finally:
            model_runner.input_batch.generators.update(spared)
            spared.clear()

    model_runner._sample, model_runner._bookkeeping_sync = sampled, kept
