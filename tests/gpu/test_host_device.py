"""What needs no kernel of a GPU passes on the device in the host's memory, too: nothing is on the wrong device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.host_device import ON_HOST, can_be_built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU"),
    pytest.mark.skipif(not can_be_built(), reason="there is no C++ compiler or no ninja to build a device with"),
]

FILES = ["test_steps_on_gpu.py", "test_waits_of_a_step.py", "test_runs_on_gpu.py", "test_experts_on_gpus.py"]


def test_what_needs_no_gpu_passes_on_the_device_in_the_hosts_memory() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files],
        cwd=Path(__file__).parents[2],
        env=plain | {ON_HOST: "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2_000:]
    assert int(passed[1]) >= 30, "all but those that need a GPU's kernels or its allocator"
