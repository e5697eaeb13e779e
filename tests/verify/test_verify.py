"""The checker: an undisturbed run with kills is sound, and every single forgery is named."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.cli.main import main
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator.receipts.receipt import code_of
from counterpoint.run.batch_files import KeptBatches
from counterpoint.run.receipts import head_of
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.lock import take_lock
from counterpoint.verify.report import BEING_WRITTEN, BROKEN_CHAIN, DAMAGED, NO_RECEIPTS, SOUND
from counterpoint.verify.run import verify
from tests.verify.forgeries import BY_TRAINER, FORGERIES, lines_of, records, rehashed, rewritten_all
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
    return copy_of(recorded, tmp_path)


def copy_of(recorded: Path, place: Path) -> Path:
    """A copy of the run with what the trainer has noted of it."""
    for name in (recorded.name, "trainer"):
        shutil.copytree(recorded.parent / name, place / name)
    return place / recorded.name


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
    assert len([line for line in lines if line.strip()]) <= 1025, "small enough to be read"


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


ENFORCED = [
    {"kind": "gibberish", "mode": "enforce", "log_probability_below": -9.0},
    {"kind": "repetition", "mode": "enforce"},
    {"kind": "zero_advantage"},
]
TWO = [{"name": "a", "kind": "none:None", "ratio": 2}, {"name": "b", "kind": "none:None"}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "players"),
    [
        ({"advantage": {"kind": "standardised", "length_penalty": 0.3}}, False),
        ({"advantage": {"kind": "leave_one_out", "overlong": {"longest": 5, "buffer": 3}}}, False),
        ({"advantage": {"kind": "batch_standardised"}, "filters": ENFORCED[:2]}, False),
        ({"advantage": {"kind": "group_mean_batch_scaled"}, "filters": ENFORCED, "seed": 3}, True),
        ({"environments": TWO}, True),
        ({"advantage": {"kind": "turn_returns", "discount": 0.9, "length_penalty": 0.3}, "filters": ENFORCED}, False),
        ({"advantage": {"kind": "turn_returns"}}, True),
        ({"advantage": {"kind": "anchor_states", "discount": 0.5}, "environments": TWO}, False),
        ({"advantage": {"kind": "anchor_states"}, "environments": TWO, "filters": ENFORCED}, True),
    ],
)
def test_a_run_of_any_kind_is_sound(tmp_path: Path, fields: dict[str, Any], players: bool) -> None:
    config = config_of(tmp_path, **fields)
    for steps in (3, 2):
        RecordedRun(config, faulty=True, players=players).play(steps)
    report = verify(config.run_dir)
    assert report.code == SOUND, report.text()
    assert report.checked["advantages"] > 20
    assert report.checked["filters"] == report.checked["advantages"]
    assert report.checked["batches"] == 5


@pytest.mark.slow
def test_a_batch_that_stays_after_it_is_durable_is_compared_too(run_dir: Path) -> None:
    KeptBatches(2).settle(run_dir / "rollouts", 1, STEPS)
    assert verify(run_dir).checked["batches"] == 2
    (run_dir / "rollouts/step_5/kept_batch.bin").replace(run_dir / "rollouts/step_6/kept_batch.bin")
    findings = verify(run_dir).findings
    assert {finding.file for finding in findings} == {"rollouts/step_6/kept_batch.bin"}
    assert "of step 5" in findings[0].what


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["turn_returns", "anchor_states"])
def test_an_altered_advantage_of_a_turn_is_named(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, advantage={"kind": kind})
    RecordedRun(config).play(2)
    line = orjson.loads((lines := lines_of(records(config.run_dir, 2)))[1])
    (least := min(line["turns"], key=lambda turn: abs(turn["advantage"])))["advantage"] += 1e-3
    assert least["advantage"] != line["advantage"]
    lines[1] = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    records(config.run_dir, 2).write_bytes(b"".join(lines))
    rehashed(config.run_dir, 2)
    (config.run_dir / "rollouts/step_2/batch.bin").unlink()
    finding, of_trainer = verify(config.run_dir).findings
    assert of_trainer.file == "trainer/one/trained.jsonl"
    assert finding.rollout == line["rollout_id"]
    assert "the advantage of turn" in finding.what


@pytest.mark.slow
def test_a_change_of_the_rules_accuses_nobody(tmp_path: Path) -> None:
    for kind in ("group_mean", "standardised"):
        RecordedRun(config_of(tmp_path, advantage={"kind": kind})).play(2)
    report = verify(tmp_path / "run_one")
    assert report.code == SOUND, report.text()


@pytest.mark.slow
def test_a_run_that_is_older_than_receipts_has_them_from_its_resume_on(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "receipts.jsonl").unlink()
    shutil.rmtree(run_dir.parent / "trainer")
    for step in (5, 6):
        (run_dir / f"checkpoints/step_{step}/receipt.json").unlink()
    for _ in range(2):
        RecordedRun(config_of(run_dir.parent)).play(2)
    report = verify(run_dir)
    assert (report.code, report.steps) == (SOUND, 4), report.text()
    assert "are lost" not in caplog.text
    assert any("before 7" in what for what in report.unchecked)


def test_the_code_of_an_environment_is_named_without_importing_it() -> None:
    kinds = {
        "a": "reverse-text",
        "b": "tests.orchestrator.toy_environment:Toy",
        "c": "no.such:Thing",
        "d": "json.no:Thing",
    }
    found = code_of([EnvironmentConfig(name=name, kind=kind) for name, kind in kinds.items()])
    files = {"a": "counterpoint/environments/tasks/reverse_text.py", "b": "tests/orchestrator/toy_environment.py"}
    assert found == {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items()}


def test_what_the_trainer_has_trained_is_the_batch_of_the_receipt(run_dir: Path) -> None:
    for step in (4, 6):
        with publish_directory(run_dir.parent / f"trainer/one/checkpoints/step_{step}") as directory:
            digest = orjson.loads(receipts_of(run_dir)[step - 1])["batch"]
            state = {"format": 1, "progress": {"step": step, "batch": digest, "item": 0}}
            (directory / "state.json").write_text(json.dumps(state, indent=2))
    assert verify(run_dir).checked["batches that the trainer names"] == STEPS + 2
    path = run_dir.parent / "trainer/one/checkpoints/step_4/state.json"
    path.write_bytes(path.read_bytes().replace(b'"batch": "', b'"batch": "0'))
    (finding,) = verify(run_dir).findings
    assert (finding.file, finding.step) == ("trainer/one/checkpoints/step_4/state.json", 4)


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


@pytest.mark.parametrize("name", [*FORGERIES, *BY_TRAINER])
def test_a_forgery_is_named(run_dir: Path, name: str) -> None:
    head = head_of(receipts_of(run_dir)[-1])
    step = 3
    (FORGERIES | BY_TRAINER)[name](run_dir, step, random.Random(name))
    assert verify(run_dir, head).code != SOUND
    report = verify(run_dir)
    assert report.code != SOUND
    if name in BY_TRAINER:
        assert {(finding.file, finding.step) for finding in report.findings} >= {("trainer/one/trained.jsonl", step)}
        return
    shutil.rmtree(run_dir.parent / "trainer")
    report = verify(run_dir)
    assert report.code != SOUND, "by the run's own records, too"
    if name not in ("lines_of_receipts", "receipt", "skipped_data"):
        assert step in {finding.step for finding in report.findings}, report.text()


def test_who_rewrites_what_the_trainer_noted_is_found_by_the_head_alone(run_dir: Path) -> None:
    head = head_of(receipts_of(run_dir)[-1])
    rewritten_all(run_dir, 3, random.Random(1))
    assert verify(run_dir).code == SOUND
    assert verify(run_dir, head).code == BROKEN_CHAIN


@pytest.mark.parametrize("step", [1, STEPS])
@pytest.mark.parametrize("key", ["batch", "weights", "head"])
def test_what_the_trainer_noted_is_that_of_the_receipts(run_dir: Path, key: str, step: int) -> None:
    report = verify(run_dir)
    # Receipts name the weights of versions before their step.
    assert (report.checked["steps that the trainer noted"], report.checked["weights that the trainer noted"]) == (6, 6)
    lines = lines_of(path := run_dir.parent / "trainer/one/trained.jsonl")
    line = orjson.loads(lines[step])
    lines[step] = orjson.dumps(line | {key: line[key][::-1]}, option=orjson.OPT_APPEND_NEWLINE)
    path.write_bytes(b"".join(lines) + b'{"step": 7')
    found = verify(run_dir).findings
    assert [(each.file, each.step) for each in found] == [("trainer/one/trained.jsonl", step)] * (
        (key, step) != ("weights", STEPS)
    )


def test_steps_that_were_trained_again_to_other_weights_accuse_nobody(run_dir: Path) -> None:
    """The trainer was killed after step 5, and goes on from its checkpoint of step 3; no receipt has the new weights yet."""
    path = run_dir.parent / "trainer/one/trained.jsonl"
    lines = lines_of(path)
    again = [orjson.dumps(orjson.loads(line) | {"weights": "other"}) + b"\n" for line in lines[4:]]
    path.write_bytes(b"".join([*lines[:5], lines[3], *again]))  # what was noted of step 5 was lost
    report = verify(run_dir)
    assert report.code == SOUND, report.text()
    assert any("trained again" in what for what in report.unchecked)


def test_a_run_of_before_the_trainer_noted_anything_is_sound(run_dir: Path) -> None:
    shutil.rmtree(run_dir.parent / "trainer")
    report = verify(run_dir)
    assert (report.code, report.unchecked["steps of which the trainer noted nothing"]) == (SOUND, STEPS)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in one of JSON; of an empty list or dict its own."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner or not value:
        yield path
    for key, each in inner:
        yield from leaves(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """The value with another one at the place."""
    if path:
        copy = value.copy()
        copy[path[0]] = changed(value[path[0]], path[1:])
        return copy
    match value:
        case bool() | None:
            return 1
        case int() | float():
            return value + 1
        case str():
            return f"{value}0"
        case _:
            return {"more": 1} if value == {} else [1]


@pytest.mark.slow
def test_each_value_of_a_record_is_bound_to_its_place(run_dir: Path) -> None:
    """So is all that martingale 0.2.0's checker binds and we record: version, reward, prompt, sampling, order, any other key."""
    lines = lines_of(records(run_dir, 3))
    record = orjson.loads(lines[1])
    others = [record | {"more": 1}, record | {"turns": record["turns"][::-1]}]
    places = list(leaves(record))
    assert {("turns", 0, "policy_version"), ("turns", 0, "temperature"), ("reward",), ("group_id",)} <= {*places}
    for forged in [*(changed(record, place) for place in places), *others]:
        lines[1] = orjson.dumps(forged, option=orjson.OPT_APPEND_NEWLINE)
        records(run_dir, 3).write_bytes(b"".join(lines))
        report = verify(run_dir)
        assert all(finding.step == 3 for finding in report.findings)
        assert re.search(rf"rollout {forged['rollout_id']}|, part 2", report.text()), (forged, report.text())


@pytest.mark.slow
def test_each_value_of_a_receipt_is_bound_by_the_chain(run_dir: Path) -> None:
    receipts = receipts_of(run_dir)
    for number in (0, 2, STEPS - 1):
        for place in leaves(orjson.loads(receipts[number])):
            lines = receipts.copy()
            lines[number] = orjson.dumps(changed(orjson.loads(lines[number]), place))
            (run_dir / "receipts.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
            assert verify(run_dir).code != SOUND, (number, place)


@pytest.mark.slow
def test_of_two_hundred_forgeries_all_are_named(recorded: Path, tmp_path: Path) -> None:
    head = head_of(receipts_of(recorded)[-1])
    draw = random.Random(74)
    both = list((FORGERIES | BY_TRAINER).items())
    alone: list[str] = []
    for number in range(200):
        name, forge = both[number % len(both)]
        copy = copy_of(recorded, tmp_path / str(number))
        forge(copy, draw.randrange(1, STEPS + 1), draw)
        assert verify(copy, head).code != SOUND, (number, name)
        assert verify(copy).code != SOUND, (number, name)
        shutil.rmtree(copy.parent / "trainer")
        if verify(copy).code == SOUND:
            alone.append(name)
        shutil.rmtree(copy.parent)
    assert {*alone} <= {*BY_TRAINER}, "without head and without the trainer"
    assert len(alone) <= 24


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


@pytest.mark.slow
def test_a_kill_between_records_and_commit_leaves_neither_gap_nor_double(run_dir: Path) -> None:
    """The records of the step that was not committed are removed by the resume, and it is taken again."""
    shutil.copytree(run_dir / "rollouts/step_6", run_dir / "rollouts/step_7")
    assert verify(run_dir).code == SOUND
    RecordedRun(config_of(run_dir.parent)).play(1)
    report = verify(run_dir)
    assert (report.code, report.steps) == (SOUND, STEPS + 1), report.text()


@pytest.mark.parametrize("left", ["checkpoints", "rollouts"])
def test_receipts_that_were_cut_off_are_missed(run_dir: Path, left: str) -> None:
    path = run_dir / "receipts.jsonl"
    path.write_bytes(b"".join(lines_of(path)[:3]))
    for copy in run_dir.glob("checkpoints/*/receipt.json"):
        copy.unlink()
    shutil.rmtree(run_dir / ({"checkpoints", "rollouts"} - {left}).pop())
    assert verify(run_dir).code == BROKEN_CHAIN


@pytest.mark.slow
def test_hostile_files_end_no_verification(run_dir: Path) -> None:
    """Bytes of any kind anywhere: a report, and never an exception."""
    draw = random.Random(7)
    files = [path for path in sorted(run_dir.parent.rglob("*")) if path.is_file() and path.stat().st_size]
    for number in range(60):
        path = draw.choice(files)
        whole = path.read_bytes()
        data = bytearray(whole)
        match number % 4:
            case 0:
                del data[draw.randrange(len(data)) :]
            case 1:
                data[draw.randrange(len(data))] = draw.randrange(256)
            case 2:
                data += b"[" * 100_000
            case _:
                place = draw.randrange(len(data))
                data[place : place + 8] = b"\xff" * 8
        path.write_bytes(data)
        assert verify(run_dir).text()
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["receipts.jsonl", "rollouts/step_3/rollouts.jsonl", "rollouts/step_3", "rollouts"])
def test_no_link_is_followed(run_dir: Path, tmp_path: Path, name: str) -> None:
    """Not even one to the same content: it leads out of the directory."""
    (run_dir / name).rename(tmp_path / "elsewhere")
    (run_dir / name).symlink_to(tmp_path / "elsewhere")
    assert verify(run_dir).code != SOUND


def test_a_fifo_is_not_waited_for(run_dir: Path) -> None:
    for name in ("receipts.jsonl", "rollouts/step_2/tokens.bin", "../trainer/one/trained.jsonl"):
        (run_dir / name).unlink()
        os.mkfifo(run_dir / name)
    assert verify(run_dir).code == BROKEN_CHAIN


def test_what_is_no_directory_of_the_trainer_is_said(run_dir: Path) -> None:
    shutil.rmtree(run_dir.parent / "trainer/one")
    (run_dir.parent / "trainer/one").touch()
    (finding,) = verify(run_dir).findings
    assert finding.file == "trainer/one/trained.jsonl"


def test_a_run_that_is_being_written_is_left_alone(run_dir: Path) -> None:
    holder = take_lock(run_dir / "orchestrator.lock", "taken")
    assert verify(run_dir).code == BEING_WRITTEN
    os.close(holder)
    assert verify(run_dir).code == SOUND


@pytest.mark.slow
def test_the_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "control").mkdir()
    assert main(["verify", str(run_dir.parent), "--json"]) == SOUND
    head = orjson.loads(capsys.readouterr().out)["head"]
    assert main(["verify", str(run_dir), "--head", head]) == SOUND
    assert "run one, 6 steps: sound" in capsys.readouterr().out
    assert main(["verify", str(run_dir), "--head", "0" * 64]) == BROKEN_CHAIN
    (run_dir / "rollouts/step_2/rollouts.jsonl").write_bytes(b"\x1b[2J{}\n")
    assert main(["verify", str(run_dir)]) == DAMAGED
    assert "\x1b" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(run_dir), "--head", "no hash"])
    assert main(["verify", str(run_dir.parent), "--run", "other"]) == 2
