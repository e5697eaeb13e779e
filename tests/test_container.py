"""What runs in containers: the Dockerfile's targets, and the compose file with the files of its roles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from counterpoint.cli.main import COMMANDS
from counterpoint.inference.config import InferenceConfig
from counterpoint.job.configuration.load import load
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.config import Config
from counterpoint.transport.wires.key_files import PURPOSES

REPOSITORY = Path(__file__).parents[1]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((REPOSITORY / "deploy" / "compose.yaml").read_text())
KEYS = Path("/etc/counterpoint-keys")
ROLES: dict[str, type[Config]] = {"orchestrator": RunConfig, "trainer": TrainerConfig, "inference": InferenceConfig}


def test_the_image_has_its_targets_and_the_default_is_the_orchestrator() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", DOCKERFILE, re.MULTILINE)
    assert {"orchestrator", "cpu", "gpu"} <= {name for _, name in stages}
    assert stages[-1] == ("orchestrator", "")
    for _, command in re.findall(r"^(CMD|HEALTHCHECK .*CMD) \[(.*)\]$", DOCKERFILE, re.MULTILINE):
        word = command.replace('"', "").replace("counterpoint, ", "").split(", ")[0]
        assert word in COMMANDS


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_confined_and_has_a_file_that_names_mounted_keys(role: str) -> None:
    service = COMPOSE["services"][role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    command: list[Any] = service.get("command", ["orchestrator", "/etc/counterpoint/run.toml"])
    assert command[0] == role
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    assert mounted["/etc/counterpoint"] == "./compose"
    assert mounted[str(KEYS)] == "keys"
    config = load(ROLES[role], REPOSITORY / "deploy" / "compose" / Path(command[1]).name, [])
    named = {str(path) for path in paths_in(config.table()) if path.is_relative_to(KEYS)}
    assert named
    assert named <= {str(KEYS / name) for name in PURPOSES} | {str(KEYS / "authorized")}


def test_both_ends_of_the_wire_and_of_the_servers_meet() -> None:
    files = REPOSITORY / "deploy" / "compose"
    run = load(RunConfig, files / "run.toml", [])
    trainer = load(TrainerConfig, files / "trainer.toml", [])
    server = load(InferenceConfig, files / "inference.toml", [])
    assert run.transport.address == str(trainer.transport.address).replace("0.0.0.0", "trainer")
    assert run.inference.urls == [f"http://inference:{server.port}"]
    assert run.inference.api_key_file == server.api_key_file
    assert (run.output_dir, run.model) == (trainer.output_dir, trainer.model)
    assert run.model == server.model


def paths_in(value: Any) -> list[Path]:
    if isinstance(value, dict):
        return [path for each in value.values() for path in paths_in(each)]
    return [Path(value)] if isinstance(value, str) and value.startswith("/") else []
