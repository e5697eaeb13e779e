"""What the trainer notes of each step names the newest receipt that the run has written, which is not trusted."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from counterpoint.run.receipts import head_of
from counterpoint.trainer.runs import witness


@pytest.mark.parametrize(
    ("content", "newest"),
    [
        (b"", b""),
        (b'{"step":1}\n', b'{"step":1}'),
        (b'{"step":1}\n{"step":2}\n', b'{"step":2}'),
        (b'{"step":1}\n{"step":2', b'{"step":1}'),
        (b"1" * 40, b""),
        (b"1\n" + b"2" * 20 + b"\n" + b"3" * 9, b"2" * 20),
        (b"1\n" + b"2" * 33 + b"\n", b""),
        (b"\n\n", b""),
    ],
    ids=["empty", "one", "two", "torn", "no line", "longer than a block", "too long", "empty lines"],
)
def test_the_newest_whole_receipt_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, newest: bytes
) -> None:
    monkeypatch.setattr(witness, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(witness, "MOST_RECEIPT_BYTES", 32)
    path = tmp_path / "run_one" / "receipts.jsonl"
    weights = path.parent / "broadcast"
    weights.mkdir(parents=True)
    (weights / "probe.json").write_bytes(orjson.dumps({"digests": {}}))
    path.write_bytes(content)
    witness.note(tmp_path, "one", 1, "batch", weights, durable=False)
    noted = orjson.loads((tmp_path / "trainer/one/trained.jsonl").read_bytes())
    assert (noted["step"], noted["batch"]) == (1, "batch")
    assert noted["head"] == (head_of(newest) if newest else "")


def test_receipts_that_are_no_regular_file_are_not_read(tmp_path: Path) -> None:
    weights = tmp_path / "run_one" / "broadcast"
    weights.mkdir(parents=True)
    (weights / "probe.json").write_bytes(orjson.dumps({"digests": {}}))
    os.mkfifo(tmp_path / "run_one" / "receipts.jsonl")
    witness.note(tmp_path, "one", 1, "batch", weights, durable=False)
    assert orjson.loads((tmp_path / "trainer/one/trained.jsonl").read_bytes())["head"] == ""
