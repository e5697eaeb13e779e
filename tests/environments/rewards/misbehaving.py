"""A reward function that does what none should, for a process of its own. Imports little, since every process imports it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def misbehaves(example: Any, completion: str, state: dict[str, Any]) -> Any:
    match completion:
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "print":
            print("\x00\x00\x00\x00" * 1000)
            sys.stdout.buffer.write(b"\xff" * 10_000)
            sys.stdout.flush()
        case "memory":
            bytearray(2**40)
        case "large":
            return "a" * 2**24
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
    return 0.5
