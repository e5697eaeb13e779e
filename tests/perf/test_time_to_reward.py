"""The comparison with TRL: its figures come from the records as they say, and its job is one that we accept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from counterpoint.environments.mix import mix_of
from counterpoint.environments.workers.load import load_environment
from counterpoint.job.config import JobConfig
from counterpoint.transport.process.launch import descendants
from perf.noise import CpuTimes, below_this, cpu_seconds
from perf.time_to_reward.competing import competing_load
from perf.time_to_reward.cpu_clock import CpuClock
from perf.time_to_reward.measure import Outcome
from perf.time_to_reward.ours import job_of, records_of
from perf.time_to_reward.report import summary, tables
from perf.time_to_reward.settings import BatchRecord, Settings, append_record, read_records
from perf.time_to_reward.trl_side import drawn_examples

CORES = len(os.sched_getaffinity(0))


def outcome(side: str, pace: float) -> Outcome:
    """A run whose reward rises from 0.50 to 0.89 over 40 updates, one every `pace` seconds from the tenth on."""
    records = [BatchRecord(110 + index * pace, 0.5 + index / 100, 64) for index in range(40)]
    cpu = [{"trainer": 15 + index * pace / 4, "engine": 5 + index * pace / 4} for index in range(40)]
    return Outcome(side, 0, 100.0, 200.0, 80.0, 0.0, records, (0.7, 0.9), cpu)


def test_a_threshold_counts_when_the_mean_of_five_batches_is_at_it() -> None:
    assert outcome("ours", 1.0).reached(0.7) == 22  # 0.68 to 0.72
    assert outcome("ours", 1.0).reached(0.9) is None


def test_the_figures_are_those_of_the_records() -> None:
    figures = outcome("ours", 1.0).figures()

    assert figures["tenths"] == pytest.approx([0.515 + 0.04 * part for part in range(10)])
    assert figures["start_up_seconds"] == 10.0
    assert figures["step_seconds"] == pytest.approx(1.0)
    assert figures["step_cpu_seconds"] == pytest.approx(0.5)
    assert figures["step_cpu_seconds_of"] == pytest.approx({"trainer": 0.25, "engine": 0.25})
    assert figures["to_0.7"] == {
        "wall_seconds": 32.0, "training_seconds": 22.0, "cpu_seconds": 31.0, "updates": 23, "rollouts": 23 * 64
    }  # fmt: skip
    assert set(figures["to_0.9"].values()) == {None}


def test_ratios_are_over_trl_in_the_same_round() -> None:
    runs = [
        {"round": number, "busy": False, **outcome(side, pace * (1 + number)).figures()}
        for number in range(3)
        for side, pace in (("ours", 1.0), ("trl", 2.0))
    ]
    console = Console(record=True, width=120)
    for table in tables(runs):
        console.print(table)
    line = next(line for line in console.export_text().splitlines() if "wall of an update" in line)

    assert line.split() == ["wall", "of", "an", "update", "2.000", "s", "(0.50", "x)", "4.000", "s"]
    assert summary(runs)["trl"]["wall of an update"] == pytest.approx(4.0)
    assert summary(runs)["ours"]["to 0.9: rollouts"] is None


def test_a_table_says_by_how_much_a_load_slows_each_side_and_the_others_are_without_it() -> None:
    runs = [
        {"round": 0, "busy": busy, **outcome(side, pace).figures()}
        for side, busy, pace in (("ours", False, 1.0), ("ours", True, 3.0), ("trl", False, 2.0), ("trl", True, 2.5))
    ]
    console = Console(record=True, width=120)
    for table in tables(runs):
        console.print(table)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]

    assert [line for line in lines if "wall of an update" in line] == [
        "wall of an update 1.000 s (0.50 x) 2.000 s",
        "wall of an update 3.000 s (3.00 x) (1.20 of TRL's) 2.500 s (1.25 x)",
    ]
    assert [line for line in lines if "wall from the command" in line][2:] == [
        "to 0.7: wall from the command 76.0 s (2.38 x) (1.17 of TRL's) 65.0 s (1.20 x)",
        "to 0.9: wall from the command never never",
    ]
    assert summary(runs)["ours"]["wall of an update"] == pytest.approx(1.0)


def test_the_competing_load_computes_on_each_core_and_none_of_it_is_ours() -> None:
    with competing_load() as load:
        before = CpuTimes.now(load)
        while len(below := descendants(load)) <= CORES or min(sorted(map(cpu_seconds, below))[-CORES:]) < 0.2:
            time.sleep(0.05)
        assert CpuTimes.now(load).ours - before.ours < CpuTimes.now().ours - before.ours - 0.15 * CORES
        assert not below_this(load) & {load, *below}
    assert all(cpu_seconds(pid) == 0 for pid in below), "it has ended"


def test_the_cpu_clock_knows_how_much_each_process_below_had_taken_at_a_moment() -> None:
    burn = "import time\nwhile time.process_time() < 1: pass\ninput()"
    # `perf.time_to_reward.trl_side` is an argument that the program does not read.
    command = [sys.executable, "-c", burn, "perf.time_to_reward.trl_side"]
    with CpuClock() as clock, subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        while clock.at(time.time()).get("TRL", 0.0) < 0.95:
            time.sleep(0.05)
        process.communicate(b"\n")

    assert "TRL" not in clock.at(0.0) or clock.at(0.0)["TRL"] < 0.9
    assert clock.at(time.time())["TRL"] == pytest.approx(1.0, abs=0.3)


def test_our_job_is_valid_and_on_policy(tmp_path: Path) -> None:
    job = JobConfig.model_validate(job_of(Settings("tiny-dense", seed=3, groups=4, group_size=8), tmp_path))

    assert job.orchestrator.schedule.rollouts_per_step == 32
    assert job.orchestrator.schedule.max_lead_steps == 1
    assert job_of(Settings("tiny-dense"), tmp_path, 2)["orchestrator"]["schedule"]["max_lead_steps"] == 2
    assert job.orchestrator.seed == 3


def test_trl_gets_the_examples_in_the_order_in_which_our_job_draws_them(tmp_path: Path) -> None:
    settings = Settings("smollm2", seed=3, updates=10, groups=9, task_name="sums")  # more than one epoch
    run = JobConfig.model_validate(job_of(settings, tmp_path)).orchestrator
    (environment,) = run.environments
    mix = mix_of(run.environments, {environment.name: load_environment(environment)}, run.seed)

    assert drawn_examples(settings, 81) == [mix.next()[1] for _ in range(90)]


def test_records_are_read_as_written(tmp_path: Path) -> None:
    records = [BatchRecord(1.5, 0.25, 64), BatchRecord(2.5, 0.5, 64)]
    for record in records:
        append_record(tmp_path / "records.jsonl", record)

    assert read_records(tmp_path / "records.jsonl") == records
    assert read_records(tmp_path / "none.jsonl") == []
    assert records_of(tmp_path) == []
