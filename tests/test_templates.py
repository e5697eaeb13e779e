"""The templates in deploy/ for Slurm and Kubernetes agree with the schedulers' schemas and with our code."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from counterpoint.cli.main import main
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.plugin.authentication import OPEN_PATHS
from counterpoint.job.configuration.load import load
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.loop import EVICTED
from counterpoint.transport.config import Config
from counterpoint.transport.errors import UserError
from counterpoint.transport.wires.key_files import ORCHESTRATOR, PURPOSES, make_key_files
from tests.support.kubernetes import errors_of
from tests.support.polling import DEADLINE_SECONDS
from tests.test_container import DOCKERFILE, KEYS, REPOSITORY, paths_in

DEPLOY = REPOSITORY / "deploy"
FILES: dict[str, tuple[type[Config], str]] = {
    "orchestrator": (RunConfig, "run.toml"),
    "trainer": (TrainerConfig, "trainer.toml"),
    "inference": (InferenceConfig, "inference.toml"),
}
COMPOSE = DEPLOY / "compose"

WHOLE, APART = (
    list(yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())["items"]) for name in ("job.yaml", "roles.yaml")
)
RESOURCES = {
    f"{where}, {each['kind']} {each['metadata']['name']}": each
    for where, items in (("whole", WHOLE), ("apart", APART))
    for each in items
}
PODS = {
    name: resource["spec"]["template"]["spec"] for name, resource in RESOURCES.items() if "template" in resource["spec"]
}


@pytest.mark.parametrize("name", RESOURCES)
def test_a_resource_is_what_its_schema_allows(name: str) -> None:
    assert not errors_of(RESOURCES[name])
    wrong = copy.deepcopy(RESOURCES[name])
    wrong["spec"]["restarts"] = 3
    assert errors_of(wrong)


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_confined_as_the_images_user_and_bounded(name: str) -> None:
    pod = PODS[name]
    (container,) = pod["containers"]
    user, group = map(int, re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0])
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    assert context["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes
    writable = {mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")}
    assert writable == {"/data", "/tmp", "/dev/shm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PODS)
def test_the_command_of_a_pod_is_one(name: str, tmp_path: Path) -> None:
    role, file, *switches = PODS[name]["containers"][0]["args"]
    assert switches == (["--resume"] if role != "inference" else [])
    make_key_files(tmp_path / "keys")
    given = (REPOSITORY / "configs" / "demo.toml" if role == "run" else COMPOSE / Path(file).name).read_text()
    copy = tmp_path / Path(file).name
    copy.write_text(given.replace(str(KEYS), str(tmp_path / "keys")).replace("/models/model", "tiny-dense"))
    assert main([role, str(copy), *switches, "--dry-run"]) == 0


@pytest.mark.parametrize("name", PODS)
def test_a_probe_asks_what_the_role_answers(name: str, tmp_path: Path) -> None:
    (container,) = PODS[name]["containers"]
    role = container["args"][0]
    asked = [
        {key: container[probe][key] for key in ("exec", "httpGet") if key in container[probe]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        if probe in container
    ]
    assert all(each == asked[0] for each in asked)
    match role, asked[0]:
        case "run" | "orchestrator", {"exec": {"command": ["counterpoint", *words]}}:
            directory = "/data/job" if role == "run" else str(config_of(role).output_dir)
            assert words == ["status", directory, "--health"]
            assert main(["status", str(tmp_path), "--health"]) == 1, "nothing is alive there"
        case "inference", {"httpGet": {"path": path, "port": port}}:
            assert path in OPEN_PATHS
            assert port == config_of(role).port
        case "trainer", {"httpGet": {"path": "/metrics", "port": port}}:
            assert (config_of(role).prometheus_host, config_of(role).prometheus_port) == ("0.0.0.0", port)
        case other:
            pytest.fail(f"an unknown probe: {other}")


@pytest.mark.parametrize("role", ["inference", "trainer", "orchestrator"])
def test_a_role_apart_is_mounted_what_its_file_names_and_no_other_key(role: str) -> None:
    pod = PODS[f"apart, {'Deployment' if role == 'inference' else 'Job'} {role}"]
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert Path(container["args"][1]).parent == Path(mounted["files"])
    (secret,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys")
    keys = {Path(mounted["keys"]) / item["path"] for item in secret["items"]}
    named = {Path(path) for path in paths_in(config_of(role).table()) if path.is_relative_to(KEYS)}
    expected = {KEYS / ORCHESTRATOR if path == KEYS / Path(ORCHESTRATOR).parent else path for path in named}
    assert keys == expected
    for item in secret["items"]:  # as the command at the file's head names them
        assert item["path"] in PURPOSES
        assert item["key"] == Path(item["path"]).name


def test_the_services_are_those_that_the_orchestrators_file_names() -> None:
    run = config_of("orchestrator")
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in APART if each["kind"] == "Service"}
    assert run.inference.urls == [f"http://inference:{ports['inference']}"]
    assert run.transport.address == f"tcp://trainer:{ports['trainer']}"


@pytest.mark.parametrize("where", [WHOLE, APART])
def test_what_cannot_be_had_again_by_a_new_pod_has_a_budget(where: list[dict[str, Any]]) -> None:
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in where
        if each["kind"] == "Job"
    }
    budgets = [each["spec"] for each in where if each["kind"] == "PodDisruptionBudget"]
    assert [each["selector"]["matchLabels"] for each in budgets] == list(labels.values())
    for job in (each["spec"] for each in where if each["kind"] == "Job"):
        assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [UserError.code, EVICTED]


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_batch_script_starts_the_job_and_ray_on_each_node(nodes: int, tmp_path: Path) -> None:
    script = (DEPLOY / "slurm" / "counterpoint.sh").read_text()
    lines = script.splitlines()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, flags=re.MULTILINE))
    assert options.keys() <= SBATCH
    assert lines[0] == "#!/bin/bash"
    assert all(line.startswith("#SBATCH") for line in lines[1 : lines.index("")])  # sbatch reads no further
    bash = shutil.which("bash") or "bash"
    for name in ("srun", "scontrol", "apptainer"):
        (tmp_path / name).write_text(f"#!{bash}\n{RECORDED}")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "16", "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip
    run = subprocess.run(
        [bash],
        input=script,
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    image = f"apptainer exec --nv --bind {tmp_path} docker://registry.example/counterpoint:gpu"
    called = run.stderr.splitlines()
    job = f"{image} counterpoint run {tmp_path}/job.toml --resume"
    if nodes == 1:
        assert called == [job]
        return
    node = "--num-cpus=16 --num-gpus=2 --disable-usage-stats --block"
    head = f"--head --node-ip-address=10.0.0.1 --port=23456 --include-dashboard=false {node}"
    assert {
        f"srun --nodes=1 --ntasks=1 --cpus-per-task=16 --nodelist=n1 {image} ray start {head}",
        f"srun --nodes=2 --ntasks=2 --cpus-per-task=16 --exclude=n1 {image} ray start --address=10.0.0.1:23456 {node}",
        f"{job} --backend ray",
    } <= set(called)
    assert "sum(node['Alive'] for node in ray.nodes()) < 3" in run.stderr


SBATCH = {
    "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node", "output", "requeue", "signal", "time",
}  # fmt: skip
"""Options of sbatch(1), Slurm 24.11."""

RECORDED = """echo "$(basename "$0")" "$@" >&2
case "$*" in
  *--ip-address) echo 10.0.0.1 fe80::1;;
  "show hostnames"*) printf 'n1\\nn2\\nn3\\n';;
esac
"""
"""A program that tells its arguments, and answers as Slurm's would."""


def config_of(role: str) -> Any:
    """Returns the configuration of a role apart, whose file is of `deploy/compose`."""
    kind, name = FILES[role]
    return load(kind, COMPOSE / name, [])
