"""Finds groups in a row that teach nothing, since they show no difference: a run may generate such groups for ever.

A notice says so after the first `rollouts_per_step` rollouts of a process, if none of their groups shows a difference, after
`GROUPS` of them later, and whenever their number has doubled. It has the commonest reason and advice, in the log and in a file
that console, page and `counterpoint status` read. Beside it are the records of three of the worst rollouts, for `counterpoint
show`: perhaps no step with such records ever ships. The next group with a difference removes both files. A run ends if its
first `schedule.give_up_after` groups show none.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from counterpoint.orchestrator.credit.equal_rewards import differ as rewards_differ
from counterpoint.orchestrator.step.filters import ZERO
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.printable import printable, shortened
from counterpoint.transport.records import Rollout

logger = logging.getLogger(__name__)

NOTICE_FILE = "no_difference.json"
"""The notice, in the run's directory, as long as it is true."""

MOST_NOTICE_BYTES, LONGEST_TEXT = 2**14, 1000
"""The size of a notice that a reader accepts, and the characters of each of its texts."""

EXAMPLES_FILE = "no_difference.jsonl"
"""Records of the worst rollouts, as in `rollouts.jsonl`."""

GROUPS = 64
"""Groups without a difference in a row before a notice."""

FIRST_GROUPS = 4
"""The least number of groups before the first notice of a process, if none showed a difference yet, however small a batch
is."""

EXAMPLES = 3

EXAMINED_GROUPS = 8
"""The newest groups before a notice, which keeps the worst of their rollouts."""

GIVE_UP_SECONDS = 60.0
"""Seconds without a difference before which a run does not give up: fast groups are many before anybody has looked."""

CUT_SHARE = 0.5
"""The share of completions cut by `max_tokens` from which on the reason names the cut."""

_MAX_REASONS = 256
"""Reasons that are counted apart."""

_ONE_COMPLETED = "one rollout completed and the others failed"

_ADVICE = (
    "if these answers are wrong, take easier examples or check the reward (`counterpoint env check`); if they are right, take "
    "harder ones; a larger schedule.group_size or sampling.temperature makes differences likelier"
)


class NothingLearnedError(Exception):
    """The run's first groups show no difference to learn from (`schedule.give_up_after`)."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice about the groups without a difference."""

    groups: int
    """Their number in a row."""
    reason: str
    """The commonest one, for a person."""
    advice: str
    """Advice, for a person."""
    since: float
    """The time when the first of them was finalized, in Unix seconds."""

    def __str__(self) -> str:
        return f"the last {self.groups} groups show no difference to learn from: {self.reason}"


def show_command(output_dir: Path, run_id: str) -> str:
    """Returns the command that shows the worst rollouts."""
    return shlex.join(["counterpoint", "show", str(output_dir), "--run", run_id, "--no-difference"])


def compared(config: RunConfig) -> Literal["group", "run"] | None:
    """Returns the rollouts among which rewards must differ for the run to learn, or None if there is another signal."""
    if config.training.loss.kind == "distillation":
        return None
    over_steps = config.training.value_head is not None or config.advantage.kind == "batch_standardised"
    return "run" if over_steps else "group"


class Differences:
    """Counts groups without a difference. Pure but for the clock."""

    def __init__(self, clock: Callable[[], float] = time.time, first: int = GROUPS) -> None:
        """`first`: the groups of one batch. A run that has shown no difference after them gets a notice."""
        self._clock = clock
        self._has_differed = False
        self._begin(min(GROUPS, max(FIRST_GROUPS, first)))

    def _begin(self, due: int = GROUPS) -> None:
        self.groups = 0
        self.notice: Notice | None = None
        self.worst: list[Rollout] = []
        """The rollouts with the lowest rewards of the newest groups, of different examples, the newest among equals."""
        self._since = 0.0
        self._due = due
        self._learned_from: tuple[object, ...] | None = None
        """The key of the rollouts with which the newest completed one is compared, if those are of other groups."""
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._completions = self._cut = 0

    def add(self, rollouts: Sequence[Rollout], among: Literal["group", "run"]) -> bool:
        """Counts a finalized group with its failed rollouts. Returns whether `notice` is a new one, or has become None."""
        completed = [rollout for rollout in rollouts if rollout.error is None and rollout.reward is not None]
        if not completed:
            return False  # that is a failure, and is reported as one
        differ = self._differ(completed, among)
        if differ and not all(rollout.filtered_by for rollout in completed):
            was_noticed = self.notice is not None
            self._has_differed = True
            self._begin()
            self._learned_from = _learned_from(completed[-1])
            return was_noticed
        self._since = self._since or self._clock()
        self.groups += 1
        self._count(completed, len(rollouts), among, differ)
        if self.groups < self._due:
            return False
        self._due = max(GROUPS, 2 * self._due)
        self.notice = self._noticed()
        return True

    def last_notice(self, after: int) -> Notice | None:
        """Returns the notice that ends a run without a difference in `after` first groups and its first minute. 0 is never."""
        if self._has_differed or not 0 < after <= self.groups or self._clock() - self._since < GIVE_UP_SECONDS:
            return None
        return self._noticed()

    def take_worst(self) -> list[Rollout]:
        """Returns the worst rollouts and forgets them: they hold memory."""
        worst, self.worst = self.worst, []
        return worst

    def _differ(self, completed: Sequence[Rollout], among: Literal["group", "run"]) -> bool:
        if among == "group":
            return any(abs(rollout.advantage) > ZERO for rollout in completed)
        before = self._learned_from or _learned_from(completed[0])
        self._learned_from = _learned_from(completed[-1])
        return any(_learned_from(rollout) != before for rollout in completed)

    def _count(self, completed: Sequence[Rollout], size: int, among: Literal["group", "run"], differ: bool) -> None:
        rewards = [_reward_of(rollout) for rollout in completed]
        if len(completed) == 1 < size and among == "group":
            reason = _ONE_COMPLETED
        elif not rewards_differ(rewards):
            reason = f"each rollout has the reward {rewards[0]:.3g}"
        elif differ:
            reason = (
                f"the filters caught each rollout ({', '.join(sorted({str(each.filtered_by) for each in completed}))})"
            )
        else:
            reason = "the advantage function gave each rollout 0"
        key = reason, completed[0].environment
        if key in self._reasons or len(self._reasons) < _MAX_REASONS:
            self._reasons[key] += 1
        ends = [rollout.turns[-1].finish_reason for rollout in completed if rollout.turns]
        self._completions += len(ends)
        self._cut += ends.count("length")
        if self.groups > self._due - EXAMINED_GROUPS:
            self._keep_worst(min(reversed(completed), key=_reward_of))

    def _keep_worst(self, rollout: Rollout) -> None:
        others = [each for each in self.worst if _example_of(each) != _example_of(rollout)]
        same = [each for each in self.worst if _example_of(each) == _example_of(rollout)]
        self.worst = sorted([min([rollout, *same], key=_reward_of), *others], key=_reward_of)[:EXAMPLES]

    def _noticed(self) -> Notice:
        (reason, environment), count = self._reasons.most_common(1)[0]
        advice = "see why they fail: `counterpoint status`" if reason == _ONE_COMPLETED else _ADVICE
        words = f"in {count} of them {reason} (environment {environment})"
        if self._completions and self._cut >= CUT_SHARE * self._completions:
            words += f"; max_tokens cut {self._cut / self._completions:.0%} of the completions"
            advice = f"raise sampling.max_tokens; {advice}"
        return Notice(self.groups, words, advice, self._since)


class DifferenceWatch:
    """Logs and writes the notices of one run.

    `record` encodes a rollout as a line, and blocks. `in_background` runs a blocking call in a thread.
    """

    def __init__(
        self,
        config: RunConfig,
        record: Callable[[Rollout], bytes],
        in_background: Callable[[Callable[[], None]], object],
    ) -> None:
        self._run_dir, self._command = config.run_dir, show_command(config.output_dir, config.run_id)
        self._record = record
        self._in_background = in_background
        self._differences = Differences(first=-(-config.schedule.rollouts_per_step // config.schedule.group_size))
        self._due: tuple[Notice | None, Sequence[Rollout]] | None = None
        """The notice and the rollouts to write."""
        self._lock = threading.Lock()
        """Held while a thread writes, so that the newest notice is written last."""

    def group_finalized(self, config: RunConfig, rollouts: Sequence[Rollout], *, may_give_up: bool) -> str | None:
        """Takes up a group that was finalized by this configuration. Returns why the run gives up, for a person, or None."""
        among = compared(config)
        if among is None:
            return None
        if self._differences.add(rollouts, among):
            self._due = self._differences.notice, self._differences.take_worst()
            if self._differences.notice is not None:
                logger.warning("%s", self._in_words(self._differences.notice))
            self._in_background(self._write)
        after = config.schedule.give_up_after
        if not may_give_up or (last := self._differences.last_notice(after)) is None:
            return None
        return f"the run learns nothing, and ends as schedule.give_up_after = {after} says: {self._in_words(last)}"

    def _in_words(self, notice: Notice) -> str:
        return f"{notice}. What to do: {notice.advice}. Three of the worst: {self._command}"

    def _write(self) -> None:
        """Makes the files agree with the newest notice. A failure is only logged. Blocks."""
        with self._lock:
            due, self._due = self._due, None
            if due is None:
                return  # a thread that came later was faster
            notice, worst = due
            try:
                if notice is None:
                    forget(self._run_dir)
                else:
                    write_atomically(self._run_dir / EXAMPLES_FILE, b"".join(map(self._record, worst)))
                    write_atomically(self._run_dir / NOTICE_FILE, orjson.dumps(asdict(notice)))
            except OSError as error:
                logger.warning("%s cannot be written and is out of date: %s", self._run_dir / NOTICE_FILE, error)


def forget(run_dir: Path) -> None:
    """Removes the notice of a run. Raises `OSError`."""
    for name in (NOTICE_FILE, EXAMPLES_FILE):
        (run_dir / name).unlink(missing_ok=True)


def _learned_from(rollout: Rollout) -> tuple[object, ...]:
    """The advantage has the penalties for length, and players of a game may differ though their mean does not."""
    of_turns = None if rollout.turn_rewards is None else rollout.turn_rewards.tolist()
    return rollout.reward, rollout.player_rewards, rollout.advantage, of_turns


def _reward_of(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward


def _example_of(rollout: Rollout) -> tuple[str, int]:
    return rollout.environment, rollout.example_index


def read_notice(run_dir: Path) -> Notice | None:
    """Returns the notice, which a guest may have written, or None without a usable one. Raises `OSError`."""
    try:
        values = read_json(run_dir / NOTICE_FILE, MOST_NOTICE_BYTES)
    except (FileNotFoundError, UntrustedFileError):
        return None
    groups, since = values.get("groups"), values.get("since")
    texts = values.get("reason"), values.get("advice")
    if type(groups) is not int or not 0 < groups < 2**53 or not isinstance(since, int | float) or not 0 <= since < 1e12:
        return None
    reason, advice = (shortened(printable(text), LONGEST_TEXT) if isinstance(text, str) else "" for text in texts)
    return Notice(groups, reason, advice, float(since))
