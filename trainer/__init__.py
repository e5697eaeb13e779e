"""The trainer: takes batches off the wire, trains each run's weights on them, and publishes the result for inference."""

import os

# OpenMP's threads spin while they wait for each other. Where inference shares the cores, the one waited for is not running, and a
# step of 0.3 s was seen to take 10 s. OpenMP reads this when torch loads it, so it is set before anything here imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
