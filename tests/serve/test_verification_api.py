"""The verdict on a run's receipts, as the page shows it: that of the command, in each case, whatever lies in the directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import orjson
import pytest

from counterpoint.run.receipts import head_of
from counterpoint.transport.files.lock import take_lock
from tests.serve.api_client import api
from tests.verify.recorded import RecordedRun, config_of

pytestmark = pytest.mark.slow

PATH = "/jobs/job/runs/one/verification"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = config_of(tmp_path / "job")
    config.output_dir.mkdir()
    RecordedRun(config).play(2)
    return config.run_dir


async def test_a_run_is_sound_until_it_is_altered(run_dir: Path) -> None:
    async with api(run_dir.parent) as client:
        status, found = await client.get(PATH)
        assert (status, found["verdict"], found["steps"], found["findings"]) == (200, "sound", 2, []), found
        assert found["head"] == head_of((run_dir / "receipts.jsonl").read_bytes().splitlines()[-1])
        assert found["checked"]["records of steps"] == 2
    records = run_dir / "rollouts" / "step_2" / "rollouts.jsonl"
    first, *others = records.read_bytes().splitlines(keepends=True)
    line = orjson.loads(first)
    records.write_bytes(b"".join([orjson.dumps(line | {"reward": line["reward"] + 1}) + b"\n", *others]))
    async with api(run_dir.parent) as client:
        status, found = await client.get(PATH)
        assert (status, found["verdict"]) == (200, "damaged")
        assert any("step 2" in each and line["rollout_id"] in each for each in found["findings"]), found


async def test_what_cannot_be_verified_is_said(run_dir: Path) -> None:
    lock = take_lock(run_dir / "orchestrator.lock", "the orchestrator")
    async with api(run_dir.parent) as client:
        assert (await client.get(PATH))[1]["verdict"] == "being written"
        assert (await client.get("/jobs/job/runs/two/verification"))[0] == 404
    os.close(lock)
    for name in ("receipts.jsonl", "checkpoints/step_1/receipt.json", "checkpoints/step_2/receipt.json"):
        (run_dir / name).unlink(missing_ok=True)
    async with api(run_dir.parent) as client:
        assert (await client.get(PATH))[1]["verdict"] == "broken chain"
    for name in ("checkpoints", "rollouts", "../trainer"):
        shutil.rmtree(run_dir / name)
    async with api(run_dir.parent) as client:
        status, found = await client.get(PATH)
        assert (status, found["verdict"], found["steps"]) == (200, "no receipts", 0), found
