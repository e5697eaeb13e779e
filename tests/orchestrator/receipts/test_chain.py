"""Repairs of the chain of receipts, whatever interrupts them."""

from __future__ import annotations

import errno
from pathlib import Path

import orjson
import pytest

from counterpoint.orchestrator.receipts.chain import RECEIPT_FILE, repair
from counterpoint.transport.files import json_lines
from counterpoint.transport.files.atomic import publish_directory

NEWEST, KEEP, EVERY = 25, 2, 10


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints that `keep_every` keeps, killed between the last commit and the end of its receipt's line."""
    lines = [orjson.dumps({"step": step, "previous": f"of {step - 1}"}) for step in range(1, NEWEST + 1)]
    for step, line in enumerate(lines, 1):
        if step > NEWEST - KEEP or step % EVERY == 0:
            with publish_directory(tmp_path / "checkpoints" / f"step_{step}") as partial:
                (partial / RECEIPT_FILE).write_bytes(line)
    (tmp_path / "receipts.jsonl").write_bytes(b"".join(line + b"\n" for line in lines[:-1]) + lines[-1][:7])
    return tmp_path


def test_a_full_disk_while_the_chain_is_repaired_loses_no_receipt(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, buffers: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(json_lines, "write_buffers", fail)
        with pytest.raises(OSError, match="No space"):
            repair(run_dir, NEWEST)
    repair(run_dir, NEWEST)
    lines = (run_dir / "receipts.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == list(range(1, NEWEST + 1))
