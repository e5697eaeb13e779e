"""Replay, attribution and their pictures over a small dump, by the command line as a user does."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from counterpoint.cli.display.replay_tables import lateness
from counterpoint.cli.dumps.replay import replay
from counterpoint.cli.main import main
from counterpoint.job.replay.lag_trace import LagSpan, LagTrace
from counterpoint.job.replay.replay import PhaseRow, Replay
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.rollouts.dump import write_dump
from counterpoint.run.loop_health.lag import LagDistribution
from counterpoint.transport.errors import UserError

pytestmark = pytest.mark.usefixtures("short_baselines")

PHASES = ["finalize", "merge", "records", "commit", "malloc_trim"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uneven rollouts: failures, several agents, rewritten contexts."""
    directory = tmp_path_factory.mktemp("replay") / "step_1"
    shape = Shape(rollouts=24, turns=6, tokens=600, layers=4, top_k=2, experts=8)
    write_dump(directory, header_of(shape), synthetic_rollouts(shape))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--synthetic-traffic", "20", "--gather-chunk-size", "5"], ["--process-pool"]])
def test_a_replay_times_every_phase(dump: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["replay", str(dump), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["phase"]: row for row in found["phases"]}
    assert list(rows) == ["idle", "finalize", "ahead", "boundary", *PHASES[1:], "delivery"]
    assert rows["boundary"]["seconds"] >= sum(rows[name]["seconds"] for name in PHASES[1:])
    assert all(row["event_loop_lag"]["n"] > 0 for row in rows.values())
    assert found["bytes"] > 0
    assert isinstance(found["event_loop_blame"], list)


@pytest.mark.slow
def test_late_code_is_looked_for_from_what_the_idle_loop_shows(
    dump: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stall before the baseline, such as the rig's own start, does not hide what is as late as it was."""
    monkeypatch.setattr("counterpoint.job.replay.replay.freeze_gc", lambda: time.sleep(0.5))
    seen: list[tuple[tuple[LagSpan, ...], LagDistribution]] = []
    distribution = LagTrace.distribution

    def noted(trace: LagTrace, *spans: LagSpan) -> LagDistribution:
        seen.append((spans, distribution(trace, *spans)))
        return seen[-1][1]

    monkeypatch.setattr(LagTrace, "distribution", noted)
    assert main(["replay", str(dump), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (spans, idle), *_ = seen  # before the round; the row of the end may have a sample that came later
    assert [span.name for span in spans] == ["idle"]
    assert found["late_seconds"] == max(0.005, 1.5 * idle.p99)


def test_a_timeline_needs_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"^--timeline needs matplotlib, .*'counterpoint\[plot\]'$"):
        replay([str(tmp_path), "--timeline", "picture.svg"])


@pytest.mark.slow
def test_a_replay_shows_a_table_and_draws_a_timeline(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(dump), "--timeline", str(tmp_path / "timeline.svg")]) == 0
    shown = capsys.readouterr().out
    assert "24 rollouts" in shown
    assert all(name in shown for name in ("idle", *PHASES))
    assert "<svg" in (tmp_path / "timeline.svg").read_text()


@pytest.mark.parametrize(
    ("lag", "said"), [(0.004, "Nothing made the loop later than 5.0 ms"), (0.145, "late by up to 145.0 ms")]
)
def test_a_loop_that_was_late_is_not_said_to_be_idle(lag: float, said: str) -> None:
    """The lag of the idle loop is not counted: no code is to blame for it."""
    rows = [PhaseRow(name, 1.0, LagDistribution.of([value], 0.1)) for name, value in (("idle", 0.2), ("finalize", lag))]
    assert said in lateness(Replay(rows, [], 0.005, LagTrace(), 0))


@pytest.mark.slow
def test_attribution_takes_each_phase_alone_and_with_those_before(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribute", str(dump), "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["phase"] for row in found] == PHASES
    for row in found:
        assert isinstance(row["blocks"], bool)
        assert row["together"]["event_loop_lag"]["n"] >= 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["replay", "{missing}"], "does not exist"),
        (["replay", "{dump}/rollouts.bin"], "counterpoint import-dump"),
        (["attribute", "--dump", "{dump}/rollouts.bin"], "counterpoint import-dump"),
        (["replay", "{dump}", "--timeline", "picture.txt"], "expected a file that ends in .png"),
        (["replay", "{dump}", "--synthetic-traffic", "-1"], "--synthetic-traffic = -1; expected at least 0"),
        (["attribute", "{dump}", "--gather-chunk-size", "0"], "--gather-chunk-size = 0; expected at least 1"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    words = [word.format(missing=tmp_path / "none", dump=dump) for word in arguments]
    assert main(words) == 2
    assert reason in capsys.readouterr().err


HOSTILE = """
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()

def advantage(inputs):
    raise SystemExit(3)
"""


@pytest.mark.parametrize("command", [["replay"], ["attribute", "--quick"]])
def test_code_that_a_dump_names_runs_only_when_the_dump_is_trusted(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "named_by_a_dump.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(dump, tmp_path / "foreign")
    header = tmp_path / "foreign" / "header.json"
    values = json.loads(header.read_bytes())
    values["advantage"]["kind"] = "named_by_a_dump:advantage"
    header.write_text(json.dumps(values))
    assert main([*command, str(tmp_path / "foreign")]) == 2
    said = capsys.readouterr().err
    assert "names the advantage function 'named_by_a_dump:advantage'" in said
    assert "--trust" in said
    assert not (tmp_path / "named_by_a_dump.ran").exists()


@pytest.mark.slow
def test_a_trusted_dump_is_replayed_with_its_own_code(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_our_dump.py").write_text(
        "from counterpoint.orchestrator.step.advantages import group_mean\n\n\n"
        "def advantage(inputs):\n    return group_mean(inputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(dump, tmp_path / "ours")
    header = tmp_path / "ours" / "header.json"
    values = json.loads(header.read_bytes())
    values["advantage"]["kind"] = "named_by_our_dump:advantage"
    header.write_text(json.dumps(values))
    assert main(["attribute", "--quick", "--trust", "--json", str(tmp_path / "ours")]) == 0


def test_a_truncated_dump_is_refused(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(dump, tmp_path / "cut")
    bulk = tmp_path / "cut" / "rollouts.bin"
    bulk.write_bytes(bulk.read_bytes()[:-100])
    assert main(["replay", str(tmp_path / "cut")]) == 2
    assert "it was truncated or changed" in capsys.readouterr().err
