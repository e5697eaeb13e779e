"""The parts of the published schemas that our manifests use, transcribed; what is not listed here is refused.

From the OpenAPI of Kubernetes 1.33: Deployment, Job, PodDisruptionBudget, PodTemplateSpec, Service.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

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
KEY: Schema = {"type": "string", "pattern": r"^[-._a-zA-Z0-9]+$", "maxLength": 253}
"""A key of a ConfigMap or a Secret."""
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def listed(schema: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": schema, **limits}


def table(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


METADATA = table(("name",), name=LABEL, labels=TEXTS)

SELECTOR = table(matchLabels=TEXTS)

PROBE = table(
    exec=table(("command",), command=listed(TEXT)),
    httpGet=table(("port",), path=TEXT, port=PORT),
    periodSeconds=NUMBER,
    timeoutSeconds=NUMBER,
    failureThreshold=NUMBER,
)

CONTAINER = table(
    ("name", "image"),
    name=LABEL,
    image=TEXT,
    args=listed(TEXT),
    ports=listed(table(("containerPort",), containerPort=PORT)),
    resources=table(requests=QUANTITIES, limits=QUANTITIES),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    volumeMounts=listed(table(("name", "mountPath"), name=LABEL, mountPath=TEXT, readOnly=BOOLEAN)),
    securityContext=table(
        allowPrivilegeEscalation=BOOLEAN, readOnlyRootFilesystem=BOOLEAN, capabilities=table(drop=listed(TEXT))
    ),
)

POD = table(
    metadata=table(labels=TEXTS),
    spec=table(
        ("containers",),
        restartPolicy=one_of("Always", "OnFailure", "Never"),
        terminationGracePeriodSeconds=NUMBER,
        automountServiceAccountToken=BOOLEAN,
        enableServiceLinks=BOOLEAN,
        securityContext=table(
            runAsNonRoot=BOOLEAN,
            runAsUser=NUMBER,
            runAsGroup=NUMBER,
            fsGroup=NUMBER,
            seccompProfile=table(("type",), type=one_of("RuntimeDefault", "Unconfined", "Localhost")),
        ),
        containers=listed(CONTAINER, minItems=1),
        volumes=listed(
            table(
                ("name",),
                name=LABEL,
                configMap=table(name=LABEL),
                secret=table(
                    secretName=LABEL,
                    defaultMode={"type": "integer", "minimum": 0, "maximum": 0o777},
                    items=listed(table(("key", "path"), key=KEY, path=TEXT)),
                ),
                persistentVolumeClaim=table(("claimName",), claimName=TEXT),
                emptyDir=table(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
            )
        ),
    ),
)

JOB = table(
    ("template",),
    backoffLimit=NUMBER,
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
                onPodConditions=listed(table(("type",), type=TEXT, status=one_of("True", "False", "Unknown"))),
            ),
            maxItems=20,
        ),
    ),
    template=POD,
)

DEPLOYMENT = table(("selector", "template"), replicas=NUMBER, selector=SELECTOR, template=POD)

SERVICE = table(selector=TEXTS, ports=listed(table(("port",), port=PORT)))

BUDGET = table(minAvailable=NUMBER, selector=SELECTOR)

SPEC_OF = {
    ("batch/v1", "Job"): JOB,
    ("apps/v1", "Deployment"): DEPLOYMENT,
    ("v1", "Service"): SERVICE,
    ("policy/v1", "PodDisruptionBudget"): BUDGET,
}
"""By API and kind."""


def errors_of(resource: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a resource, by its published schema."""
    spec = SPEC_OF[(resource["apiVersion"], resource["kind"])]
    schema = table(("apiVersion", "kind", "metadata", "spec"), apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(resource)]
