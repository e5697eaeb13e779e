"""Writes a Slurm batch script. One node runs the job as it is; on several, the script starts a Ray cluster for the job first.

Options and variables: sbatch(1) and srun(1) of Slurm 24.11; `apptainer exec` of Apptainer 1.3.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from counterpoint.job.manifest.request import GRACE_SECONDS, Request, run_command, wait_for_nodes


def batch_script(request: Request, directory: Path, image: str | None = None) -> str:
    """Returns the script. The job's file and `directory`, in which it runs, are on a file system that all nodes share.

    With an `image`, as Apptainer names one, everything runs in it.
    """
    inside = shlex.join(_in_image(request, directory.absolute(), image)) + " " if image is not None else ""
    options = {
        "job-name": request.name,
        "nodes": str(request.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(request.cpus),
        "mem": f"{request.memory_gib}G",
        **({"gpus-per-node": str(request.gpus)} if request.gpus else {}),
        **({"time": str(request.minutes)} if request.minutes else {}),
        "chdir": str(directory.absolute()),
        "output": "%x-%j.log",
        "signal": f"B:TERM@{GRACE_SECONDS}",
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "#SBATCH --requeue",
        "",
        "set -euo pipefail",
        *(_ray_cluster(request, inside) if request.nodes > 1 else []),
        "# In place of the shell, so that Slurm's SIGTERM reaches the job, which then ends in order and can be resumed.",
        f"exec {inside}{shlex.join(run_command(request, str(request.file)))}",
    ]
    return "\n".join(lines) + "\n"


def _in_image(request: Request, directory: Path, image: str) -> list[str]:
    """The words before a command that runs in the image, where the job's files have the paths that they have outside."""
    output_dir = directory / request.output_dir
    shared = dict.fromkeys(map(str, (directory, request.file.parent, output_dir.parent)))
    return ["apptainer", "exec", *(["--nv"] if request.gpus else []), "--bind", ",".join(shared), image]


def _ray_cluster(request: Request, inside: str) -> list[str]:
    node = f"--num-cpus={request.cpus} --num-gpus={request.gpus} --disable-usage-stats --block"
    step = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
    others = request.nodes - 1
    return [
        "# Whoever can reach a port of Ray can run code as this user: use nodes and a network of your own, or Ray's tokens.",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)',
        "address=${address%% *}",
        'export RAY_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 10000))"',
        f'srun --nodes=1 --ntasks=1 {step} --nodelist="${{nodes[0]}}" \\',
        f'  {inside}ray start --head --node-ip-address="$address" --port="${{RAY_ADDRESS##*:}}" \\',
        f"    --include-dashboard=false {node} &",
        f'srun --nodes={others} --ntasks={others} {step} --exclude="${{nodes[0]}}" \\',
        f'  {inside}ray start --address="$RAY_ADDRESS" {node} &',
        f"{inside}{wait_for_nodes(request)}",
    ]
