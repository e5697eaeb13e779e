"""Weights & Biases: a run of W&B for each run, in the job's group; online, or as files for `wandb sync`.

W&B's steps cannot go back. What the trainer trains again after a resume keeps its first values there; the next new row has
`trained_again_from`. An evaluation's values go with the next row, beside the step that they are of, and into the summary at once.
"""

from __future__ import annotations

from typing import Any

from counterpoint.job.reading.redaction import whole_configuration
from counterpoint.job.tracking.rows import Evaluation, Sink, SinkSpec, TrackedRow
from counterpoint.job.tracking.sinks.wandb_files import last_offline_step


class WandbSink(Sink):
    """Gives the rows to W&B's own process, which writes and sends them; after a kill `last_step` says how far it came."""

    def __init__(self, spec: SinkSpec, identity: str) -> None:
        import wandb

        self._wandb: Any = wandb
        self._spec, self._identity = spec, identity
        self._runs: dict[str, Any] = {}
        self._with_next: dict[str, dict[str, float]] = {}

    def last_step(self, run_id: str, saved: int) -> int:
        """See `Sink`: offline the files say it, online W&B does."""
        if self._spec.options.get("mode") == "offline":
            return last_offline_step(self._spec.directory, self._id(run_id))
        run = self._run(run_id)
        return int(run.step) - 1 if run.resumed else 0

    def write(self, row: TrackedRow) -> None:
        """See `Sink`."""
        extra = self._with_next.pop(row.run_id, {})
        self._run(row.run_id).log(row.values | extra | {"_timestamp": row.time}, step=row.step, commit=True)

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

    def close(self) -> None:
        """See `Sink`. Blocks until everything is sent."""
        for run in self._runs.values():
            run.finish()

    def _id(self, run_id: str) -> str:
        return f"{self._identity}-{run_id}"

    def _run(self, run_id: str) -> Any:
        if run_id not in self._runs:
            options = self._spec.options
            settings = self._wandb.Settings(
                console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, silent=True
            )
            self._runs[run_id] = self._wandb.init(
                project=options.get("project"),
                entity=options.get("entity"),
                mode=options.get("mode"),
                id=self._id(run_id),
                name=f"{self._spec.group}.{run_id}",
                group=self._spec.group,
                config=whole_configuration(self._spec.job, run_id),
                dir=str(self._spec.directory),
                resume="allow" if options.get("mode") != "offline" else None,
                reinit="create_new",
                settings=settings,
            )
        return self._runs[run_id]
