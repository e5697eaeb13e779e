"""Weights & Biases: a run of W&B for each run, in the job's group; online, or as files for `wandb sync`.

W&B's steps cannot go back. What the trainer trains again after a resume keeps its first values there; the next new row has
`trained_again_from`. An evaluation's values go with the next row, beside the step that they are of, and into the summary at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.job.reading.redaction import whole_configuration
from counterpoint.job.tracking.rows import Evaluation, Row, Target
from counterpoint.job.tracking.sinks.wandb_files import last_offline_step


class WandbSink:
    """A `job.tracking.rows.Sink`."""

    def __init__(self, target: Target) -> None:
        import wandb

        self._wandb: Any = wandb
        self._target = target
        self._runs: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        self._with_next: dict[str, dict[str, float]] = {}

    def last_step(self, run_id: str) -> int:
        """See `Sink`: offline the files say it, online W&B does."""
        if run_id not in self._last:
            if self._target.options.get("mode") == "offline":
                self._last[run_id] = last_offline_step(self._directory, self._id(run_id))
            else:
                self._last[run_id] = int(self._run(run_id).step) - 1 if self._run(run_id).resumed else 0
        return self._last[run_id]

    def write(self, row: Row) -> None:
        """See `Sink`."""
        extra = self._with_next.pop(row.run_id, {})
        self._run(row.run_id).log(row.values | extra | {"_timestamp": row.time}, step=row.step, commit=True)
        self._last[row.run_id] = row.step

    def write_evaluation(self, result: Evaluation) -> None:
        """See `Sink`."""
        run, prefix = self._run(result.run_id), f"evaluation/{result.name}"
        run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
        values = result.values | {f"{prefix}/step": float(result.step)}
        self._with_next.setdefault(result.run_id, {}).update(values)
        run.summary.update(values)

    def rewind(self, run_id: str, step: int) -> bool:
        """See `Sink`."""
        extra = self._with_next.setdefault(run_id, {})
        extra["trained_again_from"] = min(extra.get("trained_again_from", float(step)), float(step))
        return False

    def flush(self) -> None:
        """See `Sink`: W&B's own process writes and sends; after a kill `last_step` says how far it came."""

    def close(self) -> None:
        """See `Sink`. Blocks until everything is sent."""
        for run in self._runs.values():
            run.finish()

    @property
    def _directory(self) -> Path:
        return self._target.directory

    def _id(self, run_id: str) -> str:
        return f"{self._target.identity}-{run_id}"

    def _run(self, run_id: str) -> Any:
        if run_id not in self._runs:
            options = self._target.options
            settings = self._wandb.Settings(
                console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, silent=True
            )
            self._runs[run_id] = self._wandb.init(
                project=options.get("project"),
                entity=options.get("entity"),
                mode=options.get("mode"),
                id=self._id(run_id),
                name=f"{self._target.group}.{run_id}",
                group=self._target.group,
                config=whole_configuration(self._target.job, run_id),
                dir=str(self._directory),
                resume="allow" if options.get("mode") != "offline" else None,
                reinit="create_new",
                settings=settings,
            )
        return self._runs[run_id]
