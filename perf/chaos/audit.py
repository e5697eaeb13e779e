"""Checks that a job whose processes were killed trained every step exactly once, from its directory after its end.

`audit` compares, for each run, the committed steps, the records of their rollouts, the batches that the witness copied
(`perf/chaos/witness.py`), both metrics files, the trainer's checkpoint, its optimizer and the published weights. It uses
no reader of the product, and trusts none of the files. `verify_runs` has the product's own checker judge the same runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from counterpoint.verify.report import SOUND
from counterpoint.verify.run import verify
from perf.chaos.disk import BatchRecord, digest, json_lines, published, read_batch, run_ids
from perf.chaos.report import Findings
from perf.chaos.witness import COMMITTED, TRAINED, Witness

MISSING = "steps missing, or there twice, in one of the records"
UNTRAINED = "committed steps that were not trained, or trained and not committed"
PROGRESS = "trainer's counts other than the batches' sums"
OPTIMIZER = "optimizers with other than one update a step"
GROUPS = "groups or rollouts shipped twice"
CHANGED = "committed steps that changed afterwards"
OTHERWISE = "steps trained from something else than their batch"
WEIGHTS = "published weights that are not those of the last steps"
UNSEEN = "committed steps that the witness has not seen whole"
ACCUSED = "runs that `counterpoint verify` does not call sound, or that have not a receipt for each step"

FAULTS = (MISSING, UNTRAINED, PROGRESS, OPTIMIZER, GROUPS, CHANGED, OTHERWISE, WEIGHTS, UNSEEN, ACCUSED)
"""Every kind of fault."""

SAME_LOSS = 1e-4
"""Relative. A step that is trained again may share its rows with other runs, so its loss differs by the order of sums."""


def audit(job: Path, notes: Path) -> Findings:
    """Audits a job that has ended, with every committed step trained, and its witness's notes."""
    findings = Findings(FAULTS)
    for run_id in run_ids(job):
        _Audit(job, notes, run_id, findings).make()
        findings.counts["runs"] += 1
    return findings


def verify_runs(job: Path, findings: Findings) -> None:
    """Verifies each run of a job that has ended by its receipts: the checker must accuse none."""
    for run_id in run_ids(job):
        run_dir = job / f"run_{run_id}"
        verdict = verify(run_dir)
        if verdict.code != SOUND or verdict.steps != max(published(run_dir / "checkpoints"), default=0):
            findings.faults[ACCUSED].append(verdict.text())
        findings.counts["runs verified"] += 1


class _Audit:
    """The audit of one run."""

    def __init__(self, job: Path, notes: Path, run_id: str, findings: Findings) -> None:
        self._job = job
        self._run = job / f"run_{run_id}"
        self._run_id = run_id
        self._findings = findings
        self._seen = {line["step"]: line for line in json_lines(notes / COMMITTED) if line["run_id"] == run_id}
        self._lives = [line for line in json_lines(notes / TRAINED) if line["run_id"] == run_id]
        trained = json_lines(job / "trainer" / "metrics.jsonl")
        self._trained = [line for line in trained if line["run_id"] == run_id]
        self._last = max(published(self._run / "checkpoints"), default=0)
        self._batches: dict[int, BatchRecord] = {}
        for step in range(1, self._last + 1):
            if (copy := Witness.copy_of(notes, run_id, step)).exists():
                self._batches[step] = read_batch(copy)

    def make(self) -> None:
        self._findings.counts["steps committed"] += self._last
        self._findings.counts["steps trained"] += len(self._trained)
        self._every_step_once()
        self._trainer_agrees()
        self._nothing_shipped_twice()
        self._nothing_changed()
        self._trained_from_its_batch()
        self._weights()

    def _fault(self, fault: str, words: str) -> None:
        self._findings.faults[fault].append(f"run {self._run_id}: {words}")

    def _every_step_once(self) -> None:
        wanted = list(range(1, self._last + 1))
        own = [line["step"] for line in json_lines(self._run / "metrics.jsonl")]
        for name, steps in (
            ("trainer/metrics.jsonl", [line["step"] for line in self._trained]),
            ("metrics.jsonl", own),
            ("rollouts/", published(self._run / "rollouts")),
        ):
            if steps != wanted:
                self._fault(MISSING, f"{name}: {_difference(steps, wanted)}")
        for step in wanted:
            if step not in self._batches or step not in self._seen:
                self._fault(UNSEEN, f"step {step}")

    def _trainer_agrees(self) -> None:
        parent = self._job / "trainer" / self._run_id / "checkpoints"
        newest = max(published(parent), default=0)
        if newest != self._last:
            self._fault(
                UNTRAINED, f"the trainer's newest checkpoint is of step {newest}, the last commit of {self._last}"
            )
        if newest == 0:
            return
        progress = json.loads((parent / f"step_{newest}" / "state.json").read_text())["progress"]
        covered = [batch for step, batch in self._batches.items() if step <= newest]
        wanted = {
            "step": newest,
            "total_tokens": sum(batch.tokens for batch in covered),
            "total_samples": sum(len(batch.rollout_ids) for batch in covered),
            "schedule_offset": 0,  # no run of the job is another's copy
        }
        if {name: progress.get(name) for name in wanted} != wanted:
            self._fault(PROGRESS, f"{progress}; the batches have {wanted}")
        updates = sum(batch.trained_tokens > 0 for batch in covered)
        state = load_file(parent / f"step_{newest}" / "state.safetensors")
        counted = {float(tensor) for name, tensor in state.items() if name.startswith("step.")}
        if counted != {float(updates)}:
            self._fault(OPTIMIZER, f"it counts {sorted(counted)} updates of {updates} batches")

    def _nothing_shipped_twice(self) -> None:
        """Checks that each rollout and each group is in the batch of one step only, and in the records of one step only."""
        groups: dict[int, set[int]] = defaultdict(set)
        shipped: dict[str, list[int]] = defaultdict(list)
        recorded: dict[str, list[int]] = defaultdict(list)
        for step in published(self._run / "rollouts"):
            records = {line["rollout_id"]: line for line in json_lines(self._records(step))}
            for line in json_lines(self._records(step)):
                recorded[line["rollout_id"]].append(step)
                self._findings.counts["rollouts failed, which a step recorded"] += line["error"] is not None
            batch = self._batches.get(step)
            for rollout_id in dict.fromkeys(batch.rollout_ids) if batch else ():
                shipped[rollout_id].append(step)
                if (record := records.get(rollout_id)) is None:
                    self._fault(CHANGED, f"step {step} shipped rollout {rollout_id}, which its records do not have")
                else:
                    groups[record["group_id"]].add(step)
        self._findings.counts["rollouts shipped"] += len(shipped)
        self._findings.counts["groups shipped"] += len(groups)
        for name, found in (("group", groups), ("rollout", shipped), ("the record of rollout", recorded)):
            for key, steps in found.items():
                if len(steps) > 1:
                    self._fault(GROUPS, f"{name} {key} in steps {', '.join(map(str, steps))}")

    def _nothing_changed(self) -> None:
        for step in range(1, self._last + 1):
            seen, records = self._seen.get(step), self._records(step)
            if seen is None:
                continue  # reported as unseen
            if not records.exists() or digest(records) != seen["records"]:
                self._fault(CHANGED, f"the records of step {step} are not those of its commit")
            kept = records.with_name("batch.bin")
            if kept.exists() and digest(kept) != seen["batch"]:
                self._fault(CHANGED, f"the batch of step {step} is not that of its commit")
            batch = self._batches.get(step)
            if batch is not None and (batch.run_id, batch.step) != (self._run_id, step):
                self._fault(CHANGED, f"the batch of step {step} says that it is step {batch.step} of {batch.run_id}")

    def _trained_from_its_batch(self) -> None:
        """Checks that each line of a step, one a training, has its batch's tokens and samples, and the loss of the first."""
        first: dict[int, dict[str, Any]] = {}
        for line in sorted(self._lives, key=lambda line: line["time"]):
            step = line["step"]
            if (batch := self._batches.get(step)) is None:
                continue  # reported as unseen
            if (line["tokens"], line["samples"]) != (batch.tokens, len(batch.rollout_ids)):
                self._fault(
                    OTHERWISE,
                    f"step {step} trained {line['tokens']} tokens in {line['samples']} samples, "
                    f"its batch has {batch.tokens} in {len(batch.rollout_ids)}",
                )
            before = first.setdefault(step, line)
            if before is not line:
                self._findings.counts["steps trained again from their records"] += 1
                if not math.isclose(before["loss"], line["loss"], rel_tol=SAME_LOSS, abs_tol=SAME_LOSS):
                    self._fault(OTHERWISE, f"step {step} had loss {before['loss']}, and {line['loss']} again")

    def _weights(self) -> None:
        versions = published(self._run / "broadcast")
        if not versions or versions != list(range(versions[0], self._last + 1)):
            self._fault(WEIGHTS, f"versions {versions}; the last step is {self._last}")
        for version in versions:
            said = json.loads((self._run / "broadcast" / f"step_{version}" / "probe.json").read_text())["version"]
            if said != version:
                self._fault(WEIGHTS, f"the probe of version {version} is of {said}")

    def _records(self, step: int) -> Path:
        return self._run / "rollouts" / f"step_{step}" / "rollouts.jsonl"


def _difference(steps: list[int], wanted: list[int]) -> str:
    """Describes how a list of steps differs from the expected one."""
    counted = Counter(steps)
    parts = {
        "missing": [step for step in wanted if step not in counted],
        "twice": [step for step, times in counted.items() if times > 1],
        "not committed": [step for step in counted if step not in set(wanted)],
    }
    said = [f"{name} {', '.join(map(str, found))}" for name, found in parts.items() if found]
    return "; ".join(said) or "not in order"
