"""The runs of a trainer: their admission, slots, sessions and checkpoints.

The manager is loaded when it is first used: the command line reads `counterpoint/trainer/runs/control_files.py` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.run.config import RunConfig as RunConfig
    from counterpoint.run.trained import TrainedRun as TrainedRun
    from counterpoint.trainer.runs.manager import HookError as HookError
    from counterpoint.trainer.runs.manager import MultiRunManager as MultiRunManager
    from counterpoint.trainer.runs.manager import get_multi_run_manager as get_multi_run_manager
    from counterpoint.trainer.runs.manager import setup_multi_run_manager as setup_multi_run_manager
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
