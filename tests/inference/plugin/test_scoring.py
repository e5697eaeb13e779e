"""Log-probabilities of given tokens: the requests that ask for them, and what is read of their outputs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    from counterpoint.inference.plugin.scoring import alternatives_of, scores_of, scoring_prompts

pytestmark = pytest.mark.slow  # imports vLLM

TOKENS = [5, 3, 8, 3, 9]


def value(prefix: list[int], token: int) -> float:
    """What the model says of a token after others."""
    return -float(len(prefix)) - token / 100


def answer(prompt: list[int], sampling: Any) -> Any:
    """The final output of an engine."""

    def row(prefix: list[int], token: int) -> dict[int, Any]:
        return {each: SimpleNamespace(logprob=value(prefix, each)) for each in (token, 77)}

    asked = [None, *(row(prompt[:at], prompt[at]) for at in range(1, len(prompt)))]
    next_row = row(prompt, sampling.logprob_token_ids[0])
    return SimpleNamespace(
        outputs=[SimpleNamespace(logprobs=[next_row])],
        prompt_logprobs=None if sampling.prompt_logprobs is None else asked,
    )


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("start", [1, 2, 4])
def test_each_token_has_its_own_log_probability(start: int, one_by_one: bool) -> None:
    prompts = scoring_prompts(TOKENS, start, one_by_one=one_by_one)
    assert len(prompts) == (len(TOKENS) - start if one_by_one else 1)
    found = scores_of([answer(*each) for each in prompts], TOKENS, start)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([value(TOKENS[:at], TOKENS[at]) for at in range(start, len(TOKENS))])


def flat(*places: list[tuple[int, float]]) -> Any:
    """vLLM's flat log-probabilities: of each place the sampled token first."""
    ends = np.cumsum([len(each) for each in places]).tolist()
    tokens, values = zip(*[each for place in places for each in place], strict=True)
    return SimpleNamespace(start_indices=[0, *ends[:-1]], end_indices=ends, token_ids=tokens, logprobs=values)


def test_the_most_probable_tokens_of_a_place_come_after_its_sampled_one() -> None:
    """A place may have more columns than were asked for, where another request of its step asked for more."""
    sampled_third = [(4, -3.0), (7, -0.5), (2, -1.0)]
    sampled_first = [(8, -0.25), (8, -0.25), (1, -2.0), (5, -4.0)]
    cut_to_one = [(6, 0.0), (6, 0.0), (0, -np.inf)]
    found = alternatives_of(flat(sampled_third, sampled_first, cut_to_one), 2)
    assert found.token_ids_TK.tolist() == [[7, 2], [8, 1], [6, 0]]
    assert found.log_probabilities_TK.tolist() == [[-0.5, -1.0], [-0.25, -2.0], [0.0, -np.inf]]


@pytest.mark.parametrize("place", [[(4, -3.0), (7, -0.5)], [(4, -3.0), (0, -np.inf), (0, -np.inf)]])
def test_probable_tokens_that_were_left_out_are_none(place: list[tuple[int, float]]) -> None:
    whole = [(4, -3.0), (7, -0.5), (2, -1.0)]
    with pytest.raises(LookupError, match="place 1"):
        alternatives_of(flat(whole, place, whole), 2)
