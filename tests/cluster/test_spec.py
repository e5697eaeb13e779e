"""A job's spec, written and read."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from counterpoint.cluster.job_files import JobFile
from counterpoint.cluster.spec import JobSpec, RoleSpec


def test_a_worker_without_a_deadline_is_the_same_after_its_job_was_written() -> None:
    role = RoleSpec(name="a", command=("true",), ready_timeout_seconds=math.inf)
    file = JobFile(spec=JobSpec(name="job", roles=(role,)))
    assert JobFile.model_validate_json(file.model_dump_json()) == file


@pytest.mark.parametrize(
    ("names", "message"),
    [(("second", "first"), "must be roles listed before it"), (("first", "first"), "two roles are called 'first'")],
)
def test_an_order_that_cannot_be_is_refused(names: tuple[str, ...], message: str) -> None:
    after = {"second": ("first",)}
    roles = tuple(RoleSpec(name=name, command=("true",), after=after.get(name, ())) for name in names)
    with pytest.raises(ValidationError, match=message):
        JobSpec(name="job", roles=roles)


def test_a_role_has_not_the_name_of_a_sub_master() -> None:
    managed = RoleSpec(name="a", worker="w:W", sub_master="w:M")
    with pytest.raises(ValidationError, match="'a-master' has the name of another role's SubMaster"):
        JobSpec(name="job", roles=(managed, RoleSpec(name="a-master", command=("x",))))


def test_only_a_service_can_be_left_out() -> None:
    with pytest.raises(ValidationError, match="only a service without a SubMaster"):
        RoleSpec(name="a", command=("x",), task=True, essential=False)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "ends once 'stage-1' has ended, but role 'stage' has only 1 "),
        ({"count": 2, "min_count": 1}, "leave min_count = 1 and max_count = 2 out"),
        ({"count": 2, "max_count": 3}, "leave min_count = 2 and max_count = 3 out"),
        ({"count": 2, "essential": False}, "leave `essential = false` out"),
    ],
)
def test_a_producer_that_may_be_missing_is_refused(counts: dict[str, int], message: str) -> None:
    """The stream ends once every producer has ended, so it never would."""
    config = {"channels": [{"name": "tokens", "producers": ["stage-0", "stage-1", "from-elsewhere"]}]}
    host = RoleSpec(name="host", worker="w:W", config=config)
    with pytest.raises(ValidationError, match=message):
        JobSpec(name="job", roles=(host, RoleSpec(name="stage", worker="w:W", **counts)))
    JobSpec(name="job", roles=(host, RoleSpec(name="stage", worker="w:W", count=2)))


def test_roles_are_linked_by_the_channels_of_any_config() -> None:
    def linked(**configs: dict[str, object]) -> frozenset[str]:
        roles = tuple(RoleSpec(name=name, worker="w:W", config=config) for name, config in configs.items())
        return JobSpec(name="job", roles=roles).linked_by_channels

    channel = {"name": "tokens", "producers": ["stage-0"]}
    assert linked(sink={"input": channel}, stage={}, other={"producers": ["sink-0"]}) == {"sink", "stage"}
    assert linked(host={"deep": [{"er": [channel]}]}, stage={}, other={"name": "tokens"}) == {"host", "stage"}
