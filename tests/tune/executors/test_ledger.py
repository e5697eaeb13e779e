from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.ledger import ResourceLedger

needs = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from([0.1, 0.5, 1.0, 3.0]),
        "gpu": st.sampled_from([0.1, 0.5, 1.0, 2.0]),
        "magic": st.sampled_from([1 / 3, 2.0]),
    },
)


@settings(max_examples=100)
@given(st.lists(needs, max_size=30), st.randoms(use_true_random=False))
def test_nothing_is_oversubscribed_and_everything_comes_back(asked: list[dict[str, float]], random: object) -> None:
    totals = {"cpu": 4.0, "magic": 2.0}
    ledger = ResourceLedger(totals, ["0", "1", "2"])
    held: dict[str, tuple[dict[str, float], list[str]]] = {}
    for index, wanted in enumerate(asked):
        if ledger.fits(wanted):
            held[str(index)] = (wanted, ledger.take(str(index), wanted))
        else:
            with pytest.raises(TuneError, match="not free now"):
                ledger.take(str(index), wanted)
            if held:
                ledger.give_back(random.choice(sorted(held)))  # type: ignore[attr-defined]  # hypothesis's own
                held = {holder: given for holder, given in held.items() if holder in ledger._held}
        for name, total in {**totals, "gpu": 3.0}.items():
            assert sum(wanted.get(name, 0.0) for wanted, _ in held.values()) <= total + 1e-3
        shares: dict[str, float] = {}
        for wanted, devices in held.values():
            for device in devices:
                shares[device] = shares.get(device, 0.0) + min(wanted["gpu"], 1.0)
        assert all(share <= 1.001 for share in shares.values())
    for holder in list(held):
        ledger.give_back(holder)
    assert ledger.fits({"cpu": 4.0, "gpu": 3.0, "magic": 2.0})


def test_what_can_never_be_had_is_said() -> None:
    ledger = ResourceLedger({"cpu": 2.0}, ["0"])
    assert ledger.impossible({"cpu": 2.0, "gpu": 1.0}) is None
    assert ledger.impossible({"cpu": 3.0}) == "it needs 3 cpu, and there are 2 in all"
    assert "it needs 1 tpu, and there are 0 in all; known are cpu, gpu" in str(ledger.impossible({"tpu": 1.0}))
    assert "whole devices" in str(ResourceLedger({}, ["0", "1"]).impossible({"gpu": 1.5}))
    assert str(ledger) == "0/2 cpu, 0/1 gpu"
