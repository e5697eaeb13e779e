"""Where workers are: bundles get a place before their workers are created, and another one when their node is lost.

A node that is lost several times within a window is set aside. What becomes of the workers of a lost node is decided in
`restarts`.
"""

from __future__ import annotations

from cluster.manager.events import LONGEST_REASON, Allocate, Instruction, Outcome, Release
from cluster.manager.ledger import Ledger
from cluster.manager.state import BundleRecord, Place
from cluster.spec import JobSpec, Resources, role_of, sub_master_name

LOSSES = 3
"""A node that is lost so often within the window is set aside."""

LOSS_WINDOW_SECONDS = 600.0

FIRST_RETRY_SECONDS = 1.0
"""Between an attempt to place a bundle and the next; doubled for each further one."""

LONGEST_RETRY_SECONDS = 30.0


def needs_of(spec: JobSpec, worker: str) -> Resources:
    """Returns what a worker needs; a SubMaster needs nothing."""
    role = role_of(worker)
    return Resources() if worker == sub_master_name(role) else spec.role(role).resources


def allocate(ledger: Ledger, bundle: BundleRecord) -> list[Instruction]:
    """Asks for a place, once more if it had one: that is given back first."""
    again = bundle.place in (Place.ALLOCATED, Place.RELEASED)
    bundle.place = Place.ALLOCATING
    bundle.attempt += 1
    ledger.set_deadline(bundle, None)
    ledger.set_node(bundle, "")
    return [*([Release(bundle.name)] if again else []), request(ledger.state.set_aside, bundle)]


def request(set_aside: list[str], bundle: BundleRecord) -> Allocate:
    """Returns the request for the bundle's place."""
    return Allocate(bundle.name, bundle.attempt, tuple(bundle.workers), tuple(set_aside))


def release(ledger: Ledger, bundle: BundleRecord) -> list[Instruction]:
    """Gives the place back, or the wish for one."""
    if bundle.place in (Place.NONE, Place.RELEASED):
        return []
    bundle.place, bundle.failures = Place.RELEASED, 0
    ledger.set_deadline(bundle, None)
    ledger.set_node(bundle, "")
    return [Release(bundle.name)]


def use_all_nodes(ledger: Ledger) -> bool:
    """Uses nodes that were set aside again, before something is given up for want of them; False if there are none."""
    had = bool(ledger.state.set_aside)
    ledger.state.set_aside.clear()
    ledger.state.node_losses.clear()
    return had


def retry_later(ledger: Ledger, bundle: BundleRecord, at: float) -> None:
    """Asks for the place again after a pause."""
    bundle.place = Place.RETRYING
    pause = min(FIRST_RETRY_SECONDS * 2 ** min(bundle.failures, 10), LONGEST_RETRY_SECONDS)
    bundle.failures += 1
    ledger.set_deadline(bundle, at + pause)


def no_place(bundle: BundleRecord, reason: str) -> Outcome:
    """Returns the outcome of a job of which a bundle can never be placed."""
    workers = ", ".join(bundle.workers[:3]) + (", ..." if len(bundle.workers) > 3 else "")
    return Outcome(1, f"there is no place for {workers}: {reason}"[:LONGEST_REASON])


def lose_node(ledger: Ledger, node: str, at: float) -> list[BundleRecord]:
    """Counts the loss; returns the bundles that were there, and have no node now. None if it was empty, or lost before."""
    names = sorted(ledger.bundles_on.get(node, ()))
    if not names:
        return []
    state = ledger.state
    losses = [earlier for earlier in state.node_losses.get(node, []) if earlier > at - LOSS_WINDOW_SECONDS] + [at]
    state.node_losses[node] = losses[-LOSSES:]
    if len(losses) >= LOSSES and node not in state.set_aside:
        state.set_aside.append(node)
    bundles = [state.bundles[name] for name in names]
    for bundle in bundles:
        ledger.set_node(bundle, "")
    return bundles
