"""A device of torch that keeps its tensors apart from the CPU's, as a GPU does, and computes in the host's memory.

On it, a machine without a GPU finds what is on the wrong device. It shows nothing of a GPU's kernels, streams or memory.
"""

from __future__ import annotations

import shutil
import types
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "host"


class _Module(types.ModuleType):
    """`torch.host`: what torch asks of a device's module."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=0: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=0: torch.set_rng_state(state))


def can_be_built() -> bool:
    """Whether there is what compiles it: a C++ compiler and ninja."""
    return shutil.which("c++") is not None and cpp_extension.is_ninja_available()


@cache
def host_device() -> torch.device:
    """Builds the device, which takes half a minute the first time, and registers it for the life of this process."""
    built = cpp_extension.load(
        "counterpoint_host_device", [str(Path(__file__).with_suffix(".cpp"))], extra_cflags=["-O1"]
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(NAME))
    built.register_hooks()
    return torch.device(NAME, 0)
