"""The trainer: receives batches, trains each run's weights on them, and publishes the weights for inference."""

import os
from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

# OpenMP's threads spin while they wait for each other. Where inference shares the cores, the awaited thread is not running, and a
# step of 0.3 s took 10 s. OpenMP reads this when torch loads it, so it is set before any module here imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from counterpoint.trainer import lora as lora
    from counterpoint.trainer import runs as runs
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
