"""TensorBoard's files, a folder for each run. A new file says which steps of the older ones it replaces, so each counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.job.tracking.event_files import files_in, library, suffix
from counterpoint.job.tracking.rows import Evaluation, Sink, SinkSpec, TrackedRow


class TensorboardSink(Sink):
    """Writes files. What the trainer trains again replaces what was there."""

    def __init__(self, spec: SinkSpec, identity: str) -> None:
        library()
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self._writer: Any = event_file_writer.EventsWriter  # unlike `SummaryWriter` it has written what it has flushed
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2.Summary
        self._directory = Path(spec.options.get("directory") or spec.directory)
        self._writers: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        self._evaluated: set[tuple[str, str, int]] = set()

    def last_step(self, run_id: str, saved: int) -> int:
        """See `Sink`: its files may have been removed since."""
        self._last[run_id] = saved if files_in(self._directory / run_id) else 0
        return self._last[run_id]

    def write(self, row: TrackedRow) -> None:
        """See `Sink`."""
        self._put(row.run_id, row.values, row.step, row.time)
        self._last[row.run_id] = row.step

    def write_evaluation(self, result: Evaluation) -> None:
        """See `Sink`. One that this process has written is left out."""
        key = (result.run_id, result.name, result.step)
        if key not in self._evaluated:
            self._evaluated.add(key)
            self._put(result.run_id, result.values, result.step, result.time)

    def rewind(self, run_id: str, step: int) -> bool:
        """See `Sink`: the next file replaces the older ones from this step on."""
        if (writer := self._writers.pop(run_id, None)) is not None:
            writer.close()
        self._last[run_id] = step - 1
        self._evaluated = {each for each in self._evaluated if each[0] != run_id or each[2] < step}
        return True

    def flush(self) -> None:
        """See `Sink`."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """See `Sink`."""
        for writer in self._writers.values():
            writer.close()

    def _put(self, run_id: str, values: dict[str, float], step: int, time: float) -> None:
        """Adds one record: a kill leaves the whole of it or nothing."""
        if run_id not in self._writers:
            self._writers[run_id] = self._open(self._directory / run_id, self._last[run_id] + 1)
        made = self._summary
        summary = made(value=[made.Value(tag=name, simple_value=value) for name, value in values.items()])
        event = self._event.Event(wall_time=time, step=step, summary=summary)
        self._writers[run_id].write_event(event)

    def _open(self, folder: Path, first_step: int) -> Any:
        """Begins a file, which replaces older ones from `first_step` on."""
        folder.mkdir(parents=True, exist_ok=True)
        before = files_in(folder)
        writer = self._writer(str(folder / "events"), suffix(before))
        if before:
            started = self._event.SessionLog(status=self._event.SessionLog.START)
            writer.write_event(self._event.Event(step=first_step, session_log=started))
        return writer
