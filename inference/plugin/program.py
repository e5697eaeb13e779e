"""The program of our servers: vLLM's API server, started with less work.

`inference/server.py` starts it with `-m` and vLLM's own arguments. It does what `vllm.entrypoints.openai.api_server` does, but

- imports run without the garbage collector. They make a million objects and no garbage, which full collections would visit
  again and again: a quarter of their time. `resume_gc` ends that;
- the engine is forked where `VLLM_WORKER_MULTIPROC_METHOD` asks for it, also on a CPU, where vLLM would spawn a process that
  imports everything again.

A process that `multiprocessing` spawns imports this module first, so nothing else is imported at the top.
"""

from __future__ import annotations

import gc

gc.disable()


def resume_gc() -> None:
    """Lets the garbage collector run again. What was made until now is never visited, and stays shared after a fork."""
    gc.freeze()
    gc.enable()


def main() -> None:
    """Runs the server to its end, with the arguments of the process."""
    from inference.plugin.forking_server import main as serve

    serve()


if __name__ == "__main__":
    main()
