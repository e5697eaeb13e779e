"""The end of a round of a sharded model's passes, with a made-up model and other ranks; real ones are in `test_sharding.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterpoint.trainer.faults import LacksMemory
from counterpoint.trainer.model import passes
from counterpoint.trainer.model.passes import MOST_IDLE_FAILURES, Passes


class Sharded(nn.Module):
    """What `Passes` uses of a sharded model."""

    def set_custom_all_gather(self, _gather: Any) -> None: ...

    def set_custom_reduce_scatter(self, _scatter: Any) -> None: ...

    def reset_iter_state(self) -> None: ...

    def _get_fsdp_state(self) -> Any:
        return SimpleNamespace(_state_ctx=SimpleNamespace(all_states=[]))


def test_a_rank_whose_idle_passes_fail_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all ranks would begin the same round anew for ever."""
    fails = False

    def compute(*_: Any) -> tuple[Tensor, None]:
        if fails:
            raise torch.OutOfMemoryError("made up")
        return torch.zeros(1, requires_grad=torch.is_grad_enabled()), None

    def another_rank_has_a_row(flags: Tensor) -> None:
        flags[1] = 1

    monkeypatch.setattr(passes, "FSDPModule", Sharded)
    monkeypatch.setattr(passes, "log_probabilities", compute)
    own = Passes(Sharded(), another_rank_has_a_row, torch.device("cpu"))
    own.begin()
    fails = True
    for _ in range(MOST_IDLE_FAILURES - 1):
        assert own.end(failed=False), "the round is discarded on all ranks"
        own.begin()
    with pytest.raises(LacksMemory, match=r"no run's .* trainer\.max_runs"):
        own.end(failed=False)
