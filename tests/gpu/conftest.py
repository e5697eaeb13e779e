"""The device of these tests: a GPU, or where there is none a device in the host's memory (`host_device.py`).

What only a GPU can show is skipped on the other.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.host_device import can_be_built, host_device
from tests.trainer.conftest import dense_directory, moe_directory

__all__ = ["dense_directory", "moe_directory"]


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the device in the host's memory."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not can_be_built():
        pytest.skip("torch sees no CUDA device, and there is no C++ compiler or no ninja for another one")
    return host_device()


@pytest.fixture
def gpu() -> torch.device:
    """The GPU; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda")
