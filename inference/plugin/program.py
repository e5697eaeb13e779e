"""The program of our servers: vLLM's API server, started and ended with less work.

`inference/server.py` starts it with `-m` and vLLM's own arguments. It does what `vllm.entrypoints.openai.api_server` does, but

- imports run without the garbage collector. They make a million objects and no garbage, which full collections would visit
  again and again: a quarter of their time. `resume_gc` ends that;
- where nothing is compiled, the compiler is not imported, nor is scipy: a quarter of the rest (`UNUSED`);
- transformers searches the files of its models once, not twice (`transport/process/imports.py`);
- the engine is forked where `VLLM_WORKER_MULTIPROC_METHOD` asks for it, also on a CPU, where vLLM would spawn a process that
  imports everything again.

A process that `multiprocessing` spawns imports this module first, so nothing else is imported at the top.
"""

from __future__ import annotations

import gc

gc.disable()

UNUSED = ("torch._inductor.lowering", "scipy", "sklearn")
"""What servers on a CPU do not need. vLLM imports the compiler's lowerings to change them. vLLM and transformers use scipy, if
there is one, to resample sound for one model (Phi-4 multimodal), and in losses."""


def resume_gc() -> None:
    """Lets the garbage collector run again. What was made until now is never visited, and stays shared after a fork."""
    gc.freeze()
    gc.enable()


def main() -> None:
    """Runs the server to its end, with the arguments of the process."""
    import os

    from transport.process.imports import one_scan_of_transformers, without_modules

    unused = UNUSED if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else ()
    with without_modules(*unused, to=("vllm", "transformers")), one_scan_of_transformers():
        from inference.plugin.forking_server import main as serve

    serve()
    _end()


def _end() -> None:
    """Ends the process at once. The interpreter would free the million objects one by one, for half a second."""
    import atexit
    import os
    import sys

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
