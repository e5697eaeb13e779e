"""A sweep as the page asks for it: from its folder of records, and from its file, which also says what its targets set."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
import tomli_w

from counterpoint.serve.readers import sweep as reading
from counterpoint.serve.readers.sweep import SweepReader
from counterpoint.sweep.lease import Terms, claimed
from counterpoint.sweep.lock import step_lock
from counterpoint.sweep.open_store import open_store
from tests.serve.api_client import api


def record(target_id: str, started: float, lease_seconds: float = 90.0) -> bytes:
    return claimed(
        None, target_id, "owner", "host\u202e", 1, Terms(lease_seconds / 3, lease_seconds), started
    ).to_bytes()


async def test_a_folder_of_records_is_a_sweep(tmp_path: Path) -> None:
    root = tmp_path / "sweep"
    with step_lock(f"{root}/good"):
        pass
    with pytest.raises(RuntimeError), step_lock(f"{root}/bad"):
        raise RuntimeError("<script>why\x1b</script>")
    open_store(root).write("lost", record("lost", 5.0), None)
    (root / "damaged.json").write_bytes(b"{")
    os.mkfifo(root / "fifo.json")
    (root / "link.json").symlink_to(root / "good.json")
    (root / "notes.txt").write_text("mine")
    async with api(root) as client:
        assert [job["kind"] for job in (await client.get("/jobs"))[1]["jobs"]] == ["sweep"]
        with step_lock(f"{root}/busy"):
            status, answer = await client.get("/jobs/sweep/sweep")
    assert status == 200
    states = {target["target"]: (target["state"], target["is_lost"]) for target in answer["targets"]}
    assert states == {
        "good": ("SUCCESS", False), "bad": ("FAILED", False), "lost": ("RUNNING", True), "busy": ("RUNNING", False),
        "damaged": ("UNREADABLE", False), "fifo": ("UNREADABLE", False), "link": ("UNREADABLE", False),
    }  # fmt: skip
    by_id = {target["target"]: target for target in answer["targets"]}
    assert by_id["bad"]["error"] == "RuntimeError: <script>why\\x1b</script>"
    assert by_id["lost"]["owner"] == "host\\u202e, process 1"
    assert (by_id["good"]["attempts"], by_id["good"]["claims"], answer["knows_values"]) == (1, 1, False)


def write_sweep(directory: Path, **changes: object) -> Path:
    settings = {
        "name": "grid",
        "root": str(directory / "records"),
        "base": {"output_dir": str(directory / "out"), "model": "tiny-moe"},
        "grid": {"orchestrator.training.learning_rate": [0.1, 0.01], "seed": [1, 2]},
    }
    file = directory / "sweep.toml"
    file.write_text(tomli_w.dumps(settings | changes))
    return file


async def test_a_sweeps_file_says_what_its_targets_set_and_reached(tmp_path: Path) -> None:
    file = write_sweep(tmp_path)
    (found, *_) = SweepReader(file).read().targets
    with step_lock(f"{tmp_path}/records/grid/{found.target}"):
        pass
    run = tmp_path / "out" / "grid" / found.target / "run_default"
    run.mkdir(parents=True)
    lines = [
        {"step": step, "time": 1.7e9 + step, "uptime_seconds": 1.0, "reward/mean": step / 10} for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    async with api(file) as client:
        assert [job["kind"] for job in (await client.get("/jobs"))[1]["jobs"]] == ["sweep"]
        status, answer = await client.get("/jobs/sweep.toml/sweep")
    assert (status, answer["problem"], answer["knows_values"]) == (200, "", True)
    assert answer["keys"] == ["orchestrator.training.learning_rate", "seed"]
    assert [target["numbers"] for target in answer["targets"]] == [[0.1, 1.0], [0.1, 2.0], [0.01, 1.0], [0.01, 2.0]]
    first, *others = answer["targets"]
    assert (first["state"], first["reward"], first["runs"][0]["step"]) == ("SUCCESS", pytest.approx(0.2), 3)
    assert {target["state"] for target in others} == {"PENDING"}


async def test_a_file_that_is_wrong_says_how(tmp_path: Path) -> None:
    file = write_sweep(tmp_path, grid={"seeed": [1]})
    async with api(file) as client:
        status, answer = await client.get("/jobs/sweep.toml/sweep")
        assert (status, answer["targets"]) == (200, [])
        assert "seeed" in answer["problem"]
    (tmp_path / "other.toml").write_text("model = 'x'\n")
    (tmp_path / "empty").mkdir()
    async with api(tmp_path / "other.toml", tmp_path / "empty", tmp_path / "gone") as client:
        for job in ("other.toml", "empty", "gone"):
            assert (await client.get(f"/jobs/{job}/sweep"))[0] == 404


def test_the_number_of_targets_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_TARGETS", 2)
    store = open_store(tmp_path)
    for name in ("a", "b", "c"):
        store.write(name, record(name, 5.0), None)
    state = SweepReader(tmp_path).read()
    assert ([one.target for one in state.targets], state.left_out) == (["a", "b"], 1)
