"""The parts of the published schemas that our manifests use, transcribed; what is not listed here is refused.

JobSet: kubernetes-sigs/jobset, `config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml` at commit 01078527
(`jobset.x-k8s.io/v1alpha2`, controller-gen v0.16.2).
RayJob: ray-project/kuberay, `ray-operator/apis/ray/v1/rayjob_types.go` at commit f6ef3f7b and `raycluster_types.go` at commit
3275ee09 (`ray.io/v1`), from which controller-gen makes the CRDs.
Job, PodTemplateSpec, ConfigMap, NetworkPolicy: the OpenAPI of Kubernetes 1.33 (`batch/v1`, `v1`, `networking.k8s.io/v1`).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {
    "type": "string",
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$",
}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}
LABEL: Schema = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
"""RFC 1035, as in the name of a Service; those of other resources may have more."""


def listed(schema: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": schema, **limits}


def table(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


METADATA = table(("name",), name=LABEL, labels=TEXTS)

SELECTOR = table(matchLabels=TEXTS)

CONTAINER = table(
    ("name", "image"),
    name=LABEL,
    image=TEXT,
    command=listed(TEXT),
    workingDir=TEXT,
    env=listed(
        table(("name",), name=TEXT, valueFrom=table(fieldRef=table(("fieldPath",), fieldPath=TEXT, apiVersion=TEXT)))
    ),
    resources=table(requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=listed(table(("name", "mountPath"), name=LABEL, mountPath=TEXT)),
    securityContext=table(allowPrivilegeEscalation=BOOLEAN),
)

POD = table(
    metadata=table(labels=TEXTS),
    spec=table(
        ("containers",),
        restartPolicy=one_of("Always", "OnFailure", "Never"),
        terminationGracePeriodSeconds=NUMBER,
        automountServiceAccountToken=BOOLEAN,
        securityContext=table(fsGroup=NUMBER),
        containers=listed(CONTAINER, minItems=1),
        volumes=listed(
            table(
                ("name",),
                name=LABEL,
                configMap=table(name=TEXT),
                persistentVolumeClaim=table(("claimName",), claimName=TEXT),
                emptyDir=table(medium=one_of("", "Memory")),
            )
        ),
    ),
)

JOB = table(
    ("template",),
    parallelism=NUMBER,
    completions=NUMBER,
    completionMode=one_of("NonIndexed", "Indexed"),
    backoffLimit=NUMBER,
    activeDeadlineSeconds=NUMBER,
    podFailurePolicy=table(
        ("rules",),
        rules=listed(
            table(
                ("action",),
                action=one_of("FailJob", "FailIndex", "Ignore", "Count"),
                onExitCodes=table(
                    ("operator", "values"),
                    containerName=TEXT,
                    operator=one_of("In", "NotIn"),
                    values=listed(NUMBER, minItems=1, maxItems=255),
                ),
            ),
            maxItems=20,
        ),
    ),
    template=POD,
)

JOB_SET = table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=METADATA,
    spec=table(
        network=table(enableDNSHostnames=BOOLEAN, publishNotReadyAddresses=BOOLEAN, subdomain=TEXT),
        successPolicy=table(("operator",), operator=one_of("All", "Any"), targetReplicatedJobs=listed(TEXT)),
        failurePolicy=table(
            maxRestarts=NUMBER,
            restartStrategy=one_of("Recreate", "BlockingRecreate"),
            rules=listed(
                table(
                    ("action", "name"),
                    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    onJobFailureReasons=listed(TEXT),
                    targetReplicatedJobs=listed(TEXT),
                )
            ),
        ),
        replicatedJobs=listed(
            table(("name", "template"), name=TEXT, groupName=TEXT, replicas=NUMBER, template=table(spec=JOB))
        ),
    ),
)

RAY_JOB = table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("ray.io/v1"),
    kind=one_of("RayJob"),
    metadata=METADATA,
    spec=table(
        activeDeadlineSeconds=NUMBER,
        backoffLimit=NUMBER,
        entrypoint=TEXT,
        submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
        shutdownAfterJobFinishes=BOOLEAN,
        ttlSecondsAfterFinished=NUMBER,
        rayClusterSpec=table(
            ("headGroupSpec",),
            rayVersion=TEXT,
            headGroupSpec=table(("template", "rayStartParams"), template=POD, rayStartParams=TEXTS),
            workerGroupSpecs=listed(
                table(
                    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
)

CONFIG_MAP = table(
    ("apiVersion", "kind", "metadata", "data"),
    apiVersion=one_of("v1"),
    kind=one_of("ConfigMap"),
    metadata=METADATA,
    data=TEXTS,
)

NETWORK_POLICY = table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("networking.k8s.io/v1"),
    kind=one_of("NetworkPolicy"),
    metadata=METADATA,
    spec=table(
        ("podSelector",),
        podSelector=SELECTOR,
        policyTypes=listed(one_of("Ingress", "Egress")),
        ingress=listed(
            {
                "type": "object",
                "properties": {
                    "from": listed(table(podSelector=SELECTOR, namespaceSelector=SELECTOR)),
                    "ports": listed(table(protocol=one_of("TCP", "UDP", "SCTP"), port=NUMBER)),
                },
                "additionalProperties": False,
            }
        ),
    ),
)

SCHEMA_OF = {"ConfigMap": CONFIG_MAP, "JobSet": JOB_SET, "NetworkPolicy": NETWORK_POLICY, "RayJob": RAY_JOB}
"""By kind."""
