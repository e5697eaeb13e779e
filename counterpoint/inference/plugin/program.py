"""The program of our servers: vLLM's API server, started and ended with less work.

`counterpoint/inference/server.py` starts it with `-m` and vLLM's own arguments. It does what `vllm.entrypoints.openai.api_server`
does, but

- imports run without the garbage collector. They make a million objects and no garbage, which full collections would visit
  again and again: a quarter of their time. `resume_gc` ends that;
- where nothing is compiled, neither the compiler is imported nor what serves other purposes: a third of the rest (`UNUSED`);
- it and its engine wake soon on a busy machine (`transport/process/priority.py`);
- of openai, whose types vLLM's routes have, the client and the types of its other services are left out (`LATE`);
- transformers searches less while it is imported (`transport/process/imports.py`);
- the engine is forked where `VLLM_WORKER_MULTIPROC_METHOD` asks for it, also on a CPU, where vLLM would spawn a process that
  imports everything again.

A process that `multiprocessing` spawns imports this module first, so nothing else is imported at the top.
"""

from __future__ import annotations

import gc

gc.disable()

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

UNUSED = ("torch._inductor.lowering", "scipy", "sklearn", "accelerate", "boto3", "pandas")
"""What servers on a CPU do not need. vLLM imports the compiler's lowerings to change them. vLLM and transformers use scipy, if
there is one, to resample sound for one model (Phi-4 multimodal), and in losses; accelerate to divide a model over devices, boto3
to load one from S3, pandas for AMD's kernels."""

LATE = ("openai", "openai.types")
"""Packages of which single modules are imported. What the packages themselves import would be an eighth of a server's imports."""

UNUSED_WITHOUT = {"opentelemetry": "otlp", "ray": "ray"}
"""What else none needs, unless an argument has this word: to send its own traces, and to have workers on a Ray cluster.
vLLM also imports Ray to ask it whether it runs there."""


YOUNG_OBJECTS = 20_000
"""Objects after which the youngest are searched for cycles. At Python's 700 it took a tenth of the API server's CPU: a model call
in flight has about a hundred, and next to none of them are in a cycle."""


def resume_gc() -> None:
    """Lets the garbage collector run again. What was made until now is never visited, and stays shared after a fork."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    gc.enable()


def main() -> None:
    """Runs the server to its end, with the arguments of the process, or after `--held` with those that its order has."""
    import sys

    from counterpoint.transport.process.imports import with_room
    from counterpoint.transport.process.priority import wake_soon

    wake_soon()
    if sys.argv[1:2] == ["--held"]:
        with quick_imports():
            with_room(_import_torch)
        take_order()
    with quick_imports():
        with_room(_serve)

    from counterpoint.transport.process.ending import end_at_once

    end_at_once(0, wait_for_threads=False)


def _import_torch() -> None:
    import torch  # noqa: F401 - for all that follows


def take_order() -> None:
    """Takes the arguments and the environment of this process from its standard input, and ends if it has none.

    Who started it has the other end (`counterpoint/inference/early_program.py`), and its guardian does not let it outlive that.
    """
    import json
    import os
    import sys

    given = sys.stdin.buffer.read()
    if not given:
        os._exit(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    order = json.loads(given)
    sys.argv[1:] = order["arguments"]
    for name in order["without"]:
        os.environ.pop(name, None)
    os.environ.update(order["environment"])


def quick_imports() -> AbstractContextManager[object]:
    """Returns a block in which vLLM is imported in the least time that this server needs for it."""
    from contextlib import ExitStack

    from counterpoint.transport.process.imports import (
        late_packages,
        quick_import_of_transformers,
        quick_modules_of_frames,
        without_modules,
    )

    block = ExitStack()
    block.enter_context(without_modules(*unused(), to=("vllm", "transformers")))
    block.enter_context(late_packages(*LATE))
    block.enter_context(quick_import_of_transformers())
    block.enter_context(quick_modules_of_frames())
    return block


def _serve() -> None:
    from counterpoint.inference.plugin.forking_server import main as serve

    serve()  # it imports more, and so does the engine


def unused() -> tuple[str, ...]:
    """Returns the modules that this server does not need."""
    import os
    import sys

    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        return ()
    if any(word.startswith("--config") for word in sys.argv):  # a file with arguments
        return UNUSED
    return (*UNUSED, *(name for name, of in UNUSED_WITHOUT.items() if not any(of in word for word in sys.argv)))


if __name__ == "__main__":
    main()
