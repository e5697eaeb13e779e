"""What a run has kept of its steps, from which a branch can go on: checkpoints of both roles, and batches between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterpoint.job.admin.ask import run_directory
from counterpoint.job.directory import written_config
from counterpoint.run.batch_files import batch_file
from counterpoint.trainer.taken_over import copied_steps, durable_directories, leading_to
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps


class StepNotKept(UserError):
    """The run has no longer, or not yet, what is needed to go on from that step."""

    code = 3


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """What a run has kept."""

    run_id: str
    committed: list[int]
    """The steps of the orchestrator's checkpoints, ascending."""
    trained: dict[int, Path]
    """The trainer's checkpoints by step, ascending."""
    batches: dict[int, Path]
    """The recorded batches by step that the trainer has trained: not those at which it copied another run."""
    can_begin_anew: bool
    """Whether a run with the same configuration begins with the same weights."""

    def starts(self, step: int) -> list[int]:
        """Returns the steps of the trainer's checkpoints from which the recorded batches lead up to `step`, ascending.

        0 is the run's beginning, of which there is none.
        """
        return leading_to(step, [*([0] if self.can_begin_anew else []), *self.trained], self.batches)

    @property
    def steps(self) -> list[int]:
        """The steps that a branch can go on from, ascending."""
        return [step for step in self.committed if self.starts(step)]

    def check(self, step: int | None) -> int:
        """Returns the step, or the newest one for None. Raises `StepNotKept`."""
        if self.steps and step in (None, *self.steps):
            return self.steps[-1] if step is None else step
        asked = f"no step of run {self.run_id} is" if step is None else f"step {step} of run {self.run_id} was not"
        if self.steps:
            raise StepNotKept(f"{asked} kept: it can go on from {_listed(self.steps)}; training.keep_every keeps more")
        raise StepNotKept(
            f"{asked} kept: its orchestrator has checkpoints of steps {_listed(self.committed)}, its trainer of "
            f"{_listed([*self.trained])}, and no batches lead from one of these to one of those; training.keep_every keeps both"
        )


def kept_of(job: Path, run_id: str) -> KeptSteps:
    """Returns what a run has kept. Raises `NotThere`, and `UserError` for metrics of the trainer that are no regular file."""
    run_dir = run_directory(job, run_id)
    rollouts = run_dir / "rollouts"
    copied = copied_steps(job, run_id)
    batches = {step: batch_file(rollouts / f"step_{step}") for step in published_steps(rollouts) if step not in copied}
    training = written_config(job, run_id).get("training", {})
    tables = [training, training.get("lora")] if isinstance(training, dict) else []
    # What these begin with may be another state by now.
    names = {name for table in tables if isinstance(table, dict) for name, value in table.items() if value is not None}
    return KeptSteps(
        run_id,
        published_steps(run_dir / "checkpoints"),
        durable_directories(job, run_id),
        {step: path for step, path in batches.items() if path.is_file()},
        names.isdisjoint({"start_from", "value_head"}),
    )


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
