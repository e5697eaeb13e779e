"""An executor and a search algorithm for the state machine alone: all happens when a test says so, and each rule is checked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.executors.executor import Completed, Failed, Saved, SaveFailed, Started, Stopped
from counterpoint.tune.resources import Resources
from counterpoint.tune.result import TRAINING_ITERATION, Result
from counterpoint.tune.runner import codec
from counterpoint.tune.runner.events import (
    AskExecutor,
    AskSearch,
    DeleteCheckpoint,
    Event,
    Instruction,
    Notify,
    Opened,
    ResetRefused,
    ResourcesFree,
    ResultReceived,
    TellComplete,
    TellResult,
    TrialsProposed,
    Warn,
    WriteError,
)
from counterpoint.tune.runner.machine import ExperimentMachine
from counterpoint.tune.runner.machine_state import restore, state_of
from counterpoint.tune.runner.progress import AttemptPhase
from counterpoint.tune.runner.search_side import SearchSide
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.trial import Trial


class RestlessScheduler(TrialScheduler):
    """Asks for everything a scheduler may ask for, at random but by its seed."""

    def __init__(self, seed: int, calm: float = 0.5) -> None:
        self.metric, self.mode = "value", "max"
        self.seed, self.calm, self.calls = seed, calm, 0
        self.saved: list[Checkpoint] = []

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        self.calls += 1
        chance = random.Random(f"{self.seed}-{self.calls}")
        if chance.random() < self.calm:
            return self.CONTINUE
        others = trials.get_trials()
        other = others[chance.randrange(len(others))]
        match chance.randrange(9):
            case 0:
                return self.PAUSE
            case 1:
                return self.STOP
            case 2:
                trials.pause_trial(other)
            case 3:
                trials.unpause_trial(other)
            case 4:
                trials.stop_trial(other)
            case 5 | 6:
                self.saved.append(trials.save_trial(other, result))
                del self.saved[:-4]
            case _:
                if self.saved:
                    source = self.saved[chance.randrange(len(self.saved))]
                    trials.exploit(trial, source, {"from": source.trial_id, "call": self.calls}, f"tag{self.calls}")
                    return chance.choice([self.NOOP, self.CONTINUE, self.PAUSE])
        return self.NOOP if other is trial else self.CONTINUE

    def needs_checkpoint(self, checkpoint: Checkpoint) -> bool:
        return any(each.path == checkpoint.path for each in self.saved)

    def state(self) -> dict[str, Any]:
        return {"calls": self.calls, "saved": list(self.saved)}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        self.saved = [Checkpoint(**each) for each in state["saved"]]


@dataclass
class Life:
    """One attempt."""

    trial: Trial
    attempt: int
    doing: str = "starting"
    iteration: int = 0
    checkpoint: Checkpoint | None = None
    """What is being saved or loaded."""


@dataclass
class World:
    """Carries instructions out as slowly as a test likes."""

    machine: ExperimentMachine
    capacity: float = 3.0
    total: int = 6
    lives: dict[str, Life] = field(default_factory=dict)
    journal: list[bytes] = field(default_factory=list)
    snapshot: bytes | None = None
    asked: int = 0
    proposed: int = 0
    heard: list[TellResult | TellComplete] = field(default_factory=list)
    results: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of the results that the callbacks heard of, by trial."""
    ended: list[str] = field(default_factory=list)
    ended_paused: list[str] = field(default_factory=list)
    told_complete: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    """The iteration of each checkpoint that exists, by path."""
    trial_fields: dict[str, Any] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    resumes: int = 0

    def send(self, event: Event) -> None:
        if not self.machine.accepts(event):
            return
        self.journal.append(codec.encode(event))
        for instruction in self.machine.handle(event):
            self.act(instruction)
        for status, count in (
            (status, self.machine.table.count(status)) for status in ("PENDING", "PAUSED", "RUNNING")
        ):
            assert count == sum(trial.status == status for trial in self.machine.table.trials)

    def act(self, instruction: Instruction) -> None:
        match instruction:
            case AskSearch(count):
                assert not self.asked
                self.asked = count
            case TellResult() | TellComplete():
                assert instruction.number == len(self.heard) + 1
                self.heard.append(instruction)
                if isinstance(instruction, TellComplete):
                    self.told_complete.append(instruction.trial_id)
            case AskExecutor("begin", trial, (attempt, checkpoint)):
                assert trial.trial_id not in self.lives
                assert self.used + 1 <= self.capacity
                begin = 0
                if checkpoint is not None and checkpoint.trial_id:
                    begin = self.made[checkpoint.path]
                self.lives[trial.trial_id] = Life(trial, attempt, iteration=begin)
            case AskExecutor("proceed", trial):
                self.rested(trial).doing = "training"
            case AskExecutor("save_to", trial, (checkpoint,)):
                life = self.rested(trial)
                life.doing, life.checkpoint = "saving", checkpoint
            case AskExecutor("change", trial, (_, checkpoint, _)):
                life = self.rested(trial)
                assert life.attempt == self.machine.table.progress(trial).attempt
                assert checkpoint.path in self.made
                life.doing, life.checkpoint = "resetting", checkpoint
            case AskExecutor("suspend" | "end", trial):
                assert self.lives[trial.trial_id].doing != "stopping"
                self.lives[trial.trial_id].doing = "stopping"
            case AskExecutor("end_paused", trial):
                assert trial.trial_id not in self.lives
                self.ended_paused.append(trial.trial_id)
            case DeleteCheckpoint(checkpoint):
                users = [trial for trial in self.machine.table.trials if trial.checkpoint is not None]
                assert checkpoint.path not in [each.checkpoint.path for each in users if each.checkpoint is not None]
                self.made.pop(checkpoint.path, None)
            case WriteError(trial, _, number):
                self.errors[trial.trial_id] = number
            case Warn(text):
                self.warned.append(text)
            case Notify("on_trial_result", trial, info):
                self.results.setdefault(trial.trial_id, []).append(info["number"])
            case Notify("on_trial_complete" | "on_trial_fail", trial):
                self.ended.append(trial.trial_id)

    def rested(self, trial: Trial) -> Life:
        life = self.lives[trial.trial_id]
        assert life.doing == "resting", life
        return life

    @property
    def used(self) -> int:
        return len(self.lives)

    # --- what a test lets happen ---

    def offer(self) -> bool:
        """Resources are free, if they are; returns whether the scheduler was asked."""
        if self.used + 1 > self.capacity or not self.machine.startable() or not self.machine.may_start:
            return False
        self.send(ResourcesFree(tuple(self.machine.startable())))
        return True

    def propose(self) -> None:
        if not self.asked:
            return
        count = min(self.asked, self.total - self.proposed)
        self.asked = 0
        trials = []
        for _ in range(count):
            self.proposed += 1
            trial_id = f"t{self.proposed:04d}"
            resources = Resources(cpu=1)
            trials.append(
                Trial("module:f", {"n": self.proposed}, trial_id, "/x", resources=resources, **self.trial_fields)
            )
        done = self.proposed == self.total
        self.send(TrialsProposed(tuple(trials), {"proposed": self.proposed}, len(self.heard), done))

    def go_on(self, life: Life, how: str = "well") -> None:
        """What the attempt does comes to its end, well or otherwise."""
        who = (life.trial.trial_id, life.attempt)
        if how == "dies":
            del self.lives[life.trial.trial_id]
            self.send(Stopped(*who) if life.doing == "stopping" else Failed(*who, "it died"))
            return
        doing, life.doing = life.doing, "resting"
        match doing:
            case "starting":
                self.send(Started(*who))
            case "training" if how == "returns":
                self.send(Completed(*who))
            case "training":
                life.iteration += 1
                result = {TRAINING_ITERATION: life.iteration, "value": life.iteration * 0.5}
                received = ResultReceived(*who, {} if how == "odd" else result, None)
                self.send(received)
            case "saving":
                saved, life.checkpoint = life.checkpoint, None
                assert saved is not None
                if how == "well":
                    self.made[saved.path] = life.iteration
                    self.send(Saved(*who, saved))
                else:
                    self.send(SaveFailed(*who, "no space"))
            case "resetting":
                source, life.checkpoint = life.checkpoint, None
                assert source is not None
                if how == "well":
                    life.iteration = self.made[source.path]
                    self.send(Started(*who))
                else:
                    life.doing = "resting"
                    self.send(ResetRefused(*who))
            case "stopping":
                del self.lives[life.trial.trial_id]
                self.send(Stopped(*who))
            case _:
                waits = self.machine.table.progress(life.trial).phase is AttemptPhase.WAITING
                assert waits, f"{life} was forgotten: nobody asks it for anything"

    def take_snapshot(self) -> None:
        self.snapshot = codec.pack(state_of(self.machine))
        self.journal.clear()

    def kill_runner(self, machine: ExperimentMachine) -> None:
        """All processes are gone, and another runner, with a new machine, reads what the first has written."""
        before = codec.pack(state_of(self.machine))
        if self.snapshot is not None:
            restore(machine, codec.unpack(self.snapshot))
        for record in self.journal:
            machine.handle(codec.decode(codec.unpack(record)))
        assert codec.unpack(codec.pack(state_of(machine))) == codec.unpack(before)
        self.machine = machine
        self.lives.clear()
        self.asked = 0
        self.resumes += 1
        self.check_search(machine.search)
        self.send(Opened())

    def check_search(self, side: SearchSide) -> None:
        """What the search algorithm's state lacks is in the backlog, without a gap."""
        covered = side.told - len(side.backlog)
        assert [told.number for told in side.backlog] == list(range(covered + 1, len(self.heard) + 1))
        assert side.state is None or side.state["proposed"] == self.proposed

    def run_to_the_end(self, steps: int = 5000) -> None:
        """Lets everything go well until all has ended."""
        for _ in range(steps):
            if self.machine.is_finished():
                return
            self.propose()
            while self.offer():
                pass
            if not self.lives and not self.asked and self.machine.is_stuck():
                for trial in list(self.machine.with_status(Trial.PAUSED)):
                    self.machine.stop_trial(trial)
            for life in list(self.lives.values()):
                if self.lives.get(life.trial.trial_id) is life:
                    self.go_on(life, "returns" if life.doing == "training" and life.iteration >= 5 else "well")
        raise AssertionError(f"not finished: {[(str(t), t.status) for t in self.machine.table.trials]}, {self.lives}")

    def check(self, max_failures: int) -> None:
        """The rules that hold at any time."""
        for trial in self.machine.table.trials:
            numbers = self.results.get(trial.trial_id, [])
            assert numbers == list(range(1, trial.num_results + 1))
            assert trial.num_failures <= max_failures + 1
            assert self.errors.get(trial.trial_id, 0) == trial.num_failures
            assert (trial.trial_id in self.lives) <= (trial.status == Trial.RUNNING)
            if trial.checkpoint is not None:
                assert trial.checkpoint.path in self.made
        assert len(set(self.ended_paused)) == len(self.ended_paused)
        assert len(set(self.ended)) == len(self.ended)
        assert len(set(self.told_complete)) == len(self.told_complete)
