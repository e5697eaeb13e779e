"""What a rank's process sets before it imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}])
def test_a_rank_has_memory_that_grows_unless_the_environment_says_otherwise(given: dict[str, str]) -> None:
    program = "import trainer.rank_process, torch; print(torch._C._accelerator_getAllocatorSettings())"
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain | given, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ([*given.values()] or ["expandable_segments:True"])
