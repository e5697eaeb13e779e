"""`counterpoint manifest --for slurm|jobset|kuberay FILE`: prints the file with which another scheduler runs a job."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from counterpoint.transport.errors import UserError


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a job that is not valid."""
    given = _parser().parse_args(arguments)
    from counterpoint.job.manifest.request import request_of  # imports every role's configuration

    request = request_of(
        given.file,
        nodes=given.nodes,
        cpus=given.cpus,
        memory_gib=given.memory_gib,
        gpus=given.gpus,
        minutes=given.minutes,
    )
    if request.nodes > 1 and request.needs_one_node:
        print(
            f"counterpoint: all roles of {given.file} will be on one of the {request.nodes} nodes: they find each other by "
            'addresses of their own machine. inference.host = "0.0.0.0" with an api_key_file, and '
            'transport.kind = "filesystem", let them be on any (docs/cluster.md)',
            file=sys.stderr,
        )
    if given.scheduler == "slurm":
        from counterpoint.job.manifest.slurm import batch_script

        print(batch_script(request, Path(), given.image), end="")
        return 0
    if not given.image or not given.claim:
        raise UserError(
            f"--for {given.scheduler} needs --image, that of the Dockerfile's target cpu or gpu, and --claim, the "
            "PersistentVolumeClaim of the job's directory"
        )
    from counterpoint.job.manifest.jobset import job_set
    from counterpoint.job.manifest.kuberay import ray_job
    from counterpoint.job.manifest.pods import Storage

    write = job_set if given.scheduler == "jobset" else ray_job
    print(json.dumps(write(request, Storage(given.image, given.claim)), indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint manifest",
        description="Prints the file with which Slurm or Kubernetes runs a job: a batch script for sbatch, or resources as "
        "JSON for `kubectl apply --filename -`. With more than one node, the job runs on Ray.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the job's file")
    parser.add_argument(
        "--for", dest="scheduler", required=True, choices=["slurm", "jobset", "kuberay"], help="what runs the job"
    )
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes (default: %(default)s)")
    parser.add_argument("--cpus", type=_count, default=8, metavar="N", help="cores of a node (default: %(default)s)")
    parser.add_argument(
        "--memory-gib", type=_count, default=32, metavar="N", help="memory of a node, in GiB (default: %(default)s)"
    )
    parser.add_argument("--gpus", type=_number, metavar="N", help="GPUs of a node (default: as many as the job uses)")
    parser.add_argument(
        "--minutes", type=_number, default=0, metavar="N", help="longest time of the job (default: no limit)"
    )
    parser.add_argument(
        "--image",
        metavar="IMAGE",
        help="that of the Dockerfile's target cpu or gpu; for Slurm as Apptainer names it, without it nothing runs in an image",
    )
    parser.add_argument("--claim", metavar="NAME", help="Kubernetes: the PersistentVolumeClaim of the job's directory")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 0")
    return int(text)


def _count(text: str) -> int:
    if (number := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return number
