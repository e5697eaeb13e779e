"""The checker: an undisturbed run with kills is sound, and every single forgery is named."""

from __future__ import annotations

import ast
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from counterpoint.orchestrator.receipts.chain import head_of
from counterpoint.verify.report import BROKEN_CHAIN, DAMAGED, NO_RECEIPTS, SOUND
from counterpoint.verify.run import verify
from tests.verify.forgeries import FORGERIES, ONLY_BY_HEAD, lines_of, records
from tests.verify.recorded import RecordedRun, config_of

STEPS = 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of six steps, killed after the second and the fourth."""
    config = config_of(tmp_path_factory.mktemp("job"))
    for steps in (2, 2, 2):
        RecordedRun(config).play(steps)
    return config.run_dir


@pytest.fixture
def run_dir(recorded: Path, tmp_path: Path) -> Path:
    copy = tmp_path / recorded.name
    shutil.copytree(recorded, copy)
    return copy


def receipts_of(run_dir: Path) -> list[bytes]:
    return (run_dir / "receipts.jsonl").read_bytes().splitlines()


def test_the_checker_imports_nothing_of_the_product() -> None:
    for path in Path("counterpoint/verify").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("counterpoint") or name.startswith("counterpoint.verify."), (path, name)
    lines = [line for path in Path("counterpoint/verify").rglob("*.py") for line in path.read_text().splitlines()]
    assert len([line for line in lines if line.strip()]) <= 950, "small enough to be read"


def test_a_run_with_kills_is_sound(run_dir: Path) -> None:
    report = verify(run_dir)
    assert report.code == SOUND, report.text()
    assert report.steps == STEPS
    assert report.head == head_of(receipts_of(run_dir)[-1])
    assert report.checked["records of steps"] == STEPS
    assert verify(run_dir, report.head).code == SOUND


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.slow
def test_a_kill_between_commit_and_append_loses_no_receipt(recorded: Path, run_dir: Path, kept: int) -> None:
    path = run_dir / "receipts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-kept]) + lines[-kept][:40])
    report = verify(run_dir)
    assert (report.code, report.steps) == (SOUND, STEPS), report.text()
    RecordedRun(config_of(run_dir.parent)).play(1)
    assert path.read_bytes().splitlines(keepends=True)[:-1] == lines
    assert verify(run_dir).steps == STEPS + 1


def test_a_run_without_receipts_is_said(tmp_path: Path) -> None:
    (tmp_path / "run_old" / "rollouts").mkdir(parents=True)
    assert verify(tmp_path / "run_old").code == NO_RECEIPTS


def test_an_altered_line_is_named_by_file_step_and_rollout(run_dir: Path) -> None:
    lines = lines_of(records(run_dir, 3))
    record = orjson.loads(lines[2])
    lines[2] = orjson.dumps(record | {"reward": record["reward"] + 1}, option=orjson.OPT_APPEND_NEWLINE)
    records(run_dir, 3).write_bytes(b"".join(lines))
    report = verify(run_dir)
    (finding,) = report.findings
    assert (finding.file, finding.step) == ("rollouts/step_3/rollouts.jsonl", 3)
    assert finding.rollout == record["rollout_id"]
    assert report.code == DAMAGED


@pytest.mark.parametrize("name", [*FORGERIES, *ONLY_BY_HEAD])
def test_a_forgery_is_named(run_dir: Path, name: str) -> None:
    head = head_of(receipts_of(run_dir)[-1])
    step = 3
    (FORGERIES | ONLY_BY_HEAD)[name](run_dir, step, random.Random(name))
    assert verify(run_dir, head).code != SOUND
    report = verify(run_dir)
    if name in FORGERIES:
        assert report.code != SOUND
        if name not in ("lines_of_receipts", "receipt", "skipped_data"):
            assert step in {finding.step for finding in report.findings}, report.text()


@pytest.mark.slow
def test_of_two_hundred_forgeries_all_are_named_with_the_head(recorded: Path, tmp_path: Path) -> None:
    head = head_of(receipts_of(recorded)[-1])
    draw = random.Random(74)
    both = list((FORGERIES | ONLY_BY_HEAD).items())
    unnamed: list[str] = []
    for number in range(200):
        name, forge = both[number % len(both)]
        copy = tmp_path / str(number) / recorded.name
        shutil.copytree(recorded, copy)
        forge(copy, draw.randrange(1, STEPS + 1), draw)
        assert verify(copy, head).code != SOUND, (number, name)
        if verify(copy).code == SOUND:
            unnamed.append(name)
        shutil.rmtree(copy)
    assert {*unnamed} <= {*ONLY_BY_HEAD}
    assert len(unnamed) <= 24


@pytest.mark.parametrize(
    "forge",
    [
        lambda lines: lines[:2] + lines[3:],
        lambda lines: [*lines[:3], lines[2], *lines[3:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:2], lines[2].replace(b'"batch":"', b'"batch":"0'), *lines[3:]],
        lambda lines: lines[1:],
        lambda lines: lines[:-1],
    ],
    ids=["deleted", "doubled", "reordered", "altered", "without the first", "without the last"],
)
def test_a_broken_chain_is_named(run_dir: Path, forge: Callable[[list[bytes]], list[bytes]]) -> None:
    lines = receipts_of(run_dir)
    head = head_of(lines[-1])
    (run_dir / "receipts.jsonl").write_bytes(b"".join(line + b"\n" for line in forge(lines)))
    shutil.rmtree(run_dir / "checkpoints")
    assert verify(run_dir, head).code == BROKEN_CHAIN
