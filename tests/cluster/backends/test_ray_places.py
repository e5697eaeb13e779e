"""How a job is called on Ray, what Ray is asked for, and what needs no Ray to be tested."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from counterpoint.cluster.backends.ray_cluster import RayCluster, in_thread
from counterpoint.cluster.backends.ray_places import (
    SMALLEST,
    ActorName,
    actor_options,
    elsewhere,
    group_bundles,
    job_key,
    node_name,
    node_of,
)
from counterpoint.cluster.errors import BackendError, CapacityError
from counterpoint.cluster.spec import Resources


def entry(number: int, alive: bool = True) -> dict[str, object]:
    resources = {"CPU": 2.0, "GPU": 1.0, "memory": 8e9, "disk": 1.0, "node:10.0.0.1": 1.0, "object_store_memory": 1e9}
    return {
        "NodeID": f"{number:056x}"[::-1],
        "NodeManagerAddress": "10.0.0.1",
        "Alive": alive,
        "Resources": resources,
    }


def test_a_name_is_found_again() -> None:
    name = ActorName("job-1", "learner", "trainer-0", 3)
    assert ActorName.parse(str(name)) == name
    assert ActorName.parse("somebody/else") is None
    assert ActorName.parse("a/b/c/d") is None


def test_jobs_of_one_name_in_two_directories_are_two(tmp_path: Path) -> None:
    assert job_key("demo", tmp_path / "a") != job_key("demo", tmp_path / "b")
    assert job_key("demo", tmp_path / "a") == job_key("demo", tmp_path / "b" / ".." / "a")


def test_a_group_has_the_needs_of_all_its_workers_on_one_node() -> None:
    needs = [Resources(cpu=1, gpu=0.5, custom={"disk": 1}), Resources(cpu=0.5, memory_bytes=7)]
    assert group_bundles(needs) == [{"CPU": 1.5, "GPU": 0.5, "memory": 7, "disk": 1}]
    assert group_bundles([Resources()]) == [SMALLEST]
    assert actor_options(needs[0]) == {"num_cpus": 1, "num_gpus": 0.5, "memory": None, "resources": {"disk": 1}}


def test_a_node_is_what_ray_says() -> None:
    node = node_of(entry(1))
    assert (node.name, node.alive) == ("10.0.0.1-1000000000000000", True)
    assert node.resources == {"cpu": 2.0, "gpu": 1.0, "memory_bytes": 8e9, "disk": 1.0}


def test_nodes_to_avoid_are_named_by_their_ids_as_long_as_they_live() -> None:
    nodes = [entry(1), entry(2), entry(3, alive=False)]
    avoid = [node_name(one) for one in (nodes[0], nodes[2])]
    assert elsewhere(avoid, nodes) == [{"ray.io/node-id": f"!in({nodes[0]['NodeID']})"}]
    assert elsewhere(avoid[1:], nodes) is None


async def test_a_call_that_hangs_or_fails_is_told_with_its_name() -> None:
    release = threading.Event()
    try:
        with pytest.raises(BackendError, match=r"asking the head took more than 0.01 s"):
            await in_thread("asking the head", 0.01, release.wait, 60)
    finally:
        release.set()
    with pytest.raises(BackendError, match="asking the head failed: ZeroDivisionError: "):
        await in_thread("asking the head", 60, divmod, 1, 0)

    def refuse() -> None:
        raise CapacityError("too much")

    with pytest.raises(CapacityError, match="too much"):
        await in_thread("asking the head", 60, refuse)
    assert await in_thread("asking the head", 60, divmod, 7, 2) == (3, 1)


@pytest.mark.slow
def test_a_cluster_that_refuses_names_the_mode_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own error names the address alone."""
    ray = pytest.importorskip("ray")

    def refuse(*given: object, **more: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:1")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(RayCluster, "probe", lambda self: None)
    with pytest.raises(BackendError, match="RAY_AUTH_MODE=token"):
        RayCluster("127.0.0.1:1").connect()
