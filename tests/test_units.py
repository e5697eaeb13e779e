"""The units for systemd: what they have in common, and that what they run exists. `.ci/verify-units` has systemd read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.cli.main import COMMANDS
from counterpoint.cluster.spec import JobSpec

UNITS = sorted((Path(__file__).parent.parent / "deploy").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_runs_a_command_and_tells_a_stop_from_a_failure(unit: Path) -> None:
    values = _values(unit)
    assert values["ExecStart"].split()[1] in COMMANDS
    assert values["Type"] == "notify"
    plays_runs = unit.stem in ("counterpoint-job@", "counterpoint-orchestrator@")
    assert (values["SuccessExitStatus"], values["RestartPreventExitStatus"]) == (
        "143",
        "2 3 65" if plays_runs else "2 3",
    )
    assert values["StartLimitIntervalSec"] == "0", "who corrects a file may start it as often as it takes"
    assert values["EnvironmentFile"] == "-/etc/counterpoint/%i.env"
    # PrivateTmp gives each unit a /tmp of its own, and the wire's socket may lie in the temporary directory.
    assert "TMPDIR=/run/counterpoint" in _variables(unit)
    assert (values["RuntimeDirectory"], values["RuntimeDirectoryPreserve"]) == ("counterpoint", "yes")


@pytest.mark.parametrize("role", ["inference", "job", "trainer"])
def test_what_is_compiled_outlives_a_reboot(role: str) -> None:
    """vLLM and Triton keep it in the home; torch in the temporary directory, which is in memory, unless it is told."""
    [unit] = [unit for unit in UNITS if role in unit.stem]
    kept = f"/var/lib/{_values(unit)['StateDirectory']}"
    assert {f"HOME={kept}", f"TORCHINDUCTOR_CACHE_DIR={kept}/.cache/torchinductor"} <= set(_variables(unit))


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


def _values(unit: Path) -> dict[str, str]:
    """Returns the last value of each key."""
    pairs = [line.partition("=") for line in unit.read_text().splitlines() if line and line[0] not in "#["]
    return {key: value for key, _, value in pairs}


def _variables(unit: Path) -> list[str]:
    """Returns the variables that the unit sets."""
    lines = [line for line in unit.read_text().splitlines() if line.startswith("Environment=")]
    return [given for line in lines for given in line.removeprefix("Environment=").split()]
