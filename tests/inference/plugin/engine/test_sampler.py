"""Each request of a step gets the log-probabilities that it asked for, whatever the others ask for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    from counterpoint.inference.plugin.engine.sampler import WholeSampler, use_whole_sampler

pytestmark = pytest.mark.slow  # imports vLLM

ROWS, VOCABULARY = 4, 11
LOGITS = torch.tensor(np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)), dtype=torch.float32)


class Runner:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.input_batch = SimpleNamespace(
            has_allowed_token_ids={"b"}, req_id_to_index={"a": 0, "b": 1, "c": 2, "d": 3}
        )


def sampler() -> Any:
    runner = Runner(Sampler("processed_logprobs"))
    use_whole_sampler(runner)
    assert type(runner.sampler) is WholeSampler
    return runner.sampler


def metadata(alternatives: int | None, given: dict[int, list[int]] | None) -> SamplingMetadata:
    """Of greedy requests."""
    one = torch.ones(ROWS)
    return SamplingMetadata(
        None, True, False, None, None, {}, alternatives, True, None, one, one, one, [], None, {}, LogitsProcessors(), given
    )  # fmt: skip


@pytest.mark.parametrize("given", [{2: [4]}, {0: [1, 9, 3], 3: [7]}, {0: [10], 1: [0], 2: [5], 3: [6]}, {}, None])
@pytest.mark.parametrize("alternatives", [0, 1, 2, 5, VOCABULARY])
def test_every_row_has_what_it_asked_for(given: dict[int, list[int]] | None, alternatives: int) -> None:
    found = sampler()(LOGITS.clone(), metadata(alternatives, given)).logprobs_tensors
    expected = LOGITS.log_softmax(-1)
    for row in range(ROWS):
        asked = given[row] if given and row in given else expected[row].topk(alternatives).indices.tolist()
        ids = [int(LOGITS[row].argmax()), *asked]
        assert found.logprob_token_ids[row, : len(ids)].tolist() == ids
        assert found.logprobs[row, : len(ids)].tolist() == expected[row, ids].tolist()
        assert (found.logprobs[row, len(ids) :] == -torch.inf).all() or not given or row not in given
        assert found.selected_token_ranks[row] == 1
    assert found.logprob_token_ids.dtype == torch.int32


@pytest.mark.parametrize("alternatives", [None, -1])
def test_a_step_in_which_nobody_asks_for_probable_tokens_is_vllms_own(alternatives: int | None) -> None:
    asked = metadata(alternatives, {2: [4, 5]})
    mine = sampler()(LOGITS.clone(), asked).logprobs_tensors
    theirs = Sampler("processed_logprobs")(LOGITS.clone(), asked).logprobs_tensors
    assert all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in ("logprob_token_ids", "logprobs"))


def test_only_a_request_that_allows_given_tokens_alone_is_limited_to_them() -> None:
    """vLLM leaves its mask in rows that it had before: another request was sampled from a few tokens."""
    forbidden = torch.ones(ROWS, VOCABULARY, dtype=torch.bool)
    forbidden[:, 3] = False
    asked = replace(metadata(VOCABULARY, None), allowed_token_ids_mask=forbidden)
    found = sampler()(LOGITS.clone(), asked)
    expected = LOGITS.argmax(-1)
    expected[1] = 3
    assert found.sampled_token_ids[:, 0].tolist() == expected.tolist()
    assert torch.isfinite(found.logprobs_tensors.logprobs).all(-1).tolist() == [True, False, True, True]


def test_a_sampler_that_is_not_vllms_own_stays() -> None:
    class Another(Sampler):
        pass

    for each in (Another("raw_logprobs"), object(), None):
        runner = Runner(each)
        use_whole_sampler(runner)
        assert runner.sampler is each
        assert type(runner.sampler) is not WholeSampler
    use_whole_sampler(object())
