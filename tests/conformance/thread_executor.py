"""An executor that a user writes from the tuner document alone: each trial is a thread of this process, with a `step` function.

It knows of this project what the document names: `TrialExecutor` and its 24 methods.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.tune import Resources, Trial, TrialExecutor, TrialRunner

Step = Callable[[dict[str, Any], int], dict[str, Any]]


class ThreadExecutor(TrialExecutor):
    """Runs at most `places` trials at once. A trial's state is the number of its steps."""

    def __init__(self, step: Step, places: int = 2, queue_trials: bool = False) -> None:
        super().__init__(queue_trials)
        self.step, self.places = step, places
        self.running: dict[str, Trial] = {}
        self.steps: dict[str, int] = {}
        self.done: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.results: dict[str, Any] = {}
        self.calls: list[str] = []
        self.lost: list[Trial] = []
        self.threads: set[int] = set()

    def _called(self, what: str, trial: Trial | None = None) -> None:
        self.calls.append(what if trial is None else f"{what} {trial.trial_id}")
        self.threads.add(threading.get_ident())

    def has_resources(self, resources: Resources) -> bool:
        self.threads.add(threading.get_ident())
        return len(self.running) + int(resources.cpu) <= self.places

    def start_trial(self, trial: Trial, checkpoint: Any = None, train: bool = True) -> None:
        self._called("start", trial)
        self.running[trial.trial_id] = trial
        self.steps[trial.trial_id] = 0
        self.set_status(trial, Trial.RUNNING)
        if checkpoint is not None:
            self.restore(trial, checkpoint)
        if train:
            self.continue_training(trial)

    def continue_training(self, trial: Trial) -> None:
        self._called("continue", trial)
        threading.Thread(target=self._work, args=[trial], daemon=True).start()

    def _work(self, trial: Trial) -> None:
        self.steps[trial.trial_id] += 1
        try:
            made: Any = self.step(trial.config, self.steps[trial.trial_id])
        except Exception as error:  # noqa: BLE001 - whatever the step raises
            made = error
        self.done.put((trial.trial_id, made))

    def get_next_available_trial(self) -> Trial:
        self.threads.add(threading.get_ident())
        trial_id, made = self.done.get()
        self.results[trial_id] = made
        return self.running[trial_id]

    def get_next_failed_trial(self) -> Trial | None:
        return self.lost.pop() if self.lost else None

    def fetch_result(self, trial: Trial) -> dict[str, Any]:
        made = self.results.pop(trial.trial_id)
        if isinstance(made, Exception):
            raise made
        return {**made, "training_iteration": self.steps[trial.trial_id]}

    def stop_trial(
        self, trial: Trial, error: bool = False, error_msg: str | None = None, stop_logger: bool = True
    ) -> None:
        self._called("stop", trial)
        self.running.pop(trial.trial_id, None)
        self.set_status(trial, Trial.ERROR if error else Trial.TERMINATED)

    def save(self, trial: Trial, storage: str = "persistent", result: dict[str, Any] | None = None) -> str:
        self._called(f"save {storage}", trial)
        path = Path(trial.logdir) / f"mine-{self.steps[trial.trial_id]}.json"
        path.write_text(json.dumps(self.steps[trial.trial_id]))
        return str(path)

    def restore(self, trial: Trial, checkpoint: Any = None, block: bool = False) -> bool:
        self._called("restore", trial)
        source = checkpoint or trial.checkpoint
        assert source is not None
        self.steps[trial.trial_id] = json.loads(Path(source.path).read_text())
        return True

    def reset_trial(
        self, trial: Trial, new_config: dict[str, Any], new_experiment_tag: str, logger_creator: Any = None
    ) -> bool:
        self._called(f"reset {new_experiment_tag}", trial)
        return bool(new_config.get("in_place"))

    def export_trial_if_needed(self, trial: Trial) -> dict[str, str]:
        self._called("export", trial)
        return {each: str(Path(trial.logdir) / each) for each in trial.export_formats}

    def get_running_trials(self) -> list[Trial]:
        return list(self.running.values())

    def on_step_begin(self, trial_runner: Any) -> None:
        self.calls.append(f"step of {len(trial_runner.get_trials())}")

    def resource_string(self) -> str:
        return f"{len(self.running)}/{self.places} places"

    def cleanup(self, trial: Trial) -> None:  # type: ignore[override]  # as the document has it
        self._called("cleanup", trial)


def run(executor: TrialExecutor, directory: Path, trials: list[Trial], **arguments: Any) -> TrialRunner:
    """Runs trials to their ends."""
    runner = TrialRunner(trial_executor=executor, local_checkpoint_dir=directory, verbose=0, **arguments)
    for trial in trials:
        runner.add_trial(trial)
    try:
        while not runner.is_finished():
            runner.step()
    finally:
        runner.close()
    return runner
