"""The units for systemd: what they have in common, and that what they run exists. `.ci/verify-units` has systemd read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.cli.main import COMMANDS
from counterpoint.cluster.spec import JobSpec

UNITS = sorted((Path(__file__).parent.parent / "deploy").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_runs_a_command_and_tells_a_stop_from_a_failure(unit: Path) -> None:
    pairs = [line.partition("=") for line in unit.read_text().splitlines() if line and line[0] not in "#["]
    values = {key: value for key, _, value in pairs}
    assert values["ExecStart"].split()[1] in COMMANDS
    assert values["Type"] == "notify"
    assert (values["SuccessExitStatus"], values["RestartPreventExitStatus"]) == ("143", "2 3")
    assert values["StartLimitIntervalSec"] == "0", "who corrects a file may start it as often as it takes"
    assert values["EnvironmentFile"] == "-/etc/counterpoint/%i.env"
    # PrivateTmp gives each unit a /tmp of its own, and the wire's socket may lie in the temporary directory.
    assert "TMPDIR=/run/counterpoint" in values["Environment"].split()
    assert (values["RuntimeDirectory"], values["RuntimeDirectoryPreserve"]) == ("counterpoint", "yes")


def test_a_job_is_taken_over_after_the_death_of_its_supervisor() -> None:
    """Its workers are left alone, and the next start comes before their agent's lease is over."""
    [unit] = [unit for unit in UNITS if "job" in unit.stem]
    lines = unit.read_text().splitlines()
    assert "KillMode=process" in lines
    [pause] = [int(line.removeprefix("RestartSec=")) for line in lines if line.startswith("RestartSec=")]
    assert pause < JobSpec.model_fields["lease_seconds"].default / 2


def test_every_role_and_the_whole_job_have_a_unit() -> None:
    assert [unit.stem for unit in UNITS] == [
        f"counterpoint-{name}@" for name in ("inference", "job", "orchestrator", "service", "trainer")
    ]
