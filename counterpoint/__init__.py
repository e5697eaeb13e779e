"""What your own code imports. The names here are public and stay; where in the other packages they are defined may change.

    from counterpoint.environments import Example
    from counterpoint import tune

`import counterpoint` loads nothing else: each name is imported at its first use. There is no logic here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint import advantages as advantages
    from counterpoint import cluster as cluster
    from counterpoint import environments as environments
    from counterpoint import errors as errors
    from counterpoint import losses as losses
    from counterpoint import models as models
    from counterpoint import orchestrator as orchestrator
    from counterpoint import rewards as rewards
    from counterpoint import service as service
    from counterpoint import sweep as sweep
    from counterpoint import testing as testing
    from counterpoint import trainer as trainer
    from counterpoint import tune as tune
    from counterpoint.job.read import read as read
    from counterpoint.job.start import start as start
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
