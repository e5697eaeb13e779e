"""Writes a RayJob for the KubeRay operator, which makes the Ray cluster, submits the job to it, and removes the cluster.

Schema: ray.io/v1.
"""

from __future__ import annotations

import shlex
from typing import Any

from counterpoint.job.manifest.pods import FILE, Storage, items, metadata, only_among_themselves, pod
from counterpoint.job.manifest.request import Request, run_command

DASHBOARD_PORT = 8265

OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
"""The labels of the operator's own pods, of any namespace. It asks the dashboard for the job's state."""


def ray_job(request: Request, storage: Storage) -> dict[str, Any]:
    """Returns the resources. The job's process is on the head; its workers may be on any node."""
    params = {"num-cpus": str(request.cpus), "num-gpus": str(request.gpus)}
    cluster: dict[str, Any] = {
        "headGroupSpec": {
            # The operator, in another pod, submits the job by way of the dashboard.
            "rayStartParams": params | {"dashboard-host": "0.0.0.0"},
            "template": _ray_pod(request, storage, "ray-head"),
        }
    }
    if (others := request.nodes - 1) > 0:
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "others",
                "replicas": others,
                "minReplicas": others,
                "maxReplicas": others,
                "rayStartParams": params,
                "template": _ray_pod(request, storage, "ray-worker"),
            }
        ]
    resource = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(request),
        "spec": {
            "entrypoint": shlex.join(run_command(request, FILE)),
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            **({"activeDeadlineSeconds": request.minutes * 60} if request.minutes else {}),
            "rayClusterSpec": cluster,
        },
    }
    dashboard = {
        "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}],
        "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}],
    }
    return items(request, resource, only_among_themselves(request, dashboard))


def _ray_pod(request: Request, storage: Storage, container: str) -> dict[str, Any]:
    template = pod(request, storage, container)
    template["spec"]["restartPolicy"] = "Always"  # the operator's default: it may start a worker again in place
    return template
