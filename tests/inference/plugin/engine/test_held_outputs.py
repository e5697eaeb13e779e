"""What the engine sends together is what it would have sent step by step; vLLM's own output processor makes the same of both."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    from vllm.logprobs import FlatLogprobs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
    from vllm.v1.outputs import LogprobsLists

    from counterpoint.inference.plugin.engine import held_outputs
    from counterpoint.inference.plugin.engine.held_outputs import HoldingAsyncScheduler, HoldingScheduler, scheduler
    from counterpoint.inference.plugin.scoring import alternatives_of

pytestmark = pytest.mark.slow  # imports vLLM

FINAL = SamplingParams(
    output_kind=RequestOutputKind.FINAL_ONLY, logprobs=1, flat_logprobs=True, detokenize=False, max_tokens=100
)


class Steps(HoldingScheduler):
    """The scheduler without vLLM's: `step` gives it what vLLM's would return."""

    def __init__(self, **sampling: SamplingParams) -> None:
        self.requests: dict[str, Any] = {
            name: SimpleNamespace(sampling_params=each, resumable=False, client_index=0)
            for name, each in sampling.items()
        }
        self._held, self._send_at, self._is_quiet = {}, 0.0, False
        self.log_stats = True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self, *outputs: EngineCoreOutput) -> dict[int, EngineCoreOutputs]:
        for each in outputs:
            if each.finished:
                del self.requests[each.request_id]
        self.of_step = {0: EngineCoreOutputs(outputs=list(outputs))} if outputs else {}
        return self.update_from_output(Any, Any)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for vLLM's scheduler, and for the clock."""
    clock = SimpleNamespace(now=1000.0)

    def update_from_output(self: Steps, *_: Any) -> dict[int, EngineCoreOutputs]:
        found = self.of_step
        if (stats := self.make_stats(None, None)) is not None:
            found.setdefault(0, EngineCoreOutputs()).scheduler_stats = stats
        return found

    monkeypatch.setattr(Scheduler, "update_from_output", update_from_output)
    monkeypatch.setattr(Scheduler, "make_stats", lambda self, *_: SchedulerStats())
    monkeypatch.setattr(held_outputs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def output(
    name: str, *token_ids: int, first: bool = False, last: bool = False, columns: int = 2, **more: Any
) -> EngineCoreOutput:
    """`columns`: log-probabilities of a position, the sampled token's first; others of a step may have asked for more."""
    values = np.array([[-token / 7, *range(columns - 1)] for token in token_ids], np.float32)
    ids = np.array([[token, *range(3, 2 + columns)] for token in token_ids], np.int32)
    return EngineCoreOutput(
        name,
        list(token_ids),
        new_logprobs=LogprobsLists(ids, values, np.array(token_ids, np.int32)),
        routed_experts=np.array([[[token % 5]] for token in token_ids], np.uint8),
        prefill_stats=PrefillStats() if first else None,
        finish_reason=FinishReason.LENGTH if last else None,
        **more,
    )


def sent_tokens(found: dict[int, EngineCoreOutputs]) -> dict[str, list[int]]:
    return {each.request_id: each.new_token_ids for sent in found.values() for each in sent.outputs}


def test_tokens_are_sent_with_the_last_and_after_a_while(vllm: SimpleNamespace) -> None:
    steps = Steps(a=FINAL, b=FINAL)
    assert sent_tokens(steps.step(output("a", 10, first=True), output("b", 20, first=True))) == {"a": [10], "b": [20]}
    assert steps.step(output("a", 11), output("b", 21)) == {}, "neither tokens nor numbers for the metrics"
    found = steps.step(output("a", 12, last=True), output("b", 22))
    assert sent_tokens(found) == {"a": [11, 12]}
    assert found[0].scheduler_stats is not None
    vllm.now += held_outputs.INTERVAL_SECONDS
    found = steps.step(output("b", 23))
    assert sent_tokens(found) == {"b": [21, 22, 23]}
    assert found[0].scheduler_stats is not None
    assert sent_tokens(steps.step(output("b", 24, last=True))) == {"b": [24]}


def test_what_was_held_is_sent_though_its_request_has_no_part_in_the_step(vllm: SimpleNamespace) -> None:
    """It was preempted. Of one that was aborted nothing is sent, and nothing stays."""
    steps = Steps(a=FINAL, b=FINAL)
    steps.step(output("a", 10, first=True), output("b", 20, first=True))
    steps.step(output("a", 11), output("b", 21))
    del steps.requests["b"]
    vllm.now += held_outputs.INTERVAL_SECONDS
    assert sent_tokens(steps.step()) == {"a": [11]}
    assert not steps._held


def test_numbers_are_sent_once_all_requests_have_ended() -> None:
    """Those of the last step, which has no outputs where the last requests were aborted, are what is seen from then on."""
    steps = Steps(a=FINAL)
    steps.step(output("a", 10, first=True))
    assert steps.step(output("a", 11)) == {}
    steps.requests.clear()
    assert steps.step()[0].scheduler_stats is not None


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(output_kind=RequestOutputKind.DELTA),
        SamplingParams(output_kind=RequestOutputKind.CUMULATIVE),
        SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stop=["end"]),
    ],
)
def test_a_request_that_needs_each_token_gets_it(sampling: SamplingParams) -> None:
    """A stop string is found by the API server, which then ends the request."""
    steps = Steps(a=sampling)
    for number, first in ((10, True), (11, False), (12, False)):
        assert sent_tokens(steps.step(output("a", number, first=first))) == {"a": [number]}


def test_a_step_that_says_more_than_tokens_is_sent() -> None:
    steps = Steps(a=FINAL)
    steps.step(output("a", 10, first=True))
    steps.step(output("a", 11))
    assert sent_tokens(steps.step(output("a", 12, events=[]))) == {"a": [11, 12]}


def test_a_step_without_the_most_probable_tokens_takes_those_of_no_other_step() -> None:
    """vLLM's first model runner gives the most probable tokens to nobody in a step in which a probe is computed."""
    asked = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, logprobs=3, flat_logprobs=True, max_tokens=100)
    steps = Steps(a=asked)
    steps.step(output("a", 10, first=True, columns=4))
    steps.step(output("a", 11, columns=2))
    ((joined,),) = [sent.outputs for sent in steps.step(output("a", 12, last=True, columns=4)).values()]
    assert joined.new_logprobs is not None
    assert joined.new_logprobs.logprob_token_ids.tolist() == [[11, 3, 0, 0], [12, 3, 4, 5]]
    assert joined.new_logprobs.logprobs[:, 1:].tolist() == [[0, -np.inf, -np.inf], [0, 1, 2]]


def test_what_others_of_a_step_asked_for_is_left_out() -> None:
    """A probe in the same step asks for more. Without it each later step would be widened to that one."""
    steps = Steps(a=FINAL)
    steps.step(output("a", 10, first=True))
    steps.step(output("a", 11, columns=9))
    steps.step(output("a", 12))
    ((joined,),) = [sent.outputs for sent in steps.step(output("a", 13, last=True, columns=5)).values()]
    assert joined.new_logprobs is not None
    assert joined.new_logprobs.logprob_token_ids.tolist() == [[11, 3], [12, 3], [13, 3]]


def test_an_answer_that_lacks_most_probable_tokens_is_none() -> None:
    whole, cut, unknown = FlatLogprobs(), FlatLogprobs(), FlatLogprobs()
    for found, places in (
        (whole, [(1, [7, 1, 2]), (1, [8, 3, 4])]),
        (cut, [(1, [7, 1]), (1, [8, 3, 4])]),
        (unknown, [(1, [7, 1, 2]), (-np.inf, [8, 3, 4])]),
    ):
        for best, ids in places:
            found.append_fast(ids, [-1.0, best, -2.0], itertools.count(1), itertools.repeat(None))
    assert alternatives_of(whole, 2).token_ids_TK.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(LookupError, match="place 0"):
        alternatives_of(cut, 2)
    with pytest.raises(LookupError, match="place 1"):
        alternatives_of(unknown, 2)


def test_the_scheduler_is_of_the_kind_that_vllm_would_choose() -> None:
    chosen = [HoldingScheduler, HoldingAsyncScheduler]
    for is_async, kind in enumerate(chosen):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                kind, "__init__", lambda self, config, **options: self.__dict__.update(options, config=config)
            )
            config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=bool(is_async)))
            made = scheduler(vllm_config=config, log_stats=True)
            assert type(made) is kind
            assert vars(made) == {"config": config, "log_stats": True}


def answers(found: list[dict[int, EngineCoreOutputs]], names: list[str]) -> tuple[dict[str, Any], int]:
    """Returns what vLLM's API server makes of it: each request's final output, and how many tokens it has counted."""
    processor = OutputProcessor(None, log_stats=False)
    for name in names:
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=FINAL,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        processor.add_request(request, None)
    finals: dict[str, Any] = {}
    tokens = 0
    for step in found:
        for sent in step.values():
            tokens += sum(len(each.new_token_ids) for each in sent.outputs)
            for final in processor.process_outputs(sent.outputs).request_outputs:
                (choice,) = final.outputs
                experts = choice.routed_experts
                finals[final.request_id] = (
                    list(choice.token_ids),
                    choice.logprobs,
                    choice.cumulative_logprob,
                    choice.finish_reason,
                    None if experts is None else experts.tolist(),
                )
    return finals, tokens


@given(
    lengths=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=4),
    ticks=st.lists(st.booleans(), min_size=8, max_size=8),
    columns=st.lists(st.integers(2, 4), min_size=8, max_size=8),
)
@settings(deadline=None)
def test_the_answers_are_those_of_single_steps(lengths: list[list[int]], ticks: list[bool], columns: list[int]) -> None:
    """Of several requests, with one to three tokens a step (speculation); now and then the interval is over.

    Steps have different numbers of columns, since other requests of theirs ask for more alternatives.
    """
    names = [f"r{index}" for index in range(len(lengths))]
    steps: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    token = 10
    for name, counts in zip(names, lengths, strict=True):
        for position, count in enumerate(counts):
            ids = range(token, token + count)
            token += count
            steps[position].append((name, ids, position == 0, position == len(counts) - 1))
    with pytest.MonkeyPatch.context() as patched:
        clock = SimpleNamespace(now=1000.0)
        patched.setattr(held_outputs, "time", SimpleNamespace(monotonic=lambda: clock.now))
        held, single = Steps(**dict.fromkeys(names, FINAL)), []
        together = []
        for position in sorted(steps):
            clock.now += ticks[position] * held_outputs.INTERVAL_SECONDS
            outputs = [
                [
                    output(name, *ids, first=first, last=last, columns=columns[position])
                    for name, ids, first, last in steps[position]
                ]
                for _ in "12"
            ]
            single.append({0: EngineCoreOutputs(outputs=outputs[0])})
            together.append(held.step(*outputs[1]))
    found, tokens = answers(together, names)
    assert (found, tokens) == answers(single, names)
    assert all(experts is not None for *_, experts in found.values())
    assert not held._held
