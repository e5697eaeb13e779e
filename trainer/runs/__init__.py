"""The runs of a trainer: their admission, slots, sessions and checkpoints.

The manager is loaded when it is first used: the command line reads `trainer/runs/control_files.py` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.runs.manager import MultiRunManager, get_multi_run_manager, setup_multi_run_manager

__all__ = ["MultiRunManager", "get_multi_run_manager", "setup_multi_run_manager"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer.runs' has no {name!r}")
    from trainer.runs import manager

    return getattr(manager, name)
