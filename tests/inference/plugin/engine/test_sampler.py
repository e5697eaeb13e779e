"""Each request of a step gets the log-probabilities that it asked for, whatever the others ask for."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    from counterpoint.inference.plugin.engine.sampler import WholeSampler, use_whole_sampler

pytestmark = pytest.mark.slow  # imports vLLM

ROWS, VOCABULARY = 4, 11
LOGITS = torch.tensor(np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)), dtype=torch.float32)


class Runner:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler


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


@pytest.mark.parametrize("seed", range(8))
def test_only_a_request_that_allows_given_tokens_alone_is_limited_to_them(seed: int) -> None:
    """By vLLM itself, from 0.32 on: before, its mask stayed in rows that another request was then sampled from."""
    generator, device = random.Random(seed), torch.device("cpu")
    batch = InputBatch(6, 32, 64, device, VOCABULARY, block_sizes=[16], max_num_blocks_per_req=[4])
    for step in range(60):
        for request in [each for each in batch.req_ids if generator.random() < 0.3]:
            batch.remove_request(request)
        for number in range(generator.randrange(3) if batch.num_reqs < 4 else 0):
            allowed = generator.sample(range(VOCABULARY), 3) if generator.random() < 0.4 else None
            sampling = SamplingParams(allowed_token_ids=allowed)
            batch.add_request(CachedRequestState(f"{step}-{number}", [1, 2], [], sampling, None, ([0],), 0, []))
        batch.condense()
        if batch.num_reqs > 1:
            batch.swap_states(*generator.sample(range(batch.num_reqs), 2))
        batch.refresh_metadata()
        if (forbidden := batch.sampling_metadata.allowed_token_ids_mask) is not None:
            limited = {each for each, row in batch.req_id_to_index.items() if forbidden[row].any()}
            assert limited == batch.has_allowed_token_ids


def test_a_sampler_that_is_not_vllms_own_stays() -> None:
    class Another(Sampler):
        pass

    for each in (Another("raw_logprobs"), object(), None):
        runner = Runner(each)
        use_whole_sampler(runner)
        assert runner.sampler is each
        assert type(runner.sampler) is not WholeSampler
    use_whole_sampler(object())
