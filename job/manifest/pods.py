"""What a JobSet and a RayJob have in common: the ConfigMap with the job's file, the pods' containers, and who may reach them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from counterpoint.job.manifest.request import GRACE_SECONDS, Request
from counterpoint.transport.errors import UserError

FILE = "/etc/counterpoint/job.toml"
"""The job's file in a container."""

DATA = PurePosixPath("/data")
"""The working directory of a container, as in our image; a relative `output_dir` is below it."""

GROUP = 10001
"""The group of the image's user. A claim has to belong to it, or that user cannot write there."""

LABEL = "counterpoint.io/job"

MOST_BYTES = 2**20
"""The size of a ConfigMap's content that Kubernetes allows."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a job's image and its files come from."""

    image: str
    """The image of the Dockerfile's target `cpu` or `gpu`, or another one with the extras that the job needs."""
    claim: str
    """The PersistentVolumeClaim of the job's directory; with several nodes, all of them can write to it."""


def items(request: Request, *resources: dict[str, Any]) -> dict[str, Any]:
    """Returns a list of resources, which `kubectl apply` takes as one file, with the ConfigMap of the job's file.

    Raises `UserError` for a file that is too large.
    """
    if (size := len(request.text.encode())) > MOST_BYTES:
        raise UserError(f"{request.file}: {size} bytes; a ConfigMap holds {MOST_BYTES} at most")
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(request), "data": {"job.toml": request.text}}
    return {"apiVersion": "v1", "kind": "List", "items": [files, *resources]}


def metadata(request: Request) -> dict[str, Any]:
    """Returns name and label of a resource."""
    return {"name": request.name, "labels": {LABEL: request.name}}


def pod(request: Request, storage: Storage, container: str, command: list[str] | None = None) -> dict[str, Any]:
    """Returns a pod's template. Without a `command`, the operator of Ray sets it."""
    resources: dict[str, Any] = {"cpu": str(request.cpus), "memory": f"{request.memory_gib}Gi"}
    if request.gpus:
        resources["nvidia.com/gpu"] = str(request.gpus)
    absolute = PurePosixPath(request.output_dir).is_absolute()
    mounts = {
        "file": str(PurePosixPath(FILE).parent),
        "data": str(PurePosixPath(request.output_dir).parent if absolute else DATA),
        "shared-memory": "/dev/shm",
    }
    return {
        "metadata": {"labels": {LABEL: request.name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {"fsGroup": GROUP},
            "containers": [
                {
                    "name": container,
                    "image": storage.image,
                    **({"command": command} if command else {}),
                    "workingDir": mounts["data"],
                    "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "resources": {"requests": resources, "limits": resources},
                    "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
                    "securityContext": {"allowPrivilegeEscalation": False},
                }
            ],
            "volumes": [
                {"name": "file", "configMap": {"name": request.name}},
                {"name": "data", "persistentVolumeClaim": {"claimName": storage.claim}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }


def only_among_themselves(request: Request, *others: dict[str, Any]) -> dict[str, Any]:
    """Returns a NetworkPolicy: only the job's own pods reach its pods, and `others` (rules), since Ray asks nobody for a key."""
    own = {"matchLabels": {LABEL: request.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(request),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}, *others],
        },
    }
