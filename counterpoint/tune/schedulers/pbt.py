"""Population based training: trials that are behind take over the state of those that are ahead, with a changed configuration.

Jaderberg et al., Population Based Training of Neural Networks (https://arxiv.org/abs/1711.09846). A result between two
perturbations costs O(1), one at a perturbation O(log n): its place in a sorted ranking. In synchronous mode the one that ends a
round costs O(n log n), for all n trials.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.json_values import as_json
from counterpoint.tune.registry import load
from counterpoint.tune.result import Result
from counterpoint.tune.schedulers.explore import Mutations, check_mutations, completed, explore
from counterpoint.tune.schedulers.metric_scheduler import MetricScheduler, draws_from_json, draws_to_json
from counterpoint.tune.schedulers.population import Population, PopulationMember
from counterpoint.tune.schedulers.scheduler import Trials
from counterpoint.tune.search.variants import copied, format_vars
from counterpoint.tune.trial import Trial


class PopulationBasedTraining(MetricScheduler):
    """Copies the upper quantile of the population over the lower one, every `perturbation_interval`.

    All trials are the population. A trial in the upper quantile is saved; one in the lower takes over the checkpoint and the
    configuration of one of the upper, drawn at random, and explores from there (`hyperparam_mutations`, then
    `custom_explore_fn`). By default each trial is compared by itself when it has trained for the interval; with `synch` all wait
    for each other. If there are more trials than fit, they take turns.
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        burn_in_period: float = 0.0,
        hyperparam_mutations: Mutations | None = None,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        perturbation_factors: Sequence[float] = (1.2, 0.8),
        custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | str | None = None,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        self._mutations = hyperparam_mutations or {}
        check_mutations(self._mutations)
        self.require(
            bool(self._mutations or custom_explore_fn), "expected hyperparam_mutations or custom_explore_fn, or both"
        )
        self.require(0 <= quantile_fraction <= 0.5, f"quantile_fraction is {quantile_fraction}; expected 0 to 0.5")
        self.require(
            perturbation_interval > 0, f"perturbation_interval is {perturbation_interval}; expected more than 0"
        )
        self.require(
            len(perturbation_factors) > 0 and all(0 < factor < math.inf for factor in perturbation_factors),
            f"perturbation_factors is {perturbation_factors!r}; expected one or more numbers above 0",
        )
        self._interval = perturbation_interval
        self._burn_in_period = burn_in_period
        self._resample_probability = resample_probability
        self._factors = tuple(perturbation_factors)
        self._custom_explore = load(custom_explore_fn) if isinstance(custom_explore_fn, str) else custom_explore_fn
        self._log_config = log_config
        self._require_attrs = require_attrs
        self._synch = synch
        self._random = random.Random(seed)
        self._population = Population(quantile_fraction, max(perturbation_interval, burn_in_period))
        self._policy = Policy()
        self._num_checkpoints = 0
        self._num_perturbations = 0

    def callbacks(self) -> Sequence[Callback]:
        """What writes the policy files, with `log_config`."""
        return (PolicyLog(self._policy),) if self._log_config else ()

    def needs_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Whether it is the one that the lower quantile may take over."""
        member = self._population.members.get(checkpoint.trial_id)
        return member is not None and member.checkpoint is not None and member.checkpoint.path == checkpoint.path

    def on_save_failed(self, trials: Trials, checkpoint: Checkpoint) -> None:
        """Nobody can take over what was not saved."""
        if self.needs_checkpoint(checkpoint):
            self._population.members[checkpoint.trial_id].checkpoint = None

    def on_trial_add(self, trials: Trials, trial: Trial) -> None:
        """Draws what the configuration lacks of the keys that are mutated."""
        super().on_trial_add(trials, trial)
        self._population.add(trial.trial_id, trial.experiment_tag or trial.trial_id)
        for key, value in completed(trial.config, self._mutations, self._random).items():
            trial.config[key] = trial.evaluated_params[key] = as_json(value, f"hyperparam_mutations/{key}")

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        """Compares the trial if it has trained for an interval."""
        observed = self.observed(result)
        if observed is None:
            return self._incomplete(trial, result)
        time, score = observed
        member = self._population.members[trial.trial_id]
        if time < self._burn_in_period or time - member.last_perturbation_time < self._interval:
            return self.CONTINUE
        self._population.record(member, time, score)
        if not self._synch:
            return self._perturb_one(trials, trial, member, result)
        if self._population.all_synced(trial.trial_id):
            self._perturb_all(trials, time)
        return self.PAUSE

    def _incomplete(self, trial: Trial, result: Result) -> str:
        if self._require_attrs:
            raise TuneError(
                f"{self.name}: a result of {trial} lacks a number {self.time_attr!r} or {self.metric!r}; it has "
                f"{sorted(result)}. Report both each time, or pass require_attrs=False"
            )
        return self.CONTINUE

    def _perturb_one(self, trials: Trials, trial: Trial, member: PopulationMember, result: Result) -> str:
        member.last_perturbation_time = member.last_train_time
        others_wait = trials.with_status(Trial.PENDING) or trials.with_status(Trial.PAUSED)
        exploits = self._save_or_exploit(trials, member, result)
        if others_wait:
            return self.PAUSE
        return self.NOOP if exploits else self.CONTINUE

    def _perturb_all(self, trials: Trials, time: float) -> None:
        """Saves first, then copies: the trials of a round that are ahead come before those that are behind."""
        population = self._population
        lower, upper = population.lower(), population.upper()
        ends = {member.trial_id for member in (*lower, *upper)}
        for member in [*upper, *(each for each in population.members.values() if each.trial_id not in ends), *lower]:
            member.last_perturbation_time = time
            self._save_or_exploit(trials, member, trials.get_trial(member.trial_id).last_result)
        population.begin_round(self._interval)

    def _save_or_exploit(self, trials: Trials, member: PopulationMember, result: Result) -> bool:
        """Saves a trial of the upper quantile; makes one of the lower take over. Returns whether it did the latter."""
        trial = trials.get_trial(member.trial_id)
        member.checkpoint = None
        if self._population.is_upper(member):
            member.checkpoint = trials.save_trial(trial, result)
            self._num_checkpoints += 1
        if not self._population.is_lower(member):
            return False
        source = self._population.drawn_from_upper(self._random)
        if source.checkpoint is None:  # It was not in the upper quantile when it was compared.
            return False
        self._exploit(trials, trial, member, source, source.checkpoint)
        return True

    def _exploit(
        self, trials: Trials, trial: Trial, member: PopulationMember, source: PopulationMember, checkpoint: Checkpoint
    ) -> None:
        old_config = trials.get_trial(source.trial_id).config
        config = as_json(self._explored(old_config, member, source), "explored config")
        tagged = format_vars({("config", key): config.get(key) for key in self._mutations})
        if self._log_config:
            iteration = int(trial.last_result.get("training_iteration", 0))
            row = [member.tag, source.tag, iteration, checkpoint.iteration, copied(old_config), copied(config)]
            self._policy.add(member.trial_id, source.trial_id, row)
        trials.exploit(trial, checkpoint, config, f"{member.tag}@perturbed[{tagged}]")
        self._num_perturbations += 1
        self._population.take_over(member, source)

    def _explored(self, config: dict[str, Any], member: PopulationMember, source: PopulationMember) -> dict[str, Any]:
        """The configuration that a member takes over from a source, changed."""
        changed = explore(config, self._mutations, self._resample_probability, self._factors, self._random)
        return self._custom(changed)

    def _custom(self, changed: dict[str, Any]) -> dict[str, Any]:
        if self._custom_explore is None:
            return changed
        custom = self._custom_explore(changed)
        if not isinstance(custom, dict):
            raise TuneError(f"{self.name}: custom_explore_fn returned {custom!r}; expected the changed configuration")
        return custom

    def on_trial_complete(self, trials: Trials, trial: Trial, result: Result) -> None:
        """Does as for a trial that is removed."""
        self.on_trial_remove(trials, trial)

    def on_trial_remove(self, trials: Trials, trial: Trial) -> None:
        """Takes the trial out of the population; in synchronous mode the others may have waited only for it."""
        population = self._population
        was_awaited = population.remove(trial.trial_id)
        if self._synch and was_awaited and population.members and population.all_synced():
            self._perturb_all(trials, max(member.last_train_time for member in population.members.values()))

    def choose_trial_to_run(self, trials: Trials) -> Trial | None:
        """Returns the waiting trial that has trained least; in synchronous mode only among those that a round waits for."""
        waiting = [*trials.with_status(Trial.PENDING), *trials.with_status(Trial.PAUSED)]
        members = [self._population.members[trial.trial_id] for trial in waiting]
        if self._synch:
            members = [member for member in members if not self._population.is_synced(member)]
        members.sort(key=lambda member: (member.last_train_time, member.index))
        candidates = (trials.get_trial(member.trial_id) for member in members)
        return next((trial for trial in candidates if trials.has_resources_for_trial(trial)), None)

    def debug_string(self) -> str:
        """How often it saved and copied."""
        return f"{self.name}: {self._num_checkpoints} checkpoints, {self._num_perturbations} perturbations"

    def state(self) -> dict[str, Any]:
        """Population, policies and draws."""
        return {
            "population": self._population.state(),
            "policy": self._policy.state(),
            "random": draws_to_json(self._random),
            "num_checkpoints": self._num_checkpoints,
            "num_perturbations": self._num_perturbations,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""
        self._population.restore_state(state["population"])
        self._policy.restore_state(state["policy"])
        draws_from_json(self._random, state["random"])
        self._num_checkpoints, self._num_perturbations = state["num_checkpoints"], state["num_perturbations"]


Row = list[Any]


class Policy:
    """All rows in their order, and for each trial those that led to its present configuration, through all that it took over."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._rows_of: dict[str, list[int]] = {}
        self._changed: set[str] = set()

    def add(self, trial_id: str, source_id: str, row: Row) -> None:
        """Notes that a trial took over a source: its history is the source's from now on, and then this row."""
        self._rows_of[trial_id] = [*self._rows_of.get(source_id, ()), len(self.rows)]
        self.rows.append(row)
        self._changed.add(trial_id)

    def rows_of(self, trial_id: str) -> list[Row]:
        """The rows of one trial, oldest first."""
        return [self.rows[index] for index in self._rows_of.get(trial_id, ())]

    def take_changed(self) -> set[str]:
        """The trials whose rows have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def state(self) -> dict[str, Any]:
        """All rows, as JSON values."""
        return {"rows": list(self.rows), "rows_of": {name: list(indices) for name, indices in self._rows_of.items()}}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned; all files are written once more, since the last may be missing."""
        self.rows = list(state["rows"])
        self._rows_of = {name: list(indices) for name, indices in state["rows_of"].items()}
        self._changed = set(self._rows_of)


class PolicyLog(Callback):
    """Writes the policy's files into the experiment's directory at the end of each step in which it has changed.

    The files are as Ray's: `pbt_policy_ID.txt` for each trial and `pbt_global.txt`, with a JSON list a line: the tags of the
    trial and of its source, the iterations of both, the source's configuration, and the new one. They follow from the
    scheduler's state, so that a resume restores them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Writes what has changed."""
        self._write(trials)

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Writes what has changed."""
        self._write(trials)

    def _write(self, trials: Sequence[Trial]) -> None:
        changed = self._policy.take_changed()
        directory = ""
        for trial in trials if changed else ():
            if trial.trial_id in changed:
                directory = trial.local_dir
                _write_rows(Path(directory) / f"pbt_policy_{trial.trial_id}.txt", self._policy.rows_of(trial.trial_id))
        if directory:
            _write_rows(Path(directory) / "pbt_global.txt", self._policy.rows)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
