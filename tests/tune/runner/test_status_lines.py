"""What a run says on standard error, by `verbose`."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.tune.runner.trial_runner import TrialRunner
from tests.tune.runner.scripted import ScriptedExecutor, ScriptedTrials, run_to_the_end

RESULTS = {
    f"t{trial} {iteration}" for trial, iterations in ((1, 2), (2, 1), (3, 1)) for iteration in range(1, iterations + 1)
}


@pytest.mark.parametrize(
    ("verbose", "status", "failures", "ends", "results"),
    [
        (0, False, False, False, False),
        (False, False, False, False, False),
        (1, True, True, False, False),
        (True, True, True, False, False),
        (2, True, True, True, False),
        (3, True, True, True, True),
    ],
)
def test_each_level_says_more(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verbose: bool | int,
    status: bool,
    failures: bool,
    ends: bool,
    results: bool,
) -> None:
    algorithm = ScriptedTrials(tmp_path, [[1, 2], [3, "die"], [4]])
    runner = TrialRunner(
        algorithm, local_checkpoint_dir=tmp_path, trial_executor=ScriptedExecutor(), metric="value", verbose=verbose
    )
    trials = run_to_the_end(runner)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("tune: ") for line in lines)
    said = [line.removeprefix("tune: ") for line in lines]
    names = {str(trial): trial.trial_id for trial in trials.values()}
    by_trial = [
        (names[line.split(" ")[0].rstrip(":")], line) for line in said if line.split(" ")[0].rstrip(":") in names
    ]
    assert (f"results in {tmp_path}" in said) is status
    assert ("3 trials: 1 ERROR, 2 TERMINATED" in said) is status
    assert {who for who, line in by_trial if " failed, see " in line} == ({"t2"} if failures else set())
    assert {who for who, line in by_trial if " ended after " in line} == ({"t1", "t3"} if ends else set())
    found = [(who, line) for who, line in by_trial if ": iteration " in line]
    assert {f"{who} {line.split(' ')[2].rstrip(',')}" for who, line in found} == (RESULTS if results else set())
    assert len(found) == (len(RESULTS) if results else 0)
