"""A directory of a former version, as that version has left it, becomes a database with the same in it, once.

`earlier_version.json` has its files by name, the journal in base64. Commit 251d6fe52c98 has written them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from counterpoint.service.records.ledger import Used
from counterpoint.service.records.store import RecordStore
from counterpoint.service.records.structs import LossRecord, ModelRecord, SamplerRecord, SavedRecord, SessionRecord
from counterpoint.transport.errors import UserError

Kind = TypeVar("Kind")

FORMER: dict[str, str] = json.loads(Path(__file__).with_name("earlier_version.json").read_text())


def former(directory: Path) -> Path:
    for name, text in FORMER.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(text) if path.suffix == ".journal" else text.encode())
    items = directory / "models" / "s1_train_0" / "items"
    items.mkdir()
    (items / "item_8").write_bytes(b"an item")
    return directory


def json_of(name: str, kind: type[Kind]) -> Kind:
    return msgspec.json.decode(FORMER[name].encode(), type=kind)


def test_every_record_is_taken_over_and_its_file_removed(tmp_path: Path) -> None:
    directory = former(tmp_path / "service")
    for _ in "ab":
        store = RecordStore(directory)
        sessions = store.noted(store.sessions())
        assert sorted(sessions, key=lambda each: each.session_id) == [
            json_of(f"sessions/{name}.json", SessionRecord) for name in ("s1", "s2")
        ]
        assert sorted(store.noted(store.models()), key=lambda each: each.model_id) == [
            json_of(f"models/{name}/model.json", ModelRecord) for name in ("s1_train_0", "s1_train_1", "s2_train_0")
        ]
        live = [
            json_of(f"models/s1_train_0/{name}.json", SavedRecord)
            for name in ("weights/a", "sampler_weights/shown", "external_weights/out", "inflight/newest")
        ]
        found = store.all(SavedRecord, "NOT deleted", noted=True)
        assert sorted(found, key=lambda each: each.number) == live
        assert {(each.kind, each.name, each.number) for each in store.deleted()} == {
            ("snapshot", "s7", 7),
            ("weights", "a", 2),
        }
        assert store.knows(json_of("models/s1_train_0/weights/.deleted-2.json", SavedRecord))
        assert store.samplers("s1") == [
            json_of(f"samplers/s1_sample_{number}.json", SamplerRecord) for number in (0, 1)
        ]
        loss = store.loss("s1:loss:0")
        assert loss is not None
        assert bytes(loss.graph) == bytes(json_of("losses/s1_loss_0.json", LossRecord).graph)
        assert store.ledger.days() == {
            "2026-11-28": {"aa/p": Used(trained=30, prompt=3, sampled=2, seconds=1.5), "bb": Used(forward=7)}
        }
        assert store.ledger._sums.counted == {
            "s1:train:0": [[1, 2], [4, 4]],
            "s2:train:0": [[1, 1]],
            "s1:sample:0": [[0, 0]],
        }
        store.database.close()
        left = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
        assert left == {"records.db", "models/s1_train_0/items/item_8"}


def test_a_record_that_cannot_be_read_is_named_and_nothing_is_taken_over(tmp_path: Path) -> None:
    directory = former(tmp_path / "service")
    for name in ("sessions/s1.json", "ledger/ledger.journal"):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(whole[:20] + b"?" + whole[21:])
        with pytest.raises(UserError, match=Path(name).name):
            RecordStore(directory)
        (directory / name).write_bytes(whole)
    assert {*FORMER} <= {str(path.relative_to(directory)) for path in directory.rglob("*")}
    store = RecordStore(directory)
    assert len(store.sessions()) == 2


@pytest.mark.parametrize("has_sum", [False, True])
def test_a_ledger_of_lines_is_taken_over(tmp_path: Path, has_sum: bool) -> None:
    directory, number = tmp_path / "service" / "ledger", 13 * has_sum
    directory.mkdir(parents=True)

    def line(number: int, account: str = "a/p") -> bytes:
        return b'{"trained":1,"day":"2026-11-29","account":"%s","request":"s1:train:0:%d"}\n' % (
            account.encode(),
            number,
        )

    lines = line(2) + line(2) + line(3, "b") + line(4)[:-1]
    (directory / f"{number}.jsonl").write_bytes(lines if has_sum else line(0) + line(1) + lines)
    if has_sum:
        (directory / "13.json").write_bytes(
            b'{"days":{"2026-11-29":{"a/p":{"trained":2,"seconds":0.5}}},"counted":{"s1:train:0":[[0,1]]}}'
        )
        (directory / "12.jsonl").write_bytes(line(1, "left by a kill"))
    store = RecordStore(directory.parent)
    assert store.ledger.days() == {"2026-11-29": {"a/p": Used(trained=3, seconds=0.5 * has_sum), "b": Used(trained=1)}}
    assert store.ledger._sums.counted == {"s1:train:0": [[0, 3]]}
    assert not directory.exists()
