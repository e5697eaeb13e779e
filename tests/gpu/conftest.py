"""What only a GPU can show. Everything here is skipped on a machine without one."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.conftest import dense_directory, moe_directory

__all__ = ["dense_directory", "moe_directory"]

DEVICE = torch.device("cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu" and DEVICE.type == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """The GPU."""
    return DEVICE
