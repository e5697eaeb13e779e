"""The audit after chaos: silent about a directory where all is well, and naming each fault that is planted there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from counterpoint.transport import codec
from counterpoint.transport.records import Batch
from perf.chaos import audit as faults
from perf.chaos.audit import audit
from perf.chaos.disk import json_lines, read_batch
from perf.chaos.report import Findings
from perf.chaos.witness import COMMITTED, TRAINED, Witness
from tests.support.batches import make_batch
from tests.support.jobs import write_lines
from tests.verify.recorded import RecordedRun, config_of

STEPS = 4
ROLLOUTS_A_STEP = 4


class Directories:
    """A job of one run as it is in the end, and the witness's notes of it, made by hand."""

    def __init__(self, parent: Path) -> None:
        self.job = parent / "job"
        self.notes = parent / "notes"
        self.run = self.job / "run_one"
        self.trainer = self.job / "trainer" / "one" / "checkpoints" / f"step_{STEPS}"
        witness = Witness(self.job, self.notes)
        for step in range(1, STEPS + 1):
            self._commit(step)
            self.train(step)
            witness.look()
        for version in (2, 3, 4):
            self.broadcast(version)
        self._checkpoint()

    def _commit(self, step: int) -> None:
        rollouts = stable(self.run / "rollouts" / f"step_{step}")
        records = [
            {"rollout_id": f"{step}-{index}", "group_id": step, "error": None} for index in range(ROLLOUTS_A_STEP)
        ]
        write_lines(rollouts / "rollouts.jsonl", records)
        codec.write_file(rollouts / "batch.bin", batch_of(step))
        write_lines(self.run / "metrics.jsonl", [{"step": step}])
        stable(self.run / "checkpoints" / f"step_{step}")

    def train(self, step: int, changes: dict[str, int] | None = None) -> None:
        batch = read_batch(self.batch(step))
        line = {"run_id": "one", "step": step, "time": float(step), "loss": 0.5}
        line |= {"tokens": batch.tokens, "samples": len(batch.rollout_ids)} | (changes or {})
        write_lines(self.job / "trainer" / "metrics.jsonl", [line])

    def train_again(self, step: int, **changes: object) -> None:
        """As after a trainer's death: the witness has seen two lines of a step, and the file has one."""
        line = next(line for line in json_lines(self.notes / TRAINED) if line["step"] == step)
        write_lines(self.notes / TRAINED, [line | {"time": line["time"] + 100} | changes])

    def broadcast(self, version: int, says: int | None = None) -> None:
        probe = stable(self.run / "broadcast" / f"step_{version}") / "probe.json"
        probe.write_text(json.dumps({"version": says or version}))

    def _checkpoint(self) -> None:
        stable(self.trainer)
        seen = [read_batch(self.batch(step)) for step in range(1, STEPS + 1)]
        self.progress(sum(batch.tokens for batch in seen), sum(len(batch.rollout_ids) for batch in seen))
        self.updates(STEPS)

    def progress(self, tokens: int, samples: int) -> None:
        progress = {"step": STEPS, "total_tokens": tokens, "total_samples": samples, "schedule_offset": 0}
        (self.trainer / "state.json").write_text(json.dumps({"progress": progress}))

    def updates(self, count: int) -> None:
        state = {"master.a": np.zeros(2, np.float32), "step.a": np.array(count, np.float32)}
        save_file(state, self.trainer / "state.safetensors")

    def batch(self, step: int) -> Path:
        return self.run / "rollouts" / f"step_{step}" / "batch.bin"

    def records(self, step: int) -> Path:
        return self.run / "rollouts" / f"step_{step}" / "rollouts.jsonl"


def batch_of(step: int) -> Batch:
    batch = make_batch("one", step, lengths=(5, 6, 7, 8), dtype=None)
    samples = tuple(replace(sample, rollout_id=f"{step}-{index}") for index, sample in enumerate(batch.samples))
    return replace(batch, samples=samples)


def stable(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "STABLE").touch()
    return directory


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    lines = change(json_lines(path))
    path.unlink()
    write_lines(path, lines)


def replaced(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def ship_again(made: Directories) -> None:
    """Step 3 ships the rollouts of step 2, and so do its records, the witness having seen it so."""
    copy = Witness.copy_of(made.notes, "one", 3)
    copy.unlink()
    codec.write_file(copy, batch_of(2))
    made.records(3).write_bytes(made.records(2).read_bytes())


def same_group(made: Directories) -> None:
    rewrite(made.records(3), lambda lines: [line | {"group_id": 2} for line in lines])


def shorten(path: Path) -> None:
    rewrite(path, lambda lines: [line for line in lines if line["step"] != 2])


FAULTS: dict[str, tuple[Callable[[Directories], object], str, str]] = {
    "a step that was not trained": (
        lambda made: shorten(made.job / "trainer" / "metrics.jsonl"),
        faults.MISSING,
        "trainer/metrics.jsonl: missing 2",
    ),
    "a step trained twice": (
        lambda made: rewrite(made.job / "trainer" / "metrics.jsonl", lambda lines: lines + lines[1:2]),
        faults.MISSING,
        "trainer/metrics.jsonl: twice 2",
    ),
    "a step trained too early": (
        lambda made: rewrite(made.job / "trainer" / "metrics.jsonl", lambda lines: [lines[i] for i in (0, 2, 1, 3)]),
        faults.MISSING,
        "not in order",
    ),
    "a step trained that was not committed": (
        lambda made: made.train(3, {"step": 5}),
        faults.MISSING,
        "not committed 5",
    ),
    "a step without its line": (
        lambda made: shorten(made.run / "metrics.jsonl"),
        faults.MISSING,
        "metrics.jsonl: missing 2",
    ),
    "rollouts that are gone": (
        lambda made: (made.run / "rollouts" / "step_1" / "STABLE").unlink(),
        faults.MISSING,
        "rollouts/: missing 1",
    ),
    "a trainer that is behind": (
        lambda made: made.trainer.rename(made.trainer.with_name("step_3")),
        faults.UNTRAINED,
        "is of step 3, the last commit of 4",
    ),
    "tokens that were trained twice": (lambda made: made.progress(1000, 16), faults.PROGRESS, "'total_tokens': 1000"),
    "a sample too few": (lambda made: made.progress(104, 15), faults.PROGRESS, "'total_samples': 15"),
    "an update too many": (lambda made: made.updates(STEPS + 1), faults.OPTIMIZER, "[5.0] updates of 4 batches"),
    "a rollout shipped twice": (ship_again, faults.GROUPS, "rollout 2-0 in steps 2, 3"),
    "a group shipped twice": (same_group, faults.GROUPS, "group 2 in steps 2, 3"),
    "records that changed": (
        lambda made: made.records(2).write_text(made.records(2).read_text().replace("null", "null ")),
        faults.CHANGED,
        "the records of step 2 are not those of its commit",
    ),
    "a batch that changed": (
        lambda made: replaced(made.batch(4), b"other"),
        faults.CHANGED,
        "the batch of step 4 is not that of its commit",
    ),
    "records without a rollout that was shipped": (
        lambda made: rewrite(made.records(1), lambda lines: lines[1:]),
        faults.CHANGED,
        "step 1 shipped rollout 1-0",
    ),
    "a step trained again from other rollouts": (
        lambda made: made.train_again(3, tokens=7),
        faults.OTHERWISE,
        "step 3 trained 7 tokens",
    ),
    "a step trained again to another end": (
        lambda made: made.train_again(3, loss=0.6),
        faults.OTHERWISE,
        "step 3 had loss 0.5, and 0.6 again",
    ),
    "weights of a step that does not count": (
        lambda made: made.broadcast(5),
        faults.WEIGHTS,
        "versions [2, 3, 4, 5]; the last step is 4",
    ),
    "weights of another version": (
        lambda made: made.broadcast(4, says=3),
        faults.WEIGHTS,
        "the probe of version 4 is of 3",
    ),
    "a step that the witness missed": (
        lambda made: rewrite(made.notes / COMMITTED, lambda lines: lines[1:]),
        faults.UNSEEN,
        "step 1",
    ),
    "a batch that the witness missed": (
        lambda made: Witness.copy_of(made.notes, "one", 2).unlink(),
        faults.UNSEEN,
        "step 2",
    ),
}


def test_a_job_where_all_is_well_has_no_fault(tmp_path: Path) -> None:
    made = Directories(tmp_path)
    made.train_again(3, loss=0.5 + 1e-6)
    findings = audit(made.job, made.notes)
    assert findings.held, findings.faults
    assert findings.counts == {
        "runs": 1,
        "steps committed": STEPS,
        "steps trained": STEPS,
        "steps trained again from their records": 1,
        "rollouts shipped": STEPS * ROLLOUTS_A_STEP,
        "groups shipped": STEPS,
        "rollouts failed, which a step recorded": 0,
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(tmp_path: Path, name: str) -> None:
    plant, fault, words = FAULTS[name]
    made = Directories(tmp_path)
    plant(made)
    found = audit(made.job, made.notes).faults
    assert any(words in case for case in found[fault]), found


def test_every_fault_is_planted_once() -> None:
    assert {fault for _, fault, _ in FAULTS.values()} | {faults.ACCUSED} == set(faults.FAULTS)


def test_a_run_that_is_not_sound_is_a_fault(tmp_path: Path) -> None:
    config = config_of(tmp_path / "job")
    RecordedRun(config).play(2)
    findings = Findings(faults.FAULTS)
    faults.verify_runs(tmp_path / "job", findings)
    assert not any(findings.faults.values()), findings.faults
    (config.run_dir / "rollouts" / "step_2" / "rollouts.jsonl").write_bytes(b"")
    faults.verify_runs(tmp_path / "job", findings)
    [found] = findings.faults[faults.ACCUSED]
    assert "rollouts/step_2/rollouts.jsonl" in found
    assert findings.counts["runs verified"] == 2
