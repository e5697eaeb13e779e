"""schemathesis over the whole API: whatever is asked, the answer is no 5xx and is what the OpenAPI document says.

It is imported where it is used: it takes two seconds, and each process of the tests imports this file.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import uvloop
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings

from counterpoint.serve.app import ENDPOINTS
from counterpoint.serve.endpoint import ROOT, Endpoint
from counterpoint.serve.openapi import document_of
from tests.serve.api_client import ADMIN, app_of
from tests.support.synthetic_jobs import write_job

pytestmark = pytest.mark.slow

EXAMPLES = {"positive": 3, "negative": 2}

AUTHORIZED = {"Authorization": f"Bearer {ADMIN}"}


@contextmanager
def serving(*directories: Path) -> Iterator[str]:
    """The API's address, served by a thread of this process."""
    ready, loop = threading.Event(), uvloop.new_event_loop()
    addresses: list[str] = []

    async def start() -> TestServer:
        server = TestServer(app_of(*directories))
        await server.start_server()
        addresses.append(str(server.make_url("/")).rstrip("/"))
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=run, name="serving")
    thread.start()
    try:
        assert ready.wait(60)
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    job = tmp_path_factory.mktemp("schema") / "job"
    job.mkdir()
    runs = write_job(job, 2, 3)
    with serving(job, job.parent / "missing") as found:
        yield found
    assert runs == ["run-0000", "run-0001"]


def test_every_endpoint_is_described_once_and_by_a_sentence() -> None:
    operations = [endpoint.operation for endpoint in ENDPOINTS]
    assert len(operations) == len({*operations})
    assert all(endpoint.summary.endswith(".") for endpoint in ENDPOINTS)
    assert all((endpoint.method == "GET") == (endpoint.access == "read") for endpoint in ENDPOINTS)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.operation)
def test_whatever_is_asked_is_answered_as_described(address: str, endpoint: Endpoint[Any, Any]) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core import NotSet
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks

    required = [
        not_a_server_error,
        checks.response_schema_conformance,
        checks.content_type_conformance,
        checks.status_code_conformance,
    ]
    schema = schemathesis.openapi.from_dict(json.loads(document_of([endpoint])))
    operation = schema[ROOT + endpoint.path][endpoint.method]
    known = {name: value for name, value in (("job", "job"), ("run", "run-0000")) if f"{{{name}}}" in endpoint.path}
    answered: list[int] = []

    with requests.Session() as session:

        def check(case: schemathesis.Case[Any]) -> None:
            if "wait_seconds" in endpoint.parameters.model_fields:  # nobody answers here
                if isinstance(case.body, NotSet):
                    case.body = {}
                if isinstance(case.body, dict):
                    case.body["wait_seconds"] = 0.01
            response = case.call_and_validate(address, session, AUTHORIZED, checks=required, timeout=60)
            answered.append(response.status_code)

        for name, count in EXAMPLES.items():
            mode = GenerationMode(name)
            if mode is GenerationMode.NEGATIVE and not endpoint.parameters.model_fields:
                continue
            cases = operation.as_strategy(mode, path_parameters=known if mode is GenerationMode.POSITIVE else None)
            settings(max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck])(
                given(case=cases)(check)
            )()
    assert answered
