"""The form of a batch: all its samples have routed experts of one shape or none, and the same optional columns.

Servers of one fleet may be started with different settings, a resumed run may have other servers or another teacher than its
ready groups had, and an environment may set a column in some examples only. Each such rollout is sound by itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from counterpoint.orchestrator.step.advantages import Advantage
from counterpoint.transport.records import Rollout

logger = logging.getLogger(__name__)


def choose_trained(step: int, rollouts: Sequence[Rollout], advantage: Advantage) -> None:
    """Fails the rollouts of another form, then makes advantages of a step relative to the others. Call it once for a step."""
    fail_other_forms(step, rollouts)
    advantage.over_step(rollouts)


def fail_other_forms(step: int, rollouts: Sequence[Rollout]) -> None:
    """Sets `error` of the rollouts with another form than most of them, and logs a warning with the first one."""
    kept = [rollout for rollout in rollouts if rollout.error is None and rollout.filtered_by is None]
    forms = Counter(map(_form, kept))
    if len(forms) < 2:
        return
    usual = forms.most_common(1)[0][0]
    others = [rollout for rollout in kept if _form(rollout) != usual]
    for rollout in others:
        server = rollout.turns[0].server or "a server"
        rollout.error = f"it came from {server} with {_form(rollout)}; most rollouts of its batch have {usual}"
    logger.warning(
        "step %d: %d of %d rollouts are not trained on, such as %s: %s. Servers of a fleet need the same settings "
        "(`return_routed_experts`), and an environment sets a column in all rollouts or in none",
        step, len(others), len(kept), others[0].rollout_id, others[0].error,
    )  # fmt: skip


def _form(rollout: Rollout) -> str:
    """Returns the form for comparison and for people. All turns of a finalized rollout have that of the first."""
    turn = rollout.turns[0]
    routing = turn.routed_experts
    experts = "no routed experts" if routing is None else f"routed experts {list(routing.shape[1:])} of {routing.dtype}"
    return f"{experts} and {', '.join(sorted(turn.columns)) or 'no column'}"
