"""The registry of runs: by examples for orchestrator and the trainer's end, and by random histories for what always holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import RunDirectory
from counterpoint.trainer.runs.record import TAKES_BATCHES, TRANSITIONS, WITHOUT_SLOT, RunRecord, RunStage
from counterpoint.trainer.runs.registry import RunRegistry
from counterpoint.trainer.runs.run import RunProgress
from counterpoint.transport.messages import Hello
from tests.trainer.conftest import make_run_config

NOWHERE = Path("/nonexistent")


def make_config(run_id: str, steps: int = 3) -> RunConfig:
    config = make_run_config(NOWHERE, NOWHERE, steps)
    return config.model_copy(update={"run_id": run_id, "trainer_timeout_seconds": 50.0})


names = st.sampled_from("abcd")
CONFIGS = {(run_id, steps): make_config(run_id, steps) for run_id in "abcd" for steps in (1, 3)}


def make_registry(*run_ids: str, max_runs: int = 3) -> RunRegistry:
    """With these runs in the first slots, their batches taken since time 0."""
    registry = RunRegistry(max_runs)
    for found in registry.take_scan(
        {run_id: RunDirectory(run_id, 1, (0, 0, 0), evicted=False) for run_id in run_ids}, {}
    ):
        registry.accept(found, CONFIGS[found.run_id, 3])
    for slot, run_id in registry.plan().admitted.items():
        registry.occupy(slot, run_id)
        registry.advance(slot, 0.0)
    return registry


def finish(registry: RunRegistry, run_id: str, now: float) -> None:
    slot = registry.slot_of(run_id)
    assert slot is not None
    registry.in_slot(slot).progress.step = 3
    registry.advance(slot, now)


def test_an_orchestrator_is_present_from_hello_to_bye_and_for_a_while_when_it_cannot_be_reached() -> None:
    registry = RunRegistry(1)
    registry.connected(Hello("a", 0))
    registry.connected(Hello("b", 0))
    assert registry.present(0.0) == {"a", "b"}
    registry.disconnected("b", 1.0)
    registry.unreachable("a", 10.0, patience=5.0)
    registry.unreachable("a", 14.0, patience=5.0)
    assert registry.present(15.0) == {"a"}
    assert registry.present(15.1) == set()
    registry.connected(Hello("a", 0))
    assert registry.present(99.0) == {"a"}


def test_it_is_over_once_every_run_that_had_a_slot_has_ended() -> None:
    assert not RunRegistry(1).over(0.0)
    registry = make_registry("a", "b", "c")
    registry.connected(Hello("waits for a slot", 0))
    assert not registry.over(0.0)
    finish(registry, "a", now=50.0)
    registry.end("b", RunStage.EVICTED)
    registry.end("c", RunStage.DELETED)
    assert not registry.over(99.0)
    assert registry.over(100.0)
    registry.disconnected("a", 50.0)
    assert registry.over(50.0)
    assert not registry.all_evicted()
    registry.vacate(0)
    registry.occupy(0, "a")
    registry.advance(0, 60.0)
    assert not registry.over(999.0), "it goes on with more steps"


def test_a_run_that_pauses_is_waited_for() -> None:
    registry = make_registry("a")
    registry.connected(Hello("a", 0))
    registry.disconnected("a", 1.0)
    assert not registry.over(1e9)


def test_all_evicted_means_all() -> None:
    assert not RunRegistry(1).all_evicted()
    registry = make_registry("a", "b")
    registry.end("a", RunStage.EVICTED)
    assert not registry.all_evicted()
    registry.end("b", RunStage.EVICTED)
    assert registry.all_evicted()
    assert registry.over(0.0)


def test_a_finished_run_that_is_sent_away_is_waited_for() -> None:
    """Its checkpoint was damaged, say: it is not done."""
    registry = RunRegistry(1)
    registry.finished_before("a", bye_deadline=100.0)
    registry.connected(Hello("a", 0))
    registry.sent_away("a")
    assert registry.present(0.0) == set()
    assert not registry.over(1e9)


def test_a_run_is_deleted_until_there_is_a_directory_of_its_name_again() -> None:
    registry = make_registry("a")
    registry.take_scan({}, {})
    assert registry.plan().leaving == {0: "a"}
    registry.end("a", RunStage.DELETED)
    registry.vacate(0)
    assert [(record.run_id, record.stage) for record in registry] == [("a", RunStage.DELETED)]
    registry.connected(Hello("a", 0))
    registry.take_scan({"a": RunDirectory("a", 2, (0, 0, 0), evicted=False)}, {})
    assert [(record.run_id, record.stage) for record in registry] == [("a", RunStage.SEEN)]


def test_a_run_whose_directory_is_deleted_while_it_has_no_slot_has_ended() -> None:
    registry = make_registry("a", "b", max_runs=2)
    registry.vacate(0)
    directories = {run_id: RunDirectory(run_id, 1, (0, 0, 0), evicted=False) for run_id in "ab"}
    registry.take_scan(directories, {})
    assert registry.missing == []
    for _ in range(2):
        registry.take_scan({"b": directories["b"]}, {})
        assert registry.missing == [("a", 1)], "perhaps only its configuration is gone"
    registry.directory_deleted("a")
    registry.take_scan({"b": directories["b"]}, {})
    assert registry.missing == []
    registry.end("b", RunStage.EVICTED)
    assert registry.over(0.0)
    registry.take_scan({**directories, "a": replace(directories["a"], directory=2)}, {})
    assert registry.missing == []
    registry.take_scan({**directories, "a": replace(directories["a"], directory=3)}, {})
    assert registry.missing == [("a", 2)], "another directory took its place"


def test_another_rank_has_the_runs_in_slots_and_no_others() -> None:
    registry = RunRegistry(2)
    for number, run_id in enumerate("ab", 1):
        registry.adopt(number - 1, run_id, number, CONFIGS[run_id, 3], RunProgress(step=number))
    assert [(run.run_id, run.number, run.progress.step) for run in registry.at(RunStage.ADMITTED)] == [
        ("a", 1, 1),
        ("b", 2, 2),
    ]
    registry.in_slot(0).created = True
    assert registry.vacate(0).run_id == "a"
    assert [departed.run_id for departed in registry.take_departed()] == ["a"]
    assert [record.run_id for record in registry] == ["b"]
    registry.adopt(0, "a", 3, CONFIGS["a", 3], RunProgress())
    assert registry.run_ids == {0: "a", 1: "b"}


def test_of_a_name_that_connects_once_nothing_is_kept() -> None:
    registry = RunRegistry(1)
    for leave in (registry.sent_away, lambda name: registry.disconnected(name, 1.0)):
        registry.connected(Hello("stranger", 0))
        registry.await_answer("stranger", 0.0)
        assert registry.unanswered == 1
        leave("stranger")
        assert list(registry) == []


class RegistryMachine(RuleBasedStateMachine):
    """Directories, orchestrators and steps of up to four runs in two slots, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = RunRegistry(2)
        self.now = 0.0
        self.directories = {run_id: RunDirectory(run_id, 1, (1, 1, 0), evicted=False) for run_id in "abc"}
        self.steps = dict.fromkeys("abc", 3)
        self.created: dict[int, int] = {}
        self.stages: dict[str, RunStage] = {}
        """Before the last rule."""
        self.numbers: set[int] = set()

    # --- directories ---

    @rule(run_id=names, inode=st.integers(1, 2), changed=st.integers(1, 3), steps=st.sampled_from((1, 3)))
    def write_directory(self, run_id: str, inode: int, changed: int, steps: int) -> None:
        self.directories[run_id] = RunDirectory(run_id, inode, (changed, steps, 0), evicted=False)
        self.steps[run_id] = steps

    @precondition(lambda self: self.directories)
    @rule(data=st.data())
    def delete_directory(self, data: st.DataObject) -> None:
        del self.directories[data.draw(st.sampled_from(sorted(self.directories)))]

    @precondition(lambda self: self.directories)
    @rule(data=st.data(), evicted=st.booleans())
    def evict_by_hand(self, data: st.DataObject, evicted: bool) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.directories)))
        self.directories[run_id] = replace(self.directories[run_id], evicted=evicted)

    @rule(refuse=st.sets(names, max_size=1), unreadable=st.sets(names, max_size=1), pick=st.booleans())
    def discover(self, refuse: set[str], unreadable: set[str], pick: bool) -> None:
        registry, directories = self.registry, self.directories
        for found in registry.take_scan(
            directories, {name: "why" for name, each in directories.items() if each.evicted}
        ):
            if found.run_id in refuse:
                registry.refuse(found.run_id, "bad", found)
            elif found.run_id not in unreadable:
                registry.accept(found, CONFIGS[found.run_id, self.steps[found.run_id]])
        self.note()
        changes = registry.plan(registry.present(self.now) if pick else None)
        assert registry.queue == changes.waiting
        for slot, run_id in changes.leaving.items():
            run = registry.in_slot(slot)
            if run_id not in directories or directories[run_id].directory != run.directory:
                registry.end(run_id, RunStage.DELETED)
            self.note()
            registry.vacate(slot)
            self.note()
        for slot, run_id in changes.admitted.items():
            number = registry.occupy(slot, run_id).number
            assert number not in self.numbers
            self.numbers.add(number)
        self.note()

    @rule()
    def synchronize(self) -> None:
        for departed in self.registry.take_departed():
            assert self.created.pop(departed.slot) == departed.number
        for run in self.registry.at():
            if not run.created:
                run.created = True
                assert run.slot not in self.created
                self.created[run.slot] = run.number
        assert self.created == {each.slot: each.number for each in self.registry.at()}

    # --- training ---

    @rule()
    def admit(self) -> None:
        for run in self.registry.at(RunStage.ADMITTED):
            self.registry.advance(run.slot, self.now)

    @rule()
    def train(self) -> None:
        for run in self.registry.at(RunStage.TRAINING):
            run.progress.step += 1
            self.registry.advance(run.slot, self.now)

    @precondition(lambda self: self.registry.at())
    @rule(data=st.data(), refused=st.booleans())
    def end_a_run(self, data: st.DataObject, refused: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.registry.run_ids)))
        self.registry.leave(slot)
        if refused:
            self.registry.refuse(self.registry.in_slot(slot).run_id, "cannot be made")

    # --- orchestrators ---

    @rule(run_id=names)
    def hello(self, run_id: str) -> None:
        self.registry.connected(Hello(run_id, 0))
        if self.registry.taking(run_id) is None:
            assert self.registry.await_answer(run_id, self.now) <= self.now

    @rule(run_id=names)
    def bye(self, run_id: str) -> None:
        self.registry.disconnected(run_id, self.now)

    @rule(run_id=names)
    def send_away(self, run_id: str) -> None:
        self.registry.sent_away(run_id)

    @rule(seconds=st.floats(0.1, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for run in self.registry.at(*TAKES_BATCHES):
            self.registry.unreachable(run.run_id, self.now, patience=30.0)

    # --- what must hold ---

    def note(self) -> None:
        """Compares each stage with the one before."""
        for record in self.registry:
            before = self.stages.get(record.run_id, RunStage.SEEN)
            assert record.stage is before or record.stage in TRANSITIONS[before]
        self.stages = {record.run_id: record.stage for record in self.registry}

    @invariant()
    def stages_follow_each_other_as_they_may(self) -> None:
        self.note()

    @invariant()
    def a_slot_has_one_run_and_a_run_one_slot(self) -> None:
        registry = self.registry
        held = [record.run for record in registry if record.run is not None]
        assert {each.slot: each.run_id for each in held} == registry.run_ids
        assert len(held) == len(registry.run_ids) == len(set(registry.run_ids.values()))
        assert set(registry.run_ids) <= {0, 1}
        for slot, run_id in registry.run_ids.items():
            assert registry.slot_of(run_id) == slot
            assert registry.in_slot(slot).run_id == run_id

    @invariant()
    def a_stage_tells_whether_there_is_a_slot(self) -> None:
        for record in self.registry:
            assert (record.run is None) == (record.stage in WITHOUT_SLOT)
            if record.stage is RunStage.WAITING:
                assert record.admissible
            if record.stage is RunStage.LEAVING:
                assert record.run is not None

    @invariant()
    def of_a_deleted_run_its_end_alone_is_left(self) -> None:
        for record in self.registry:
            if record.stage is RunStage.DELETED:
                bare = RunRecord(
                    record.run_id,
                    RunStage.DELETED,
                    had_slot=record.had_slot,
                    ended=record.ended,
                    orchestrator=record.orchestrator,
                )
                assert record == bare

    @invariant()
    def nothing_is_kept_of_a_directory_that_is_gone(self) -> None:
        for record in self.registry:
            if record.found is None:
                assert [record.checked, record.config, record.refusal, record.eviction] == [None] * 4

    @invariant()
    def no_stranger_is_kept(self) -> None:
        for record in self.registry:
            orchestrator = record.orchestrator
            reasons = (record.found, record.run, orchestrator.unanswered_since)
            assert orchestrator.connected or record.had_slot or any(each is not None for each in reasons)


@pytest.mark.slow
def test_in_every_history_the_registry_holds_its_invariants() -> None:
    run_state_machine_as_test(RegistryMachine, settings=settings(max_examples=400, stateful_step_count=50))
