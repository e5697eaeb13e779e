"""The runs of a trainer: their admission, slots, sessions and checkpoints.

The manager is loaded when it is first used: the command line reads `trainer/runs/control_files.py` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from trainer.runs.manager import HookError as HookError
    from trainer.runs.manager import MultiRunManager as MultiRunManager
    from trainer.runs.manager import get_multi_run_manager as get_multi_run_manager
    from trainer.runs.manager import setup_multi_run_manager as setup_multi_run_manager
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
