"""TensorBoard's files, a folder for each run. A step is one record of a file: a kill leaves the whole step or nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.job.tracking.event_files import library, open_writer, read_scalars
from counterpoint.job.tracking.rows import Target
from counterpoint.job.tracking.sinks.remembering import RememberingSink


class TensorboardSink(RememberingSink):
    """Writes files. What the trainer trains again replaces what was there."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._directory = Path(target.options.get("directory") or target.directory)
        self._writers: dict[str, Any] = {}

    def kept(self, run_id: str) -> dict[int, dict[str, float]]:
        """See `RememberingSink`."""
        return read_scalars(self._directory / run_id)

    def put(self, run_id: str, values: dict[str, float], step: int, time: float) -> None:
        """See `RememberingSink`: one record of the file."""
        library()
        from tensorboardX.proto.summary_pb2 import Summary

        if run_id not in self._writers:
            self._writers[run_id] = open_writer(self._directory / run_id, self.last_step(run_id) + 1)
        items = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writers[run_id].file_writer.add_summary(Summary(value=items), step, time)

    def rewind(self, run_id: str, step: int) -> bool:
        """See `Sink`: the next file replaces the older ones from this step on."""
        if (writer := self._writers.pop(run_id, None)) is not None:
            writer.close()
        self._last[run_id] = step - 1
        self._evaluated[run_id] = {each for each in self._evaluated[run_id] if each[1] < step}
        return True

    def flush(self) -> None:
        """See `Sink`."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """See `Sink`."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
