"""Writes a Kubernetes JobSet: one pod that runs the job; with several nodes, more pods that form a Ray cluster with it.

Schema: jobset.x-k8s.io/v1alpha2.
"""

from __future__ import annotations

import shlex
from typing import Any

from counterpoint.job.manifest.pods import FILE, Storage, items, metadata, only_among_themselves, pod
from counterpoint.job.manifest.request import GRACE_SECONDS, Request, run_command, wait_for_nodes

RAY_PORT = 6379

HEAD, OTHERS = "head", "others"

NOT_AGAIN = [2, 3]
"""Exit codes after which another start would fail as well: a bad configuration, an evicted run."""


def job_set(request: Request, storage: Storage, restarts: int = 10) -> dict[str, Any]:
    """Returns the resources. A pod that fails, or whose node is lost, is started again `restarts` times, and the job resumes."""
    jobs = [_job(HEAD, 1, pod(request, storage, "counterpoint", _head_command(request)))]
    if request.nodes > 1:
        jobs.append(_job(OTHERS, request.nodes - 1, pod(request, storage, "ray", _other_command(request))))
    resource = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(request),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": request.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [HEAD]},
            "failurePolicy": {
                "maxRestarts": restarts,
                "rules": [
                    {
                        "name": "notAgain",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "targetReplicatedJobs": [HEAD],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }
    if request.minutes:
        for job in jobs:
            job["template"]["spec"]["activeDeadlineSeconds"] = request.minutes * 60
    return items(request, resource, *([only_among_themselves(request)] if request.nodes > 1 else []))


def _job(name: str, pods: int, template: dict[str, Any]) -> dict[str, Any]:
    failure = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "counterpoint", "operator": "In", "values": NOT_AGAIN},
    }
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                **({"podFailurePolicy": {"rules": [failure]}} if name == HEAD else {}),
                "template": template,
            }
        },
    }


def _head_command(request: Request) -> list[str]:
    command = run_command(request, FILE)
    if request.nodes == 1:
        return command
    node = f"--num-cpus={request.cpus} --num-gpus={request.gpus} --include-dashboard=false --disable-usage-stats"
    lines = [
        "set -eu",
        f'ray start --head --node-ip-address="$POD_IP" --port={RAY_PORT} {node}',
        f'export RAY_ADDRESS="$POD_IP:{RAY_PORT}"',
        wait_for_nodes(request),
        f"exec {shlex.join(command)}",
    ]
    return ["bash", "-c", "\n".join(lines)]


def _other_command(request: Request) -> list[str]:
    head = f"{request.name}-{HEAD}-0-0.{request.name}:{RAY_PORT}"
    node = f"--num-cpus={request.cpus} --num-gpus={request.gpus} --disable-usage-stats --block"
    lines = [
        "set -eu",
        f"timeout {GRACE_SECONDS} bash -c 'until ray health-check --address {head}; do sleep 1; done'",
        f'exec ray start --address={head} --node-ip-address="$POD_IP" {node}',
    ]
    return ["bash", "-c", "\n".join(lines)]
