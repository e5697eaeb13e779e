"""One name at one server under any order of events, by a random walk: what a second, straightforward implementation decides, and
that no answer is ever accepted whose weights were not proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from counterpoint.inference.base import (
    HeldWeights,
    InferenceError,
    RequestRefused,
    Scores,
    ServerFailure,
    ServerUnreachable,
    WrongAnswer,
)
from counterpoint.inference.clients.client import ServerIdentity
from counterpoint.inference.loads import Origin
from counterpoint.inference.pool import held as machine
from counterpoint.inference.pool.held import FAILURES_IN_A_ROW, Held, intervals_out
from tests.inference.pool.straightforward_held import NOTHING, StraightforwardHeld
from tests.support.fake_inference import PROBE_TOKENS, digest_of, probe_answer, weight_update

NAME, URL = "a-model", "http://server"
ERRORS = [ServerUnreachable("gone"), ServerFailure("500"), RequestRefused("no")]


def as_plain(instruction: machine.Instruction) -> Any:
    match instruction:
        case machine.LoadVersion(_, update, first):
            return "load", update, first
        case machine.Prove(_, update):
            return "prove", update
        case machine.Serves(update):
            return "serves", update
        case machine.GoneOut(_, _, former):
            early = isinstance(former, machine.Loading) and former.stage != "loading"
            return "gone out", "serving" if early or isinstance(former, machine.Proven) else type(
                former
            ).__name__.lower()
    names = {
        machine.AskToken: "ask",
        machine.Check: "check",
        machine.EndRequests: "end requests",
        machine.Doubt: "doubt",
        machine.MissesDigests: "misses",
    }
    return names[type(instruction)]


class HeldMachine(RuleBasedStateMachine):
    """A server that is loaded, restarted, vandalised and asked, and what is reported of it, sometimes late or of long ago."""

    @initialize(follows=st.booleans(), adapter=st.sampled_from([None, NAME]))
    def begin(self, follows: bool, adapter: str | None) -> None:
        self.held = Held(URL, NAME, follows=follows, interval=2.0)
        self.plain = StraightforwardHeld(NAME, follows=follows, interval=2.0)
        self.follows, self.adapter = follows, adapter
        self.closed = False
        self.now = 0.0
        self.instance, self.number, self.version = 1, 0, 0
        self.turns = [0]
        self.wishes = 0
        self.proven: set[tuple[str, int]] = set()
        """The loads of the pool's that were proven, by process and number."""

    def both(self, event: Callable[[], list[machine.Instruction]], plain: Callable[[], list[Any]]) -> list[Any]:
        if self.closed:
            return []
        instructions = event()
        assert [as_plain(each) for each in instructions] == plain()
        self.turns.append(self.held.turn)
        if isinstance(self.held.state, machine.Proven):
            loads, unproven = self.held.loads, [each for _, each in self.held.loads.versions]
            if self.held.state.update is not None:
                unproven = [number for number in unproven if number == self.plain.unproven_number()]
            self.proven |= {(str(loads.instance), number or 0) for number in unproven}
        return instructions

    def attempt(self, age: int) -> int:
        return self.plain.attempt - age

    def identity(self, has: bool) -> ServerIdentity:
        adapters = {} if self.adapter is None or not has else {self.adapter: self.number}
        return ServerIdentity(str(self.instance), weights=0 if self.adapter else self.number, adapters=adapters)

    # --- what happens at the server ---

    @rule()
    def the_server_is_restarted(self) -> None:
        self.instance, self.number, self.version = self.instance + 1, 0, 0

    @rule(really=st.integers(0, 3))
    def somebody_changes_its_weights(self, really: int) -> None:
        if not really:
            self.number += 1

    @rule(seconds=st.sampled_from([0.1, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --- what is reported ---

    @rule()
    def new_weights_are_published(self) -> None:
        self.wishes += 1
        update = weight_update(self.wishes, self.adapter)
        self.both(lambda: self.held.want(update), lambda: self.plain.want(update))

    @rule(has=st.integers(0, 5), age=st.integers(0, 8), tells=st.integers(0, 9))
    def a_health_check_is_answered(self, has: int, age: int, tells: int) -> None:
        turn = self.turns[-1 - min(max(0, age - 6), len(self.turns) - 1)]
        identity = self.identity(has > 0) if tells else ServerIdentity(str(self.instance))
        self.both(
            lambda: self.held.checked(identity, turn, self.now), lambda: self.plain.checked(identity, turn, self.now)
        )

    @rule(reached=st.booleans(), firm=st.booleans(), silence=st.booleans())
    def a_health_check_fails(self, reached: bool, firm: bool, silence: bool) -> None:
        said = "no health check was answered" if silence else ""
        self.both(
            lambda: self.held.unanswered("gone", self.now, None, reached=reached, firm=firm, silence=said),
            lambda: self.plain.unanswered(self.now, reached=reached, firm=firm, silence=silence),
        )

    @rule(age=st.sampled_from([0, 0, 0, 1]))
    def a_mute_server_answers(self, age: int) -> None:
        attempt = self.attempt(age)
        if isinstance(self.held.state, machine.Loading) and not self.held.state.mute:
            return
        self.both(lambda: self.held.answers(attempt, self.now), lambda: self.plain.answers(attempt, self.now))

    def is_loading(self) -> bool:
        state = self.held.state
        return isinstance(state, machine.Loading) and not state.mute and state.update is not None

    @rule(age=st.sampled_from([0, 0, 0, 1]))
    def a_load_begins_to_count(self, age: int) -> None:
        if self.is_loading():
            self.both(lambda: self.held.begun(self.attempt(age)), lambda: self.plain.begun(self.attempt(age)))

    @rule(age=st.sampled_from([0, 0, 0, 1]), form=st.sampled_from(["right", "right", "deaf", "rounded", "silent"]))
    def weights_are_loaded(self, age: int, form: str) -> None:
        if not self.is_loading() or self.plain.unproven is not None:
            return
        self.number += 1
        update = self.plain.loading
        self.version = 0 if form == "deaf" else update.version
        dtype = "bfloat16" if form == "rounded" else "float32"
        held = None if form == "silent" else HeldWeights(dtype, digest_of(self.version), self.number)
        attempt = self.attempt(age)
        self.both(lambda: self.held.loaded(attempt, held, self.now), lambda: self.plain.loaded(attempt, held, self.now))

    @rule(
        age=st.sampled_from([0, 0, 0, 1]),
        right=st.integers(0, 3),
        tells=st.booleans(),
        newer=st.sampled_from([0, 0, 1]),
    )
    def a_probe_is_answered(self, age: int, right: int, tells: bool, newer: int) -> None:
        if not self.is_loading():
            return
        version = self.plain.loading.version if right else -1
        values = np.array(probe_answer(version, PROBE_TOKENS), dtype=np.float32)
        number = self.number + newer
        origin = Origin(str(self.instance), self.adapter, number, number, "a load") if tells else None
        scores, attempt = Scores(values, origin), self.attempt(age)
        is_right = self.plain.loading.probe.mismatch(values, None, "float32") is None
        self.both(
            lambda: self.held.probed(attempt, scores, None, self.now),
            lambda: self.plain.probed(attempt, scores, self.now, right=is_right),
        )

    @rule(age=st.sampled_from([0, 0, 0, 1]), error=st.sampled_from(ERRORS), late=st.booleans())
    def a_load_fails(self, age: int, error: InferenceError, late: bool) -> None:
        attempt, late = self.attempt(age), late and not isinstance(error, RequestRefused)
        self.both(
            lambda: self.held.failed(attempt, error, self.now, late=late),
            lambda: self.plain.failed(attempt, error, self.now, late=late),
        )

    @rule(steps=st.integers(1, 6), begins=st.booleans(), right=st.integers(0, 3), newer=st.sampled_from([0, 0, 0, 1]))
    def it_goes_on_as_usual(self, steps: int, begins: bool, right: int, newer: int) -> None:
        """A health check, a load, a proof, which may fail: what random events alone seldom come to."""
        for _ in range(steps):
            state = self.held.state
            if not isinstance(state, machine.Loading):
                self.now = max(self.now, getattr(state, "not_before", 0.0))
                self.a_health_check_is_answered(has=1, age=0, tells=1)
            elif state.mute:
                self.a_mute_server_answers(age=0)
            elif state.unproven is None:
                if begins:
                    self.a_load_begins_to_count(age=0)
                self.weights_are_loaded(age=0, form="right")
            else:
                self.a_probe_is_answered(age=0, right=right, tells=True, newer=newer)
            self.it_is_as_the_plain_one()
            self.no_answer_is_given_of_weights_that_were_not_proven()

    @rule()
    def others_serve_and_nobody_waits(self) -> None:
        self.both(lambda: self.held.late(self.now), lambda: self.plain.late(self.now))

    @rule(steps=st.integers(1, 2), begins=st.booleans())
    def an_update_is_not_waited_for(self, steps: int, begins: bool) -> None:
        self.new_weights_are_published()
        self.it_goes_on_as_usual(steps, begins, right=1, newer=0)
        self.others_serve_and_nobody_waits()

    @rule(mute=st.booleans())
    def it_is_found_unfit(self, mute: bool) -> None:
        self.both(lambda: self.held.unfit("unfit", self.now, mute=mute), lambda: self.plain.unfit(self.now, mute=mute))

    @rule(
        error=st.sampled_from([ServerFailure("500"), ServerFailure("500"), WrongAnswer("nan")]), times=st.integers(1, 4)
    )
    def requests_fail(self, error: InferenceError, times: int) -> None:
        for _ in range(times):
            self.both(
                lambda: self.held.request_failed(error, self.now), lambda: self.plain.request_failed(error, self.now)
            )

    @rule()
    def a_request_is_answered(self) -> None:
        self.held.request_answered()
        self.plain.request_answered()

    @rule(error=st.sampled_from([None, ERRORS[0]]))
    def a_doubt_ends(self, error: InferenceError | None) -> None:
        if self.plain.asked:
            self.both(
                lambda: self.held.token_asked(error, self.now, None), lambda: self.plain.token_asked(error, self.now)
            )

    @rule(really=st.integers(0, 9))
    def the_pool_is_closed(self, really: int) -> None:
        if not really:
            self.held.close()
            self.plain.close()
            self.closed = True

    # --- what must hold ---

    @invariant()
    def it_is_as_the_plain_one(self) -> None:
        held, plain = self.held, self.plain
        assert held.status[0] == plain.state
        assert (held.settled, held.state.awaited) == (plain.settled, not plain.silent)
        assert (held.version, held.counts) == (plain.version, plain.counted)
        assert (held.failures, held.setbacks, held.turn) == (plain.failures, plain.setbacks, plain.turn)
        assert (held.refusal is not None) == plain.refused
        assert held.is_proving == (plain.loading is not NOTHING)
        assert held.takes_requests == plain.takes_requests()
        assert held.loads.versions == plain.accepted
        if plain.wanted is not None:
            assert held.serves_wanted == (plain.held is plain.wanted)
            assert held.has(plain.wanted, "begun", "held") == (plain.wanted in (plain.held, plain.early))

    @invariant()
    def no_answer_is_given_of_weights_that_were_not_proven(self) -> None:
        if self.follows or not self.held.loads.any_own or self.held.is_proving:
            return
        for number in range(self.number + 1):
            origin = Origin(str(self.instance), self.adapter, number, number, "a load")
            if not self.held.stranger(origin):
                assert (str(self.instance), number) in self.proven


def test_any_order_of_events_has_the_consequences_that_plain_rules_have() -> None:
    HeldMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(HeldMachine, settings=HeldMachine.TestCase.settings)


@pytest.mark.slow
def test_many_orders_of_events() -> None:
    run_state_machine_as_test(HeldMachine, settings=settings(max_examples=600, stateful_step_count=80, deadline=None))


def test_patience_grows_with_setbacks_to_a_bound() -> None:
    assert [intervals_out(setbacks) for setbacks in range(9)] == [0, 0, 1, 3, 7, 15, 31, 31, 31]


def test_failures_in_a_row_are_one_too_many_and_a_success_forgives_them() -> None:
    held = Held(URL, NAME, follows=False, interval=2.0)
    held.checked(ServerIdentity("first", weights=0), held.turn, 0.0)
    for _ in range(2):
        for _ in range(FAILURES_IN_A_ROW - 1):
            assert held.request_failed(ERRORS[1], 0.0) == [machine.Check()]
        held.request_answered()
    for _ in range(FAILURES_IN_A_ROW - 1):
        held.request_failed(ERRORS[1], 0.0)
    assert held.request_failed(ERRORS[1], 0.0) == [machine.Doubt(ERRORS[1], FAILURES_IN_A_ROW)]
