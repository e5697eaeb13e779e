"""The table of steering verbs: every door has each verb, asks for the same fields, and says what has come of it."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from counterpoint.cli.main import COMMANDS, main
from counterpoint.job.admin.ask import VerbOutcome
from counterpoint.job.admin.verbs import RUN_VERBS, SERVER_VERBS, Verb
from counterpoint.orchestrator.steering import KINDS
from counterpoint.run.requests import Answer, ChangeRequest, RunRequest, write_answer
from counterpoint.serve.app import ENDPOINTS
from counterpoint.serve.audit import FILE
from counterpoint.serve.endpoint import ROOT, Endpoint
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.openapi import document_of
from tests.serve.api_client import api

POSTS = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.method == "POST"}

DOCUMENT: dict[str, Any] = json.loads(document_of(ENDPOINTS))


def endpoint_of(verb: Verb) -> Endpoint[Any, Any]:
    return POSTS[f"/jobs/{{job}}/runs/{{run}}/{verb.name}"]


def fields_of(verb: Verb) -> set[str]:
    fields = verb.fields()
    return set() if fields is None else {*fields.model_fields} - {*RunRequest.model_fields}


@pytest.mark.parametrize("verb", RUN_VERBS, ids=lambda verb: verb.name)
def test_a_verb_on_a_run_is_asked_for_with_the_same_fields_at_each_door(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = endpoint_of(verb)
    body = DOCUMENT["paths"][ROOT + endpoint.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = body["properties"]
    assert properties.keys() - {"request_id", "wait_seconds"} == fields_of(verb)
    assert all(properties[name]["description"] for name in properties)
    assert ("request_id" in properties) == (verb.fields() is not None and issubclass(verb.fields(), RunRequest))
    assert (verb.name in COMMANDS) == (verb.is_command or verb.name == "stop")
    if verb.is_command:
        assert COMMANDS[verb.name][1] == verb.summary
        with pytest.raises(SystemExit):
            main([verb.name, "--help"])
        shown = capsys.readouterr().out
        assert all(f"--{name} " in shown for name in {*fields_of(verb), "timeout"} - {"changes"})
        wait = signature(verb.load()).parameters["wait_seconds"].default
        assert properties["wait_seconds"]["default"] == wait <= properties["wait_seconds"]["maximum"]
        # A profile takes its seconds before its answer is waited for.
        longest = properties["wait_seconds"]["maximum"] + properties.get("seconds", {}).get("maximum", 0)
        assert endpoint.seconds > longest


@pytest.mark.parametrize("verb", RUN_VERBS, ids=lambda verb: verb.name)
def test_a_verb_on_a_run_answers_with_an_outcome(verb: Verb) -> None:
    result = get_type_hints(verb.load())["return"]
    assert issubclass(result, VerbOutcome)
    assert endpoint_of(verb).result is result


def test_a_change_to_null_is_asked_for_as_null(tmp_path: Path) -> None:
    """The run has answered the same request before; any other under its id would be refused."""
    run_dir, changes = tmp_path / "job" / "run_one", {"sampling.top_k": None, "filters": [{"kind": None}]}
    (run_dir / "control").mkdir(parents=True)
    write_answer(
        run_dir,
        Answer(request_id="mine", outcome="done", step=7),
        ChangeRequest(request_id="mine", changes=changes),
    )
    endpoint = POSTS["/jobs/{job}/runs/{run}/change"]
    given = endpoint.parameters(job="job", run="one", request_id="mine", changes=changes)
    assert endpoint.answer(Jobs([tmp_path / "job"]), given).changes == changes


def test_every_request_that_a_run_carries_out_has_a_verb() -> None:
    requests = [fields for verb in RUN_VERBS if (fields := verb.fields()) and issubclass(fields, RunRequest)]
    assert {fields.model_fields["kind"].default for fields in requests} == {*KINDS, "save"}


@pytest.mark.parametrize("verb", SERVER_VERBS, ids=lambda verb: verb.name)
def test_a_verb_on_a_server_has_an_endpoint_and_takes_a_url(verb: Verb) -> None:
    assert f"/jobs/{{job}}/servers/{verb.name}" in POSTS
    assert [*signature(verb.load()).parameters] == ["job", "url"]


@pytest.mark.parametrize("verb", [*RUN_VERBS, *SERVER_VERBS], ids=lambda verb: verb.name)
def test_the_texts_of_a_verb_are_a_line_and_sentences(verb: Verb) -> None:
    assert verb.summary[0].islower()
    assert not verb.summary.endswith(".")
    assert verb.explanation[0].isupper()
    assert verb.explanation.endswith(".")


async def test_a_change_to_a_long_integer_is_for_the_run_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "job" / "run_one").mkdir(parents=True)
    async with api(tmp_path / "job") as client:
        given = {"changes": {"sampling.top_k": 2**70}, "wait_seconds": 0.1}
        body, headers = json.dumps(given), {"Content-Type": "application/json"}
        response = await client.request("POST", f"{ROOT}/jobs/job/runs/one/change", data=body, headers=headers)
        assert response.status == 409, await response.text()
    lines = [json.loads(line) for line in (tmp_path / "job.state" / FILE).read_text().splitlines()]
    assert lines[0]["parameters"]["changes"]["sampling.top_k"] == 2**70
