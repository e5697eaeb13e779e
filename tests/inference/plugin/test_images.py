"""A stand-in for torchvision: a server of text imports what its model's code imports for images."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
from counterpoint.inference.plugin.images import stand_in_for_torchvision
stand_in_for_torchvision()
import torchvision.transforms.v2
from torchvision.transforms import InterpolationMode
from transformers import AutoImageProcessor
from transformers.utils import is_torchvision_available
assert not is_torchvision_available()
try:
    torchvision.transforms.Resize(InterpolationMode.BICUBIC)
except ModuleNotFoundError as error:
    assert error.name == "torchvision"
    print("needed for images")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed: nothing stands in for it")
def test_transformers_does_not_take_the_stand_in_for_torchvision() -> None:
    """Whichever is imported first."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "needed for images", done.stderr[-2000:]
