"""Profiles of the loop: the tree of any stacks adds up and is bounded, and hostile files and names do no harm."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.job.reading.activity.profiles import LEAST_SHARE, MAX_BYTES, MAX_PROFILES, merged, place_of
from counterpoint.run.loop_health.profile import MAX_DEPTH, profile_loop, speedscope
from tests.serve.api_client import api

STACKS = st.lists(
    st.tuples(st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=6), st.integers(1, 10**9)), max_size=40
)

PATH = "/jobs/job/runs/one/profiles"


def write_profile(job: Path, name: str, content: Any, time: float | None = None) -> Path:
    """Writes a file of the run's profiles; bytes as they are."""
    path = job / "run_one" / "profiles" / f"{name}.speedscope.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else orjson.dumps(content))
    if time is not None:
        os.utime(path, (time, time))
    return path


def content_of(*stacks: tuple[list[Any], Any]) -> dict[str, Any]:
    """A file's content, each stack with its seconds."""
    names = list(dict.fromkeys(name for stack, _ in stacks for name in stack))
    sampled = {
        "unit": "seconds",
        "samples": [[names.index(name) for name in stack] for stack, _ in stacks],
        "weights": [seconds for _, seconds in stacks],
    }
    return {"shared": {"frames": [{"name": name} for name in names]}, "profiles": [sampled]}


def whole(seconds: float) -> int:
    """The microseconds of a frame."""
    return round(seconds * 1e6)


@settings(max_examples=60)
@given(stacks=STACKS, most=st.integers(0, 30))
def test_shares_add_up(stacks: list[tuple[list[str], int]], most: int) -> None:
    frames = merged(stacks, most)
    assert whole(frames[0].seconds) == sum(microseconds for _, microseconds in stacks)
    assert sum(not frame.other for frame in frames) <= most + 1
    for place, frame in enumerate(frames):
        assert frame.parent < place
        below = [each for each in frames if each.parent == place]
        assert whole(frame.seconds) == whole(frame.own) + sum(whole(each.seconds) for each in below)
        assert frame.own >= 0
        assert len({(each.function, each.other) for each in below}) == len(below)
        assert sum(each.other for each in below) <= 1


@settings(max_examples=60)
@given(stacks=st.lists(st.tuples(st.lists(st.sampled_from("abc"), max_size=6), st.integers(1, 100)), max_size=40))
def test_every_stack_is_found_again(stacks: list[tuple[list[str], int]]) -> None:
    paths: list[tuple[str, ...]] = []
    found: Counter[tuple[str, ...]] = Counter()
    for frame in merged(stacks):
        paths.append((*paths[frame.parent], frame.function) if frame.parent >= 0 else ())
        found[paths[-1]] += whole(frame.own)
    wanted: Counter[tuple[str, ...]] = Counter()
    for stack, microseconds in stacks:
        wanted[tuple(stack)] += microseconds
    assert +found == wanted


def test_what_is_deep_or_small_counts_as_left_out() -> None:
    frames = merged([(["deep"] * (MAX_DEPTH + 50), 10**9), (["small"], int(10**9 * LEAST_SHARE / 2))])
    assert len(frames) == MAX_DEPTH + 3
    others = [frame for frame in frames if frame.other]
    assert sorted(whole(frame.seconds) for frame in others) == [int(10**9 * LEAST_SHARE / 2), 10**9]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Run.<locals>.step (run/loop.py:12)", ("Run.<locals>.step", "run/loop.py", 12)),
        ("f (a (b)/c.py:3)", ("f", "a (b)/c.py", 3)),
        ("(waiting)", ("(waiting)", "", 0)),
        ("f (x.py:9999999999)", ("f (x.py:9999999999)", "", 0)),
        ("f (x.py:\u0663)", ("f (x.py:\u0663)", "", 0)),
        ("\x1b[2J (\u202e:1)", ("\\x1b[2J", "\\u202e", 1)),
    ],
)
def test_a_name_is_taken_apart(name: str, place: tuple[str, str, int]) -> None:
    assert place_of(name) == place


async def test_a_real_profile_is_a_tree(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_profile(job, "real", speedscope(await profile_loop(0.05), "real"))
    async with api(job) as client:
        status, listed = await client.get(PATH)
        assert (status, [each["name"] for each in listed["profiles"]]) == (200, ["real"])
        status, answer = await client.get(f"{PATH}/real")
    assert status == 200
    assert answer["unreadable"] == ""
    assert answer["seconds"] >= 0.05
    assert "(waiting)" in {frame["function"] for frame in answer["frames"]}
    assert answer["frames"][0]["seconds"] == pytest.approx(sum(frame["own"] for frame in answer["frames"]))


async def test_profiles_are_listed_the_newest_first(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for number in range(MAX_PROFILES + 2):
        write_profile(job, f"p{number}", content_of((["a"], 1.0)), time=1000.0 + number)
    linked = write_profile(job, "target", b"{}")
    linked.rename(tmp_path / "outside")
    linked.symlink_to(tmp_path / "outside")
    for name in ("-leading", "with space", "\u202e", "x" * 65):
        write_profile(job, name, content_of((["a"], 1.0)))
    os.mkfifo(linked.with_name("fifo.speedscope.json"))
    async with api(job) as client:
        _, listed = await client.get(PATH)
        assert [each["name"] for each in listed["profiles"]] == [f"p{51 - at}" for at in range(MAX_PROFILES)]
        for name in ("target", "fifo"):
            status, answer = await asyncio.wait_for(client.get(f"{PATH}/{name}"), 60)
            assert (status, answer["frames"]) == (200, [])
            assert "expected a regular file" in answer["unreadable"]
        for name in ("gone", "..%2f..%2fone"):
            assert (await client.get(f"{PATH}/{name}"))[0] in (400, 404)


async def test_a_link_in_place_of_the_directory_leads_nowhere(tmp_path: Path) -> None:
    job, other = tmp_path / "job", tmp_path / "other"
    write_profile(other, "secret", content_of((["a"], 1.0)))
    (job / "run_one").mkdir(parents=True)
    (job / "run_one" / "profiles").symlink_to(other / "run_one" / "profiles")
    async with api(job) as client:
        assert (await client.get(PATH))[1] == {"profiles": []}
        assert (await client.get(f"{PATH}/secret"))[0] == 404


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 2**16,
        b" " * (MAX_BYTES + 1),
        {},
        {"shared": {"frames": {"name": 1}}, "profiles": [{}]},
        {"shared": {"frames": []}, "profiles": []},
        content_of((["a"], 1.0)) | {"profiles": [{"unit": "bytes", "samples": [], "weights": []}]},
        content_of((["a"], 1.0)) | {"profiles": [{"unit": "seconds", "samples": 3, "weights": {}}]},
    ],
    ids=str,
)
async def test_what_is_no_profile_is_said_so(tmp_path: Path, content: Any) -> None:
    job = tmp_path / "job"
    write_profile(job, "bad", content)
    async with api(job) as client:
        status, answer = await client.get(f"{PATH}/bad")
    assert (status, answer["frames"], answer["seconds"]) == (200, [], 0.0)
    assert "bad.speedscope.json" in answer["unreadable"]


async def test_samples_that_are_none_are_left_out(tmp_path: Path) -> None:
    job = tmp_path / "job"
    content = content_of((["a", 7], 1.0), (["a"], -1.0), (["a"], 1e300), (["a"], "1"), (["a"], True), (["a"], 1e-9))
    content["profiles"][0]["samples"] += [[-1, 10**9, None, "0"], 5]
    content["profiles"][0]["weights"] += [0.5, 1.0]
    write_profile(job, "odd", content)
    async with api(job) as client:
        status, answer = await client.get(f"{PATH}/odd")
    assert (status, answer["seconds"]) == (200, 1.5)
    assert {frame["function"] for frame in answer["frames"]} == {"", "a", "(no name)"}
