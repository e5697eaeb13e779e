"""The record of loads: what an answer names covers all that computed it, and weights have one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference import identity
from counterpoint.inference.loads import STARTED, Load, LoadClaim, Loads, NotOwner, Origin, Stated, digest_of

MINE, OTHERS = LoadClaim("mine", "run 'a'"), LoadClaim("others", "run 'b'")


@given(st.lists(st.sampled_from(["load", "begin", "fail", "change", "request"])))
def test_an_answer_names_every_load_that_may_have_computed_it(happenings: list[str]) -> None:
    """The engine's weights change at some moment between the begin of a load and its end."""
    loads, begun = Loads("instance"), None
    open_requests: list[tuple[Load, set[int]]] = []
    possible = {0}
    for happening in happenings:
        match happening:
            case "request":
                open_requests.append((loads.now("a"), set(possible)))
            case "begin" if begun is None:
                begun = loads.next("a", 1, MINE)
                loads.begin("a", begun)
                possible = possible | {begun.number}
            case "load":
                begun = begun or loads.next("a", 1, MINE)
                loads.complete("a", begun, MINE)
                possible, begun = {begun.number}, None
            case "fail" if begun is not None:
                loads.cancel("a")
                possible, begun = possible - {begun.number}, None
            case "change" if begun is None:
                loads.changed("a")
                possible = {loads.now("a").number}
        open_requests = [(first, seen | possible) for first, seen in open_requests]
        for first, seen in open_requests:
            origin = loads.origin("a", first)
            assert loads.origin(None, STARTED).last == 0, "another name's loads are none of these"
            # A load that failed has changed nothing, and need not be named.
            assert origin.first <= min(seen)
            assert origin.last >= max(possible)


def test_numbers_are_never_used_again() -> None:
    loads = Loads("instance")
    first = loads.next("a", 1, MINE)
    assert loads.next("a", 2, MINE).number == first.number + 1
    loads.complete("a", first, MINE)
    loads.changed("a")
    assert loads.now("a").number == first.number + 2
    assert loads.next(None, 1, MINE).number == 1


def test_a_server_states_the_digest_of_what_it_holds_and_of_nothing_else() -> None:
    loads = Loads("instance")
    assert str(Stated.decode(loads.described(None))) == "the weights that it was started with"
    load = loads.next(None, 7, MINE)
    loads.complete(None, load, MINE)
    assert loads.described(None)["digest"] is None, "it is not read back yet"
    loads.read_back(None, load.number, digest := digest_of("float32", {"": "0f", "1": "a0"}))
    stated = Stated.decode(loads.described(None))
    assert stated == Stated(load.number, 7, "run 'a'", digest)
    assert str(stated) == f"load 1: version 7, by run 'a' (digest {digest})"
    assert digest != digest_of("bfloat16", {"": "0f", "1": "a0"})
    loads.changed(None)
    assert loads.described(None)["digest"] is None


@pytest.mark.parametrize("status", [{}, {"load": "1"}, {"load": 1, "version": "2", "owner": ""}])
def test_what_states_no_load_is_none(status: dict[str, object]) -> None:
    assert Stated.decode(status) is None


@pytest.mark.parametrize("name", [None, "a"])
def test_weights_have_one_owner_until_it_gives_them_up(name: str | None) -> None:
    loads = Loads("instance")
    loads.complete(name, loads.next(name, 1, MINE), MINE)
    for refused in (lambda: loads.next(name, 2, OTHERS), lambda: loads.release(name, OTHERS)):
        with pytest.raises(NotOwner, match="belong to run 'a', not to run 'b'"):
            refused()
    loads.next("another name", 1, OTHERS)
    loads.next(name, 2, LoadClaim("mine", "run 'a', resumed"))
    loads.next(name, 2, LoadClaim("others", "run 'b'", takes_over=True))
    loads.release(name, MINE)
    loads.next(name, 2, OTHERS)


def test_two_processes_with_the_same_key_are_told_from_a_resume() -> None:
    loads, first, second, other = Loads("x"), LoadClaim("k", "one"), LoadClaim("k", "two"), LoadClaim("k", "three")
    loads.complete(None, loads.next(None, 1, first), first)
    assert loads.in_turn_with(None, second) == "", "a resume"
    loads.complete(None, loads.next(None, 2, second), second)
    assert loads.in_turn_with(None, other) == "", "another resume"
    assert loads.in_turn_with(None, second) == ""
    assert loads.in_turn_with(None, first) == "two", "the first one is still there"
    assert loads.in_turn_with("adapter", first) == ""


def test_a_jobs_server_takes_weights_from_who_proves_its_secret_for_this_process_and_this_owner() -> None:
    loads = Loads("instance", b"secret", "servers.key")
    for proof in (
        "",
        "00",
        identity.proof(b"secret", "instance", "others"),
        identity.proof(b"secret", "before", "mine"),
    ):
        with pytest.raises(NotOwner, match=r"belongs to a job, whose identity is in servers\.key"):
            loads.next(None, 1, LoadClaim("mine", "run 'a'", proof=proof))
        with pytest.raises(NotOwner, match="does not prove it"):
            loads.next(None, 1, LoadClaim("mine", "run 'a'", takes_over=True, proof=proof))
    loads.next(None, 1, LoadClaim("mine", "run 'a'", proof=identity.proof(b"secret", "instance", "mine")))


def test_the_engines_own_labels_are_a_second_witness() -> None:
    loads = Loads("instance")
    first = loads.now(None)
    loads.witness({"default"}, first)
    load = loads.next(None, 7, MINE)
    loads.complete(None, load, MINE)
    assert (STARTED.label, load.label) == ("default", "7@1")
    loads.witness(set(), load)  # a vLLM that does not say it
    loads.witness({"default", "7@1"}, first)  # the weights changed on the way
    assert loads.origin(None, first) == Origin("instance", None, 0, 1, load.described)
    for labels in ({"default"}, {"7@1", "step-9"}, {"7@2"}, {"7@"}, {"@" + "9" * 5000}):
        number, began = loads.now(None).number, loads.now(None)
        loads.witness(labels, load if number == 1 else began)
        assert loads.origin(None, began).last == number + 1
        assert "by another way than through its owner" in loads.origin(None, began).described


@pytest.mark.parametrize(
    "fields", [None, [], ["i", None, 2, 1, ""], ["i", None, -1, 1, ""], ["i", 3, 0, 1, ""], ["i", None, 0, "1", ""]]
)
def test_what_is_no_origin_is_refused(fields: object) -> None:
    with pytest.raises(ValueError, match="does not say which weights"):
        Origin.decode(fields)


@pytest.mark.parametrize(
    "change", [{"key": ""}, {"key": "x" * 129}, {"owner": "x" * 301}, {"takes_over": 1}, {"proof": None}]
)
def test_what_is_no_claim_is_refused(change: dict[str, object]) -> None:
    assert LoadClaim.decode(MINE.encode()) == MINE
    with pytest.raises(ValueError, match="a claim is"):
        LoadClaim.decode(MINE.encode() | change)
