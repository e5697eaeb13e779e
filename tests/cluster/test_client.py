"""Jobs made of one function: what can be one, how another process finds it, and jobs that are submitted again."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from counterpoint.cluster import JobFailed, JobHandle, submit
from counterpoint.cluster.client import (
    Client,
    JobRequest,
    ResourceConfig,
    create_environment,
    current_client,
    set_current_client,
)
from counterpoint.cluster.entrypoint import Entrypoint, function
from counterpoint.cluster.spec import StartGate
from counterpoint.transport.errors import UserError
from tests.cluster.client_functions import fail, leave, leave_another


@pytest.mark.slow
def test_a_function_is_called_in_a_process_of_its_own_and_waited_for(tmp_path: Path) -> None:
    client = Client(tmp_path / "outputs")
    request = JobRequest(
        name="leave",
        entrypoint=Entrypoint.from_callable(leave, args=[str(tmp_path)], kwargs={"name": "here"}),
        environment=create_environment(env_vars={"LEFT": "a value"}),
    )
    first = client.submit(request)
    assert first.wait(timeout=60, raise_on_failure=True).code == 0
    assert (tmp_path / "here").read_text() == "a value"
    again = client.submit(request)
    assert (again.wait(timeout=60).code, again.directory.name) == (0, "2")


@pytest.mark.slow
def test_a_function_that_raises_fails_its_job(tmp_path: Path) -> None:
    entrypoint = Entrypoint.from_callable(fail, args=["out of luck"])
    handle = Client(tmp_path).submit(JobRequest(name="fail", entrypoint=entrypoint))
    with pytest.raises(JobFailed):
        handle.wait(timeout=60, raise_on_failure=True)
    assert handle.wait(timeout=60, raise_on_failure=False).code == 1
    assert "RuntimeError: out of luck" in handle.logs("worker-0", lines=5)


@pytest.mark.slow
def test_jobs_of_one_name_that_are_submitted_at_once_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one looks before any has written its job."""
    looked = threading.Barrier(3)

    def submit_together(*arguments: Any, **options: Any) -> JobHandle:
        looked.wait(60)
        return submit(*arguments, **options)

    monkeypatch.setattr("counterpoint.cluster.client.submit", submit_together)
    request = JobRequest(name="once", entrypoint=Entrypoint.from_callable(leave_another, args=[str(tmp_path)]))
    with ThreadPoolExecutor(3) as threads:
        handles = [
            found.result() for found in [threads.submit(Client(tmp_path / "out").submit, request) for _ in range(3)]
        ]
    (tmp_path / "go").touch()
    assert {handle.directory for handle in handles} == {tmp_path / "out" / "once" / "1"}
    assert [handle.wait(timeout=60).code for handle in handles] == [0, 0, 0]
    assert [path.name for path in (tmp_path / "out" / "once").iterdir()] == ["1"]
    assert len([*tmp_path.glob("left-*")]) == 1


async def never_run() -> None: ...


def never_made() -> Iterator[int]:
    yield 1


class Point(NamedTuple):
    """Two numbers."""

    x: int
    y: int


def nested() -> Any:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        (lambda: None, [], "define it with `def` at the top"),
        (nested(), [], "define it with `def` at the top"),
        (partial(leave, "x"), [], "is a partial"),
        (leave, [object()], "are not JSON"),
        (leave, [{"rate": [float("inf")]}], "are not JSON: Out of range"),
        (leave, [date(2026, 1, 1)], "are not JSON: .* date "),
        (leave, [JobRequest("a", Entrypoint("m", "f"))], "are not JSON: .* JobRequest "),
        (leave, [{0: "zero"}], "the key 0 would not arrive as it is"),
        (leave, [[{"__tuple__": []}]], "the key '__tuple__' would not arrive as it is"),
        (leave, [Point(1, 2)], "of type Point, would arrive as tuple: give that itself"),
        (leave, [{"deep": (StartGate.JOB,)}], "of type StartGate, would arrive as str"),
        (leave, [HTTPStatus.OK], "of type HTTPStatus, would arrive as int"),
        (leave, [np.float64(0.1)], "of type float64, would arrive as float"),
        (leave, [OrderedDict(a=1)], "of type OrderedDict, would arrive as dict"),
        (leave, [{1, 2}], "are not JSON: .* set "),
        (leave, "gs://bucket/sweep", "expected a list or a tuple"),
        (leave, {"root": "x"}, "expected a list or a tuple"),
        (leave, None, "expected a list or a tuple"),
        (never_run, [], "does nothing when it is called"),
        (never_made, [], "does nothing when it is called"),
    ],
)
def test_what_another_process_cannot_call_is_refused(given: Any, arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Entrypoint.from_callable(given, args=arguments)


@pytest.mark.parametrize(
    "value",
    [
        (), (1, 2), [(1, [2, (3,)])], {"a": (0.1, None, True)}, ({"b": ()},), 2**70, -0.0, 1e-320, "\ud800\0ü", "", {"": 1},
        [[], {}, None, False, 0],
    ],
)  # fmt: skip
def test_arguments_arrive_as_they_are(value: Any) -> None:
    given = Entrypoint.from_callable(leave, args=[value], kwargs={"name": value})
    (text,) = given.to_variables().values()
    found = Entrypoint.from_variable(text)
    assert repr([*found.args]) == repr([value])
    assert repr(found.kwargs) == repr({"name": value})
    assert (found.source, found.name, found.directory) == (given.source, given.name, given.directory)


def test_arguments_are_not_on_the_command_line() -> None:
    request = JobRequest(name="a", entrypoint=Entrypoint.from_callable(leave, args=["secret"]))
    (role,) = request.spec.roles
    assert role.command is not None
    assert "secret" not in " ".join(role.command)
    assert any("secret" in value for value in role.environment.values())


PROGRAM = """
from pathlib import Path
from counterpoint.cluster import Client, Entrypoint, JobRequest

def work(): return "done"

{guard}Client({directory!r}).submit(JobRequest(name="a", entrypoint=Entrypoint.from_callable(work)))
"""


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__': "])
def test_a_program_is_imported_without_being_run(tmp_path: Path, guard: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(guard=guard, directory=str(tmp_path)))
    entrypoint = Entrypoint(str(file), "work", directory=os.getcwd())
    if guard:
        assert function(entrypoint)() == "done"
    else:
        with pytest.raises(UserError, match="submit jobs below"):
            function(entrypoint)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("extras", "message"),
    [(["cpuu"], "has no extra 'cpuu'"), (["gpu"], r"not installed: .*vllm.*install counterpoint\[gpu\]")],
)
def test_extras_that_are_not_there_are_refused(extras: list[str], message: str, tmp_path: Path) -> None:
    request = JobRequest("a", Entrypoint.from_callable(leave), ResourceConfig(), create_environment(extras=extras))
    with pytest.raises(UserError, match=message):
        Client(tmp_path).submit(request)
    create_environment(extras=["cpu"]).check()


def test_the_current_client_is_the_one_that_was_set(tmp_path: Path) -> None:
    client = Client(tmp_path)
    with set_current_client(client):
        assert current_client() is client
    assert current_client() is not client
