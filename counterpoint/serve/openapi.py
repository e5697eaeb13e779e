"""The OpenAPI 3.1 document of the API, from its endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core.core_schema import ModelSchema

from counterpoint.serve.endpoint import ROOT, Endpoint
from counterpoint.serve.errors import ProblemAnswer
from counterpoint.serve.parameters import names_in
from counterpoint.transport.configuration.docstrings import docstring_of

REFERENCE = "#/components/schemas/{model}"


class Described(GenerateJsonSchema):
    """Pydantic's JSON schemas, with the docstrings of fields as their descriptions."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Called by pydantic for each model."""
        described = super().model_schema(schema)
        for name, field in described.get("properties", {}).items():
            if text := docstring_of(schema["cls"], name):
                field.setdefault("description", text)
        return described


def document_of(endpoints: Sequence[Endpoint[Any, Any]]) -> bytes:
    """Returns the document as JSON."""
    results = {endpoint.result for endpoint in endpoints} | {ProblemAnswer}
    ordered: list[type[BaseModel]] = sorted(results, key=lambda model: (model.__name__, model.__module__))
    inputs: list[type[BaseModel]] = [*dict.fromkeys(endpoint.parameters for endpoint in endpoints)]
    references, definitions = models_json_schema(
        [*((model, "serialization") for model in ordered), *((model, "validation") for model in inputs)],
        ref_template=REFERENCE,
        schema_generator=Described,
    )
    schemas: dict[str, Any] = definitions.get("$defs", {})
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        reference = references[(endpoint.parameters, "validation")]["$ref"].rpartition("/")[2]
        result = references[(endpoint.result, "serialization")]
        problem = references[(ProblemAnswer, "serialization")]
        operation = _operation(endpoint, schemas[reference], result, problem)
        paths.setdefault(ROOT + endpoint.path, {})[endpoint.method.lower()] = operation
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Counterpoint",
            "version": version("counterpoint"),
            "description": "Reads and changes the jobs that `counterpoint serve` was given.",
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return orjson.dumps(document)


def _operation(endpoint: Endpoint[Any, Any], parameters: dict[str, Any], result: Any, problem: Any) -> dict[str, Any]:
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    in_path = names_in(endpoint.path)
    described = [
        {
            "name": name,
            "in": "path" if name in in_path else "query",
            "required": name in in_path or name in required,
            "schema": schema,
        }
        for name, schema in properties.items()
        if name in in_path or endpoint.access == "read"
    ]
    operation: dict[str, Any] = {
        "operationId": endpoint.operation,
        "summary": endpoint.summary,
        "tags": [endpoint.access],
        "parameters": described,
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": result}}},
            "default": {"description": "A problem.", "content": {"application/json": {"schema": problem}}},
        },
    }
    if endpoint.access == "change":
        body = {
            **{key: value for key, value in parameters.items() if key not in ("properties", "required")},
            "properties": {name: schema for name, schema in properties.items() if name not in in_path},
            "required": [name for name in required if name not in in_path],
        }
        operation["requestBody"] = {
            "content": {"application/json": {"schema": body}},
            "required": bool(body["required"]),
        }
    return operation
