"""The host waits for the device once a step, however many rows, samples and adapters the step has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.trainer.ranks import Ranks
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run

pytestmark = pytest.mark.slow

aten = torch.ops.aten

SIZED_BY_VALUES = {aten.nonzero, aten.masked_select, aten.bincount, aten._unique2, aten.repeat_interleave}
"""The size of their result depends on values, which the host has to read."""

READ = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}


class Waits(TorchDispatchMode):
    """Names the operations inside for which the host waits until the device has computed all that was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _waits(func.overloadpacket, args, kwargs, result):
            self.found.append(str(func))
        return result


def _waits(operation: Any, args: Any, kwargs: Any, result: Any) -> bool:
    given = [each for each in args if isinstance(each, Tensor)]
    if operation in SIZED_BY_VALUES | READ:
        return any(each.device.type != "cpu" for each in given)
    if operation is aten.lift_fresh:  # `torch.tensor` with a device
        return bool(result.device.type != "cpu")
    if operation in (aten._to_copy, aten.copy_):
        source, target = (given[0], result) if operation is aten._to_copy else (given[1], given[0])
        in_turn = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return source.device != target.device and (target.device.type == "cpu" or not in_turn)
    if operation in (aten.index, aten.index_put, aten.index_put_):
        indices = [each for each in args[1] if each is not None]
        return given[0].device.type != "cpu" and any(
            each.dtype == torch.bool or each.device.type == "cpu" for each in indices
        )
    return False


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"lora": {"rank": 8}},
        {"loss": {"kind": "grpo"}},
        {"loss": {"kind": "gspo"}},
    ],
    ids=["full", "adapter", "grpo", "gspo"],
)
def test_the_host_waits_once_a_step(
    dense_directory: Path, tmp_path: Path, device: torch.device, training: dict[str, Any]
) -> None:
    lone = make_lone_run(tmp_path, dense_directory, {"max_tokens": 64}, ranks=Ranks(0, 1, device, None), **training)
    lone.train(make_batch(1))
    for step, samples in ((2, 2), (3, 12)):
        with Waits() as waits:
            lone.train(make_batch(step, (20,) * samples))
        assert waits.found == [str(aten._to_copy.default)], f"{samples} samples"


def test_what_makes_the_host_wait_is_found(device: torch.device) -> None:
    values = torch.arange(4.0, device=device)
    with Waits() as waits:
        float(values[0])
        values[values > 1]
        torch.ones(2).to(device)
        torch.tensor([1.0], device=device)
        values.cpu()
        torch.bincount(values.long())
        torch.ones(2).to(device, non_blocking=True)
    assert len(waits.found) == 6, waits.found
