"""What every endpoint says of itself."""

from __future__ import annotations

from transport.telemetry.metric import Metric

DROPPED_SERIES = Metric(
    "counterpoint_telemetry_dropped_series",
    "gauge",
    "combinations of labels that were left out, since their metric had the most that it may have",
)
RESIDENT_MEMORY = Metric("counterpoint_resident_memory_bytes", "gauge", "resident memory of the process", "bytes")
OPEN_FILES = Metric("counterpoint_open_files", "gauge", "open file descriptors of the process")

METRICS = (DROPPED_SERIES, RESIDENT_MEMORY, OPEN_FILES)
