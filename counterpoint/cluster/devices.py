"""This machine's accelerators: those that a process may use, and the answers of `nvidia-smi` about them."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from counterpoint.transport.process.child import ChildError, run

DEVICES = "CUDA_VISIBLE_DEVICES"

NVIDIA_SECONDS = 10.0
"""Longest time that `nvidia-smi` may take."""


def visible_devices() -> list[str]:
    """Returns the ids of this machine's accelerators: those in `CUDA_VISIBLE_DEVICES`, or those that `nvidia-smi` names."""
    if (listed := os.environ.get(DEVICES)) is not None:
        return [device for device in listed.split(",") if device.strip() and device.strip() != "-1"]
    return ask_nvidia("gpu=index").decode().split()


def ask_nvidia(query: str) -> bytes:
    """Returns the lines of values, without units, with which `nvidia-smi` answers; none if there is no answer in time."""
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
        with suppress(OSError, ChildError):
            answer = run("nvidia-smi", command, NVIDIA_SECONDS, guarded=False)  # it starts nothing itself
            return answer.output if answer.code == 0 else b""
    return b""
