"""Every fault of a network or a gateway, in every operation of every store that is reached by one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from counterpoint.sweep.claim import SweepTarget, claim_and_run
from counterpoint.sweep.lock import step_lock
from counterpoint.sweep.record import RecordState
from counterpoint.sweep.status import sweep_status
from counterpoint.sweep.store import Store, StoreBusy, StoreUnavailable
from counterpoint.sweep.stores.gs import GoogleStore
from counterpoint.sweep.stores.s3 import S3Store
from tests.sweep.faulty_wire import CUT_ANSWERS, NO_ANSWERS, OTHER_ANSWERS, Wire, faulty_wire

pytestmark = pytest.mark.slow  # the servers' imports, and answers that do not come

FAULTS = (*NO_ANSWERS, *CUT_ANSWERS, *OTHER_ANSWERS)
PATIENCE_SECONDS = 0.2
DATA = b'{"a": "record that may be cut in two"}'

_numbers = itertools.count()


@dataclass
class Faulty:
    """A store behind a wire that fails, and the same one past it."""

    root: str
    store: Store
    true: Store
    wire: Wire


@pytest.fixture(params=["s3", "gs"])
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """A store of each kind that is reached by a network."""
    monkeypatch.setattr("counterpoint.sweep.store.FIRST_PAUSE_SECONDS", 0.01)
    name, variable = f"faulty-{next(_numbers)}", "STORAGE_EMULATOR_HOST"
    kind: Callable[[str, str], Store] = GoogleStore
    if request.param == "s3":
        kind, variable = S3Store, "AWS_ENDPOINT_URL"
    request.getfixturevalue("s3_bucket" if request.param == "s3" else "google_bucket")
    true = kind("bucket", name)
    with faulty_wire(os.environ[variable]) as (address, wire):
        monkeypatch.setenv(variable, address)
        monkeypatch.setattr("counterpoint.sweep.stores.s3.READ_SECONDS", PATIENCE_SECONDS)
        yield Faulty(f"{request.param}://bucket/{name}", kind("bucket", name), true, wire)


OPERATIONS: dict[str, Callable[[Store, str, str], Any]] = {
    "read": lambda store, key, version: store.read(key),
    "create": lambda store, key, version: store.write(f"new-{key}", DATA, None),
    "replace": lambda store, key, version: store.write(key, b"other", version),
    "list": lambda store, key, version: sorted(store.keys()),
    "discard": lambda store, key, version: store.discard(key),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_wire_passes_or_changes_nothing(
    faulty: Faulty, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an answer is never taken for a whole one, nor a gateway's for the store's."""
    for operation, is_carried_out in itertools.product(OPERATIONS, (False, True)):
        key = f"key-{next(_numbers)}"
        version = faulty.true.write(key, DATA, None)
        faulty.wire.spoil(fault, 1, is_carried_out)
        try:
            with monkeypatch.context() as patch:
                patch.setattr("counterpoint.sweep.stores.gs.TIMEOUT", (5, PATIENCE_SECONDS))
                result = OPERATIONS[operation](faulty.store, key, version)
        except (StoreUnavailable, StoreBusy):
            pass
        else:
            written = faulty.true.read(f"new-{key}" if operation == "create" else key)
            expected = {
                "read": written,
                "list": sorted(faulty.true.keys()),
                "discard": None,
            }.get(operation, written and written.version)
            assert result == expected, (operation, is_carried_out)
        assert faulty.wire.left == 0, "the request reached the wire"
        faulty.true.discard(f"new-{key}")
        faulty.true.discard(key)


@pytest.mark.parametrize("fault", ["reset", "503", "cut in the body", "reset in the body", "a page"])
def test_a_sweep_and_a_lock_outlast_a_fault_of_the_wire(faulty: Faulty, fault: str) -> None:
    ran: list[str] = []

    def body(target: SweepTarget[None]) -> None:
        ran.append(target.target_id)
        faulty.wire.spoil(fault, 2, is_carried_out=bool(len(ran) % 2))

    faulty.wire.spoil(fault, 2, is_carried_out=True)
    claim_and_run(faulty.root, [SweepTarget(name, None) for name in "ab"], body, heartbeat=0.5, lease=20.0)
    assert sorted(ran) == ["a", "b"]
    faulty.wire.spoil(fault, 2)
    with step_lock(f"{faulty.root}/c", heartbeat=0.5, lease=20.0):
        ran.append("c")
    faulty.wire.spoil(fault, 2)
    assert [each.state for each in sweep_status(faulty.root)] == [RecordState.SUCCESS] * 3
