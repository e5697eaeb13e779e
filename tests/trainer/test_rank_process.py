"""What a trainer's process sets before it imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


STARTS = {
    "ranks": "import counterpoint.trainer.rank_process",
    "alone": "import pathlib, sys, tempfile, types\n"
    "sys.modules['counterpoint.trainer.train'] = types.SimpleNamespace(train=lambda *_: 0)\n"
    "from counterpoint.trainer import config, launch\n"
    "launch.run(config.TrainerConfig(output_dir=pathlib.Path(tempfile.mkdtemp()), model='.'), lambda: None)",
}
"""A rank among several, and the trainer of one rank."""


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}])
def test_a_rank_has_memory_that_grows_unless_the_environment_says_otherwise(given: dict[str, str], start: str) -> None:
    program = f"{start}\nimport torch\nprint(torch._C._accelerator_getAllocatorSettings())"
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain | given, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ([*given.values()] or ["expandable_segments:True"])
