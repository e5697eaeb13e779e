"""The device of these tests: a GPU, or where there is none a device in the host's memory (`host_device.py`).

What only a GPU can show is skipped on the other.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.host_device import ON_HOST, host_device
from tests.trainer.conftest import dense_directory, moe_directory

__all__ = ["dense_directory", "moe_directory"]


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the device in the host's memory."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if ON_HOST not in os.environ:
        pytest.skip("torch sees no CUDA device; test_host_device.py runs this on another one")
    return host_device()


@pytest.fixture
def gpu() -> torch.device:
    """The GPU; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda")
