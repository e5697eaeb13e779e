"""A device of torch that keeps its tensors apart from the CPU's, as a GPU does, and computes in the host's memory.

On it, a machine without a GPU finds what is on the wrong device, also between ranks. It shows nothing of a GPU's kernels, streams
or memory.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import types
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

NAME = "host"
"""The name of the device, and of the backend of its collective calls."""

ON_HOST = "TESTS_ON_HOST_DEVICE"
"""Set in the environment of tests that use the device, in a process of their own: torch counts its devices once, when it first
differentiates, and the device is then torch's accelerator for all else."""

EXTENSION = "counterpoint_host_device"

SOURCE = str(Path(__file__).with_name("host_device.cpp"))


class _Module(types.ModuleType):
    """`torch.host`: what torch asks of a device's module. Its one stream is that of the CPU."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=0: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=0: torch.set_rng_state(state))
    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)
    synchronize = staticmethod(lambda device=None: None)


def can_be_built() -> bool:
    """Whether there is what compiles it: a C++ compiler and ninja."""
    return shutil.which("c++") is not None and cpp_extension.is_ninja_available()


@cache
def host_device() -> torch.device:
    """Builds the device, which takes half a minute the first time, and registers it for the life of this process."""
    directory = Path(cpp_extension._get_build_directory(EXTENSION, verbose=False))
    with (directory / "one_build").open("w") as one_build:
        fcntl.flock(one_build, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)  # of torch, which would wait for ever for a build that was killed
        built = cpp_extension.load(EXTENSION, SOURCE, extra_cflags=["-O0"], build_directory=str(directory))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(NAME))
    built.register_hooks()
    _keep_ties()

    def collectives(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return built.collectives(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)

    dist.Backend.register_backend(NAME, collectives, devices=[NAME])
    return torch.device(NAME, 0)


def _keep_ties() -> None:
    """Lets `Module.to` move each parameter as it does to a GPU: a tied one stays one. torch swaps it only if it is asked to."""
    move: Any = torch.nn.Module.to

    def to(module: torch.nn.Module, *arguments: Any, **named: Any) -> torch.nn.Module:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return cast(torch.nn.Module, move(module, *arguments, **named))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    torch.nn.Module.to = to


def build() -> None:
    """Builds the device in a process of its own."""
    subprocess.run([sys.executable, "-m", __name__], cwd=Path(__file__).parents[2], check=True, timeout=600)


if __name__ == "__main__":
    host_device()
