"""Compares what an experiment left with what it must have: each result once, no trial lost, no failure too many."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from counterpoint.tune.runner.trial_files import STATE_FILE
from perf.chaos.disk import json_lines
from perf.chaos.report import Findings
from perf.chaos.tune.experiment import HEARD, MAX_FAILURES, NAME, STEPS, TRIALS

STOOD_STILL = "stood still"
LEFT = "processes left"
FAULTS = (
    "lost trials",
    "results counted twice",
    "results lost",
    "beyond max_failures",
    "search state wrong",
    LEFT,
    STOOD_STILL,
)
"""What must not be found."""


def audit(directory: Path, scheduler: str) -> Findings:
    """Returns what is wrong with the experiment in a directory, by kind of fault."""
    findings = Findings(FAULTS)
    found = findings.faults
    trials = json.loads((directory / NAME / STATE_FILE).read_text())["trials"]
    if len(trials) != TRIALS:
        found["lost trials"].append(f"there are {len(trials)} trials, expected {TRIALS}")
    heard: list[list[Any]] = json.loads((directory / HEARD).read_text())
    for trial in trials:
        _audit_trial(trial, scheduler, [each for trial_id, each in heard if trial_id == trial["trial_id"]], found)
    return findings


def _audit_trial(trial: dict[str, Any], scheduler: str, heard: list[Any], found: dict[str, list[str]]) -> None:
    name, failures = trial["trial_id"], trial["num_failures"]
    if trial["status"] not in ("TERMINATED", "ERROR"):
        found["lost trials"].append(f"{name} is {trial['status']}")
    if failures > MAX_FAILURES + 1 or (trial["status"] == "ERROR") != (failures == MAX_FAILURES + 1):
        found["beyond max_failures"].append(f"{name} is {trial['status']} after {failures} failures of {MAX_FAILURES}")
    lines = json_lines(Path(trial["logdir"]) / "result.json")
    if len(lines) != trial["num_results"]:
        found["results lost"].append(f"{name} has {len(lines)} lines, and counted {trial['num_results']}")
    iterations = [line["training_iteration"] for line in lines]
    if wrong := [line for line in lines if line["count"] != line["training_iteration"]]:
        found["results counted twice"].append(f"{name}: {wrong[0]} does not follow from its checkpoint")
    if scheduler != "pbt":  # which sets trials back on purpose
        if twice := [iteration for iteration, count in Counter(iterations).items() if count > 1]:
            found["results counted twice"].append(f"{name}: the iterations {twice} came more than once")
        if trial["status"] == "TERMINATED" and iterations != list(range(1, len(iterations) + 1)):
            found["results lost"].append(f"{name}: {iterations}")
        if trial["status"] == "TERMINATED" and scheduler == "fifo" and len(iterations) != STEPS:
            found["results lost"].append(f"{name} ended after {len(iterations)} of {STEPS}")
    told = [each for each in heard if isinstance(each, int)]
    ends = [each for each in heard if not isinstance(each, int)]
    by_itself = bool(lines) and lines[-1]["done"] and told != iterations
    # The last result of a trial that completes is told as its end.
    expected = iterations[:-1] if by_itself else iterations
    if told != expected:
        found["search state wrong"].append(f"{name}: heard {told}, expected {expected}")
    if ends != ["error" if trial["status"] == "ERROR" else "complete"]:
        found["search state wrong"].append(f"{name} is {trial['status']}, heard {ends}")
