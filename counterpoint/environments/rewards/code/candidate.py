"""Calls functions of a program that a model wrote. Runs inside the sandbox, in one process with that program.

The program may do anything there. So whatever this prints is only what the program claims to have returned. It never sees what
was expected.
"""

import json
import os
import signal
import sys
from types import ModuleType
from typing import Any

from counterpoint.environments.rewards.code.plain_data import decode, encode

_LARGEST = 1 << 18
"""Bytes of one encoded outcome."""

_MOST_LATE = 2
"""Calls that may take too long before the others are not made."""


_TOO_LONG = "it took too long"


class _Late(BaseException):
    """A call took more than its processor time."""


def _expire(number: int, frame: object) -> None:
    raise _Late


def _outcome(namespace: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    args, kwargs = (
        [decode(each) for each in call["args"]],
        {name: decode(each) for name, each in call["kwargs"].items()},
    )
    try:
        value = namespace[call["name"]](*args, **kwargs)
        return {"value": encode(value), "after": [encode(each) for each in args]}
    except _Late:
        return {"failed": _TOO_LONG}
    except KeyError as error:
        if call["name"] in namespace:
            return {"raised": "KeyError", "text": str(error)[:200]}
        return {"failed": f"there is no function {call['name']}"}
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        return {"raised": type(error).__name__, "text": str(error)[:200]}


def main() -> None:
    """Reads `source`, `calls`, `cpu_seconds` and `mark`; prints one marked line for each call."""
    request = json.loads(sys.stdin.buffer.read())
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, mode) for mode in "rww")  # noqa: SIM115 - as long as the process
    signal.signal(signal.SIGPROF, _expire)

    def answer(outcome: dict[str, Any]) -> None:
        line = json.dumps(outcome)
        if len(line) > _LARGEST:
            line = json.dumps({"failed": "what it returned is too large"})
        left = f"\n{request['mark']}{line}\n".encode()
        while left:
            left = left[os.write(1, left) :]

    program = ModuleType("solution")
    sys.modules["solution"] = program
    fault = ""
    signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
    try:
        exec(compile(request["source"], "solution.py", "exec"), program.__dict__)
    except _Late:
        fault = "the program took too long"
    except BaseException as error:  # noqa: BLE001 - likewise
        fault = f"the program raised {type(error).__name__}: {error}"[:200]
    signal.setitimer(signal.ITIMER_PROF, 0)
    late = 0
    for call in request["calls"]:
        if fault:
            answer({"failed": fault})
            continue
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        outcome = _outcome(program.__dict__, call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(outcome)
        late += outcome.get("failed") == _TOO_LONG
        if late == _MOST_LATE:
            fault = "earlier calls took too long"
    os._exit(0)  # without whatever the program left to run at the end


if __name__ == "__main__":
    main()
