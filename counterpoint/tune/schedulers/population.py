"""The population of population based training: who has what score, who is ahead, and who a round still waits for."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from dataclasses import asdict, dataclass
from typing import Any

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.schedulers.metric_scheduler import number_from_json, number_to_json


@dataclass
class PopulationMember:
    """A live trial of the population."""

    trial_id: str
    index: int
    """The place in the order of joining, by which ties are broken."""
    tag: str
    """The experiment tag with which it joined."""
    score: float | None = None
    """Its score at its last perturbation; None before the first."""
    checkpoint: Checkpoint | None = None
    """The checkpoint of its last perturbation, if it was in the upper quantile then."""
    last_perturbation_time: float = 0
    last_train_time: float = 0


class Population:
    """The live trials, and their ranking by score."""

    def __init__(self, quantile_fraction: float, first_round: float) -> None:
        self.members: dict[str, PopulationMember] = {}
        self._quantile_fraction = quantile_fraction
        self._ranking: list[tuple[float, int, str]] = []
        self._joined = 0
        self._round = first_round
        """The time to which all train before the next perturbation, in synchronous mode."""
        self._awaited: set[str] = set()
        """The trials that have not come to it."""
        self._longest_of_gone: float = 0
        """The longest time that a trial had trained when it left."""

    def add(self, trial_id: str, tag: str) -> None:
        """Takes in a new trial."""
        self.members[trial_id] = PopulationMember(trial_id, self._joined, tag)
        self._joined += 1
        self._awaited.add(trial_id)

    def remove(self, trial_id: str) -> bool:
        """Takes out a trial that has ended. Returns whether it was a member."""
        member = self.members.pop(trial_id, None)
        if member is None:
            return False
        self._unrank(member)
        self._awaited.discard(trial_id)
        self._longest_of_gone = max(self._longest_of_gone, member.last_train_time)
        return True

    def record(self, member: PopulationMember, time: float, score: float) -> None:
        """Takes the result with which a trial comes to a perturbation. NaN is worse than every number."""
        self._unrank(member)
        member.score = -math.inf if math.isnan(score) else score
        insort(self._ranking, (member.score, member.index, member.trial_id))
        self._set_train_time(member, time)

    def lower(self) -> list[PopulationMember]:
        """The members of the lower quantile, worst first; none while fewer than two have a score."""
        return [self.members[trial_id] for _, _, trial_id in self._ranking[: self._quantile_size()]]

    def upper(self) -> list[PopulationMember]:
        """The members of the upper quantile, best last."""
        return [
            self.members[trial_id] for _, _, trial_id in self._ranking[len(self._ranking) - self._quantile_size() :]
        ]

    def is_lower(self, member: PopulationMember) -> bool:
        """Whether a member is in the lower quantile."""
        rank = self._rank(member)
        return rank is not None and rank < self._quantile_size()

    def is_upper(self, member: PopulationMember) -> bool:
        """Whether a member is in the upper quantile."""
        rank = self._rank(member)
        return rank is not None and rank >= len(self._ranking) - self._quantile_size()

    def drawn_from_upper(self, generator: random.Random) -> PopulationMember:
        """A member of the upper quantile, each as likely."""
        count = len(self._ranking)
        return self.members[self._ranking[generator.choice(range(count - self._quantile_size(), count))][2]]

    def _quantile_size(self) -> int:
        count = len(self._ranking)
        size = math.ceil(count * self._quantile_fraction)
        return count // 2 if size > count / 2 else size

    def _rank(self, member: PopulationMember) -> int | None:
        if member.score is None:
            return None
        return bisect_left(self._ranking, (member.score, member.index, member.trial_id))

    def take_over(self, member: PopulationMember, source: PopulationMember) -> None:
        """Notes that a trial goes on from where another is."""
        member.last_perturbation_time = source.last_perturbation_time
        self._set_train_time(member, source.last_train_time)

    def is_synced(self, member: PopulationMember) -> bool:
        """Whether a trial has come to the time at which the round ends."""
        return member.trial_id not in self._awaited

    def all_synced(self, but: str | None = None) -> bool:
        """Whether all have come to it, or all but one."""
        return not self._awaited or self._awaited == {but}

    def begin_round(self, interval: float) -> None:
        """Sets the next time to which all train."""
        longest = max((member.last_train_time for member in self.members.values()), default=0)
        self._round = max(self._round + interval, longest, self._longest_of_gone)
        self._awaited = {member.trial_id for member in self.members.values() if member.last_train_time < self._round}
        if not self._awaited:  # All have already trained beyond the next time: a result is longer than an interval.
            self._round = longest + interval
            self._awaited = set(self.members)

    def _set_train_time(self, member: PopulationMember, time: float) -> None:
        member.last_train_time = time
        if time < self._round:
            self._awaited.add(member.trial_id)
        else:
            self._awaited.discard(member.trial_id)

    def _unrank(self, member: PopulationMember) -> None:
        if (rank := self._rank(member)) is not None:
            del self._ranking[rank]

    def state(self) -> dict[str, Any]:
        """All members and the round, as JSON values."""
        members = [asdict(member) for member in self.members.values()]
        for member in members:
            member["score"] = None if member["score"] is None else number_to_json(member["score"])
        return {
            "members": members,
            "joined": self._joined,
            "round": self._round,
            "longest_of_gone": self._longest_of_gone,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        self.members, self._ranking, self._awaited = {}, [], set()
        self._joined, self._round = state["joined"], state["round"]
        self._longest_of_gone = state["longest_of_gone"]
        for saved in state["members"]:
            member = PopulationMember(**saved)
            member.checkpoint = None if saved["checkpoint"] is None else Checkpoint(**saved["checkpoint"])
            self.members[member.trial_id] = member
            if saved["score"] is not None:
                member.score = number_from_json(saved["score"])
                insort(self._ranking, (member.score, member.index, member.trial_id))
            self._set_train_time(member, member.last_train_time)
