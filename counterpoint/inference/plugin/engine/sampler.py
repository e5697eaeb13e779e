"""A sampler that answers each request of a step with what it asked for, whatever the others of the step ask for.

The sampler of vLLM's first model runner (its only one on a CPU) answers a step with one table of log-probabilities. Where any
request of it asks for given tokens, as a score and a probe do, the most probable tokens of all others are left out. Here they
have them in their own rows. vLLM's second model runner does the same by itself. Suffixes: `B` requests, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler


class WholeSampler(Sampler):
    """Is vLLM's own sampler in everything else."""

    _alternatives = 0
    """The most that any request of the step asks for; 0 also where vLLM returns the whole distribution (-1)."""

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *further: Any, **named: Any) -> Any:
        """Samples a token of each row."""
        self._alternatives = max(0, sampling_metadata.max_num_logprobs or 0)
        return super().forward(logits, sampling_metadata, *further, **named)

    def gather_specific_token_logprobs(
        self, logprobs: Tensor, logprob_token_ids: dict[int, list[int]], sampled: Tensor
    ) -> LogprobsTensors | None:
        """Returns the sampled token of each row of `logprobs_BV`, then those given for it, else the most probable ones."""
        given = super().gather_specific_token_logprobs(logprobs, logprob_token_ids, sampled)
        if given is None or not self._alternatives:
            return given
        probable = self.gather_logprobs(logprobs, self._alternatives, sampled)
        is_given_B = torch.zeros(len(logprobs), dtype=torch.bool)
        is_given_B[list(logprob_token_ids)] = True
        is_given_B = is_given_B.to(logprobs.device)
        columns = max(given.logprobs.shape[1], probable.logprobs.shape[1])

        def of_each(name: str, fill: float) -> Tensor:
            ours, others = (
                torch.nn.functional.pad(getattr(each, name), (0, columns - each.logprobs.shape[1]), value=fill)
                for each in (given, probable)
            )
            return torch.where(is_given_B[:, None], ours, others)

        return LogprobsTensors(
            of_each("logprob_token_ids", 0), of_each("logprobs", -torch.inf), given.selected_token_ranks
        )


def use_whole_sampler(model_runner: Any) -> None:
    """Gives the first model runner the sampler above; others, and any that is not vLLM's own, stay as they are."""
    if type(getattr(model_runner, "sampler", None)) is Sampler:
        model_runner.sampler.__class__ = WholeSampler  # in place: what checks speculated tokens holds the same one
