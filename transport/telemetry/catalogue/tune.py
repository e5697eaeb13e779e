"""The tuner, `counterpoint tune`: its trials, and what became of them."""

from __future__ import annotations

from transport.telemetry.metric import Metric, Process

TRIALS = Metric("counterpoint_tune_trials", "gauge", "trials by status", labels=("status",))
BEST = Metric("counterpoint_tune_best_score", "gauge", "best value of the metric that is compared", labels=("metric",))
RESULTS = Metric("counterpoint_tune_results", "counter", "results that trials have reported")
EVENTS = Metric(
    "counterpoint_tune_events",
    "counter",
    "what happened to trials: start, restore, save, complete (also when it is stopped early), recover, fail",
    labels=("event",),
)
ITERATIONS = Metric("counterpoint_tune_loop_iterations", "counter", "iterations of the tuner's loop")

TUNE = Process(
    "tune",
    "Tune",
    "`counterpoint tune`. Its port is `prometheus_port` of the experiment's file, its discovery file in the experiment's "
    "directory.",
    {"experiment": "its name"},
    (TRIALS, BEST, RESULTS, EVENTS, ITERATIONS),
)
