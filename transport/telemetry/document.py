"""Writes `docs/metrics.md` from the catalogue: `python -m transport.telemetry.document`. A test fails while the file is stale."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transport.telemetry.catalogue.all import EVERYWHERE, PROCESSES
from transport.telemetry.metric import LineName, Metric, Process

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

Every number that a process writes to its `metrics.jsonl` or shows to Prometheus. This page is generated from
`transport/telemetry/catalogue/` by `python -m transport.telemetry.document`: change the tables there.

## Names

The same number has two names. In `metrics.jsonl` it is `area/name`; these names stay as they are. For Prometheus it follows
OpenMetrics: the prefix `counterpoint_`, the base unit at the end (`_seconds`, `_bytes`, `_ratio`), `_total` for a counter, and
labels instead of names within names. Earlier versions turned each name of the line into a gauge of its own
(`counterpoint_event_loop_lag_p99`, `counterpoint_phase_merge`); those names are gone.

| in `metrics.jsonl` | for Prometheus |
|---|---|
| a state at the step's end, or a mean over the step | a gauge with the value of the newest step |
| a count since the step before | a counter since the process's start |
| a time | a histogram since the process's start, or a gauge where only the newest counts |

## Endpoints

Each process serves `http://127.0.0.1:PORT/metrics`, in OpenMetrics or in the older text format, as the client asks. It answers
nobody who calls it by the name of a host, as a web page of another site would (DNS rebinding): use `127.0.0.1`, `localhost`, or
another address that leads here. In a container, whose loopback Prometheus does not reach, set `prometheus_host = "0.0.0.0"`
(at the top of a job's file, or in a lone role's): any name will do then. Whoever reaches the port can read the metrics, so keep
it within a network of yours. The key `prometheus_port` of each process is 0 by default: a free port, which its log names. A
port that is in use is an error. Several runs, jobs or workers on a machine cannot share one: leave it at 0.

**Finding the ports.** While a process serves, `prometheus/<process>.json` in the job's directory (an experiment's for the tuner)
says where, in the format of Prometheus's file-based service discovery. A process that was killed leaves its file, and Prometheus
shows it as down until it is started again.

```yaml
scrape_configs:
  - job_name: counterpoint
    file_sd_configs:
      - files: ["/path/to/job/prometheus/*.json"]
        refresh_interval: 15s
```

The file adds the labels `counterpoint_job`, the name of the job's directory, and `process`. `deploy/prometheus/` has a complete
example and alert rules, `deploy/grafana/` a dashboard. vLLM serves its own metrics at the servers' ports.

**Cost.** Values are written without a lock; a thread of the scrape copies and formats them, and no scrape makes an event loop
wait for it. The number of series is bounded: names that environments choose are cut to 128 characters, and each metric has at
most as many combinations of labels as the table says. Further ones of a counter are added up as `other`, those of a gauge are
left out. `counterpoint_telemetry_dropped_series` counts both.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [INTRODUCTION, "## Every process\n", _metrics_table(EVERYWHERE)]
    for process in PROCESSES:
        parts += [f"## {process.title}\n", _about(process), _metrics_table(process.metrics)]
        if process.lines:
            parts += [f"### `{process.line_file}`\n", "One JSON object a line.\n", _lines_table(process.lines)]
    return "\n".join(parts)


def _about(process: Process) -> str:
    labels = "; ".join(f"`{label}`, {meaning}" for label, meaning in process.labels.items())
    return f"{process.about} All its metrics have the labels: {labels}.\n" if labels else f"{process.about}\n"


def _metrics_table(metrics: Iterable[Metric]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        bound = f" (at most {metric.most_series} series)" if metric.labels else ""
        rows.append(f"| `{metric.full_name}` | {metric.kind} | {labels}{bound} | {_cell(metric.help)} |")
    return "\n".join(rows) + "\n"


def _lines_table(lines: Iterable[LineName]) -> str:
    rows = ["| name | meaning | for Prometheus |", "|---|---|---|"]
    rows += [f"| `{line.pattern}` | {_cell(line.help)} | {_shown_as(line)} |" for line in lines]
    return "\n".join(rows) + "\n"


def _shown_as(line: LineName) -> str:
    if line.metric is None:
        return ""
    labels = ",".join(f'{label}="{value}"' for label, value in line.labels.items())
    return f"`{line.metric.full_name}{{{labels}}}`" if labels else f"`{line.metric.full_name}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
