"""What the manifests ask for, and that they are what the published schemas allow (`tests/job/manifest/schemas.py`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from counterpoint.cli.main import main
from counterpoint.job.manifest.request import Request, request_of
from counterpoint.job.manifest.slurm import batch_script
from counterpoint.transport.errors import UserError
from tests.job.manifest.schemas import SCHEMA_OF

CONFIGS = Path(__file__).parents[3] / "configs"

SBATCH = {
    "chdir", "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node", "output", "requeue", "signal",
    "time",
}  # fmt: skip
"""Options of sbatch(1), Slurm 24.11."""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["manifest", *words]) == 0
    return capsys.readouterr().out


def resources(capsys: pytest.CaptureFixture[str], scheduler: str, *words: str) -> dict[str, Any]:
    """The resources by kind, each valid."""
    gpu = str(CONFIGS / "gpu.toml")
    text = printed(capsys, "--for", scheduler, gpu, "--image", "registry.example/it:1", "--claim", "jobs", *words)
    whole = json.loads(text)
    assert (whole["apiVersion"], whole["kind"]) == ("v1", "List")
    for resource in whole["items"]:
        errors = [error.message for error in Draft202012Validator(SCHEMA_OF[resource["kind"]]).iter_errors(resource)]
        assert not errors, resource["kind"]
    return {resource["kind"]: resource for resource in whole["items"]}


@pytest.mark.parametrize("nodes", ["1", "3"])
@pytest.mark.parametrize("scheduler", ["jobset", "kuberay"])
def test_every_resource_is_what_its_schema_allows(
    capsys: pytest.CaptureFixture[str], scheduler: str, nodes: str
) -> None:
    found = resources(capsys, scheduler, "--nodes", nodes, "--minutes", "90")
    assert found["ConfigMap"]["data"]["job.toml"] == (CONFIGS / "gpu.toml").read_text()
    assert {resource["metadata"]["name"] for resource in found.values()} == {"gpu"}


def test_the_schemas_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    job_set = resources(capsys, "jobset")["JobSet"]
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["restart"] = "Never"
    assert not Draft202012Validator(SCHEMA_OF["JobSet"]).is_valid(job_set)


def test_one_node_needs_no_ray(capsys: pytest.CaptureFixture[str]) -> None:
    found = resources(capsys, "jobset")
    (head,) = found["JobSet"]["spec"]["replicatedJobs"]
    container = head["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["counterpoint", "run", "/etc/counterpoint/job.toml", "--resume"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    assert "NetworkPolicy" not in found


def test_on_several_nodes_the_pods_form_a_ray_cluster_that_nobody_else_reaches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = resources(capsys, "jobset", "--nodes", "3")
    head, others = found["JobSet"]["spec"]["replicatedJobs"]
    assert (head["template"]["spec"]["parallelism"], others["template"]["spec"]["parallelism"]) == (1, 2)
    commands = [job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][2] for job in (head, others)]
    assert "ray start --head" in commands[0]
    assert "--backend ray" in commands[0]
    assert "ray start --address=gpu-head-0-0.gpu:6379" in commands[1]
    assert found["NetworkPolicy"]["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"counterpoint.io/job": "gpu"}}}]}
    ]


def test_that_all_roles_stay_on_one_node_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["manifest", "--for", "slurm", "--nodes", "2"]
    assert main([*words, str(CONFIGS / "demo.toml")]) == 0
    assert "will be on one of the 2 nodes" in capsys.readouterr().err
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    open_server = f'[inference]\nhost = "0.0.0.0"\napi_key_file = "{key}"'
    (tmp_path / "job.toml").write_text((CONFIGS / "demo.toml").read_text().replace("[inference]", open_server))
    assert main([*words, str(tmp_path / "job.toml")]) == 0
    assert "will be on one" not in capsys.readouterr().err


def test_a_ray_job_is_submitted_by_the_operator_which_alone_reaches_the_dashboard(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = resources(capsys, "kuberay", "--nodes", "4")
    spec = found["RayJob"]["spec"]
    assert spec["entrypoint"] == "counterpoint run /etc/counterpoint/job.toml --resume --backend ray"
    assert spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3
    assert found["NetworkPolicy"]["spec"]["ingress"][1]["ports"] == [{"protocol": "TCP", "port": 8265}]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_batch_script_is_one_that_slurm_and_the_shell_take(tmp_path: Path, nodes: int) -> None:
    request = request_of(CONFIGS / "demo.toml", nodes=nodes, cpus=4, memory_gib=16, minutes=30)
    script = batch_script(request, tmp_path)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, flags=re.MULTILINE))
    assert options.keys() <= SBATCH
    assert (options["nodes"], options["cpus-per-task"], options["mem"], options["time"]) == (
        str(nodes),
        "4",
        "16G",
        "30",
    )
    assert "gpus-per-node" not in options
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert all(line.startswith("#SBATCH") for line in lines[1 : lines.index("")])  # sbatch reads no further
    assert script.count("ray start") == (2 if nodes > 1 else 0)
    assert lines[-1].startswith(f"exec counterpoint run {CONFIGS / 'demo.toml'} --resume")
    subprocess.run([shutil.which("bash") or "bash", "-n"], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_batch_script_runs_everything_in_the_image_if_there_is_one(tmp_path: Path, nodes: int) -> None:
    request = request_of(CONFIGS / "gpu.toml", nodes=nodes, cpus=4, memory_gib=16)
    script = batch_script(request, tmp_path, "docker://registry.example/it:1")
    assert request.output_dir == Path("outputs/gpu")
    inside = f"apptainer exec --nv --bind {tmp_path},{CONFIGS},{tmp_path}/outputs docker://registry.example/it:1 "
    assert script.count(inside) == (4 if nodes > 1 else 1)
    assert script.count("ray start") == script.count(f"{inside}ray start")
    assert f"exec {inside}counterpoint run {CONFIGS / 'gpu.toml'} --resume" in script
    subprocess.run([shutil.which("bash") or "bash", "-n"], input=script, text=True, check=True, timeout=60)


def test_names_are_those_that_schedulers_allow(tmp_path: Path) -> None:
    assert request(tmp_path, "Grid_7.x").name == "grid-7-x"
    assert request(tmp_path, "7").name == "job-7"
    assert len(request(tmp_path, "long" * 40).name) == 40
    with pytest.raises(UserError, match="gives the job no name"):
        request(tmp_path, "__")


def request(directory: Path, name: str) -> Request:
    text = (CONFIGS / "demo.toml").read_text().replace("outputs/demo", f"outputs/{name}")
    (directory / "job.toml").write_text(text)
    return request_of(directory / "job.toml", nodes=1, cpus=1, memory_gib=1)


def test_a_file_that_is_not_valid_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text((CONFIGS / "demo.toml").read_text().replace("steps = 160", "stepps = 160"))
    assert main(["manifest", "--for", "slurm", str(tmp_path / "job.toml")]) == 2
    assert "the nearest is orchestrator.steps" in capsys.readouterr().err


def test_kubernetes_needs_an_image_and_a_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", "--for", "jobset", str(CONFIGS / "demo.toml"), "--image", "x"]) == 2
    assert "--claim" in capsys.readouterr().err
