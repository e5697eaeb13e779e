"""GPUs as `counterpoint plan` is given them: `8xH100-80`, `8xH200`, or any other as `NxNAME-GB`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from counterpoint.transport.errors import UserError

GIB = 2**30

CPU = "cpu"
"""This machine's processor, of which trainer and servers have a core each, where only the speed is planned."""

USABLE_GIB = {
    "H100-80": 79.1,
    "H200-141": 139.8,
    "A100-40": 39.4,
    "A100-80": 79.1,
    "L40S-48": 44.4,
    "B200-192": 178.0,
}
"""What is left of the memory in a GPU's name, in GiB, as drivers report it."""

_FORM = re.compile(r"(?:(\d{1,6})x)?([A-Za-z][A-Za-z0-9]{0,31})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs."""

    count: int
    name: str
    memory: int
    """The memory of one device, in bytes."""


def parse_gpus(text: str) -> Gpus:
    """Reads `8xH100-80`, or `8xH100` where the table has one of that name. Raises `UserError`.

    A GPU that is not in the table has the GB of its name, of 10^9 bytes.
    """
    if text.lower() == CPU:
        return Gpus(1, CPU, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    match = _FORM.fullmatch(text)
    count = int(match[1] or 1) if match else 0
    if match is None or count < 1 or (match[3] is not None and int(match[3]) < 1):
        raise UserError(
            f"--gpus {text!r} is not understood; expected NxNAME-GB such as 8xH100-80, with one of "
            f"{', '.join(USABLE_GIB)} or any other name"
        )
    name = f"{match[2]}-{match[3]}"
    if match[3] is None:
        named = [each for each in USABLE_GIB if each.partition("-")[0] == match[2].upper()]
        if len(named) != 1:
            expected = f"one of {', '.join(named)}" if named else f"its GB, as in {match[2]}-80"
            raise UserError(f"--gpus {text!r} does not say how much memory a GPU has; expected {expected}")
        (name,) = named
    known = USABLE_GIB.get(name.upper())
    return Gpus(count, name, int(known * GIB) if known is not None else int(match[3]) * 10**9)
