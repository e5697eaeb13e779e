"""A scheduler whose engine sends the tokens of a request together, where nobody waits for each of them.

vLLM's engine sends an object for each request and step, which its API server decodes, counts and adds to what the request has.
That is most of what a short step costs the API server. A request for the final output alone needs none of it before its end. So
its outputs are held back, and sent as one: with the last one, or after `INTERVAL_SECONDS`, so that the counters of `/metrics` go
on, by which clients see progress. The first one, with which vLLM counts the prompt and the first token's time, is sent at once.

A request with stop strings is not held back: the API server finds them, and ends it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

INTERVAL_SECONDS = 0.25
"""Seconds after which everything is sent that is held."""


class _HoldsOutputs(Scheduler):
    """What the two schedulers have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, HeldOutputs] = {}
        """Those of unfinished requests; those of aborted ones until everything is sent."""
        self._send_at = 0.0
        self._is_quiet = False
        """During a step after which not everything is sent."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Returns what is to be sent now, by client."""
        now = time.monotonic()
        self._is_quiet = now < self._send_at
        try:
            found = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            is_quiet, self._is_quiet = self._is_quiet, False
        for sent in found.values():
            sent.outputs = [ready for each in sent.outputs if (ready := self._passed(each)) is not None]
        if not is_quiet:
            self._send_at = now + INTERVAL_SECONDS
            self._send_all(found)
            return found
        found = {
            client: sent
            for client, sent in found.items()
            if sent.outputs or sent.finished_requests or sent.scheduler_stats
        }
        if (first := next(iter(found.values()), None)) is not None and first.scheduler_stats is None:
            first.scheduler_stats = self.make_stats()
        return found

    def make_stats(self, *of_this_step: Any, **named: Any) -> SchedulerStats | None:
        """Returns nothing where nothing may be sent: what vLLM has counted stays until it is asked for again.

        Not once all requests have ended: there may be no further step for long, and its numbers would stay those of before.
        """
        counted = (*of_this_step, *named.values())
        if self._is_quiet and self.has_unfinished_requests() and all(each is None for each in counted):
            return None
        return super().make_stats(*of_this_step, **named)

    def _passed(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Returns an output joined to those that were held of its request; None if it is held, too."""
        request = self.requests.get(output.request_id)
        if output.finish_reason is None and request is not None and may_wait(request, output):
            if (held := self._held.get(output.request_id)) is None:
                held = self._held[output.request_id] = HeldOutputs(asked_columns(request))
            held.outputs.append(output)
            return None
        if (held := self._held.pop(output.request_id, None)) is None:
            return output
        held.outputs.append(output)
        return held.joined()

    def _send_all(self, found: dict[int, EngineCoreOutputs]) -> None:
        for request_id, held in self._held.items():
            if (request := self.requests.get(request_id)) is not None:  # else it was aborted
                found.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(held.joined())
        self._held.clear()


class HoldingScheduler(_HoldsOutputs):
    """vLLM's scheduler for an engine that waits for each step, with outputs held back."""


class HoldingAsyncScheduler(_HoldsOutputs, AsyncScheduler):
    """The same for an engine that schedules a step while another one is computed."""


def scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """Returns the one that takes the place of vLLM's own: the value of `--scheduler-cls`, which is only called."""
    chosen = HoldingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else HoldingScheduler
    return chosen(vllm_config, *args, **kwargs)


def may_wait(request: Request, output: EngineCoreOutput) -> bool:
    """Whether an output of an unfinished request says nothing that is needed before the end, but tokens."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.stop
        and not request.resumable
        and output.prefill_stats is None
        and output.events is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.new_sampling_mask is None
        and output.pooling_output is None
    )


def asked_columns(request: Request) -> int | None:
    """Returns how many log-probabilities of a position a request asked for, with the sampled token's; None: as many as come."""
    sampling = request.sampling_params
    if sampling is None or sampling.logprobs is None or sampling.logprobs < 0 or sampling.logprob_token_ids:
        return None
    return sampling.logprobs + 1


@dataclass(slots=True)
class HeldOutputs:
    """What is held back of a request."""

    columns: int | None
    """How many log-probabilities of a position it asked for, as `asked_columns` says."""
    outputs: list[EngineCoreOutput] = field(default_factory=list)

    def joined(self) -> EngineCoreOutput:
        """Returns one output with the tokens of all, in their order."""
        outputs = self.outputs
        if len(outputs) == 1:
            return outputs[0]
        logprobs = [each.new_logprobs for each in outputs if each.new_logprobs is not None]
        return msgspec.structs.replace(
            outputs[-1],
            new_token_ids=[token for each in outputs for token in each.new_token_ids],
            new_logprobs=_joined_logprobs(logprobs, self.columns),
            routed_experts=_joined_arrays([each.routed_experts for each in outputs if each.routed_experts is not None]),
            num_nans_in_logits=max(each.num_nans_in_logits for each in outputs),
        )


def _joined_logprobs(parts: list[LogprobsLists], asked: int | None) -> LogprobsLists | None:
    """A step has as many columns as any of its requests asked for, as a probe does; those beyond `asked` are left out.

    A step may also have fewer than were asked for, by a sampler of vLLM's first model runner that is not ours (`sampler`). What
    is missing of that step becomes minus infinity, and only of that step.
    """
    if not parts:
        return None
    columns = max(each.logprobs.shape[1] for each in parts)
    columns = columns if asked is None else min(columns, asked)
    return LogprobsLists(
        np.concatenate([_of_width(each.logprob_token_ids, columns, 0) for each in parts]),
        np.concatenate([_of_width(each.logprobs, columns, -np.inf) for each in parts]),
        np.concatenate([each.sampled_token_ranks for each in parts]),
    )


def _of_width(rows: np.ndarray, columns: int, value: float) -> np.ndarray:
    lack = columns - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, lack)), constant_values=value) if lack > 0 else rows[:, :columns]


def _joined_arrays(parts: list[np.ndarray]) -> np.ndarray | None:
    return np.concatenate(parts) if parts else None
