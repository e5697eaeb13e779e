"""Why vLLM ended is found in its output, whatever it logs after the exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.inference.root_cause import is_of_input, is_of_machine, root_cause

MEMORY = """\
(EngineCore pid=7) ERROR 11-25 23:07:45 [core.py:1366] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-25 23:07:45 [core.py:1366]     raise ValueError(
(EngineCore pid=7) ERROR 11-25 23:07:45 [core.py:1366] ValueError: less memory than is asked for
(APIServer pid=6) WARNING 11-25 23:07:46 [system_utils.py:299] This can cause errors like `OSError: [Errno 24] Too many`
(APIServer pid=6)     raise RuntimeError(
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
HEADS = """\
(EngineCore pid=7) ERROR 11-28 02:32:49 [core.py:1512] RuntimeError: Unsupported CPU attention configuration: head_dim=20
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""
ARCHITECTURE = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['NopeForCausalLM'] are not supported for now. [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
PACKAGE = """\
(APIServer pid=6) ERROR 11-28 14:00:01 [registry.py:1151] ModuleNotFoundError: No module named 'torchvision'
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['NopeForConditionalGeneration'] failed to be inspected. Please check the logs.
"""
ARGUMENT = "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --nope\n"
KILLED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}\n"


@pytest.mark.parametrize(
    ("output", "cause", "of_input"),
    [
        (MEMORY, "ValueError: less memory than is asked for", False),
        (HEADS, "RuntimeError: Unsupported CPU attention configuration: head_dim=20", True),
        (
            ARCHITECTURE,
            "ValidationError: Model architectures ['NopeForCausalLM'] are not supported for now. [type=value_error]",
            True,
        ),
        (PACKAGE, "ModuleNotFoundError: No module named 'torchvision'", True),
        (ARGUMENT, "unrecognized arguments: --nope", False),
        (KILLED, KILLED.strip(), False),
        ("NotImplementedError: a faster path\n" + KILLED, KILLED.strip(), False),
        ("OSError: [Errno 95] Operation not supported\n", "OSError: [Errno 95] Operation not supported", False),
        (
            "RuntimeError: not bound (errno: 97 - Address family not supported by protocol)\n",
            "RuntimeError: not bound (errno: 97 - Address family not supported by protocol)",
            False,
        ),
        (
            "RuntimeError: CUDA error: operation not supported\n",
            "RuntimeError: CUDA error: operation not supported",
            False,
        ),
        ("INFO: all is well\n", None, None),
        (MEMORY + "KeyboardInterrupt: terminated\n", "ValueError: less memory than is asked for", False),
    ],
)
def test_the_cause_in_an_output(tmp_path: Path, output: str, cause: str | None, of_input: bool | None) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier start\n" + output)
    found = root_cause(log, start=len("ValueError: of an earlier start\n"))
    assert found == cause
    assert of_input is None or is_of_input(found or "") is of_input


def test_memory_that_the_machine_has_not_is_not_waited_for() -> None:
    said = (
        "ValueError: Available memory on node 0 (20.1/23.5 GiB) on kv cache allocation is less than requested memory for kv "
        "({} GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
    )
    assert not is_of_machine(said.format("500.0"))
    assert is_of_machine(said.format("21.0"))
    assert is_of_machine(said.format("21.0/22.3"))
    assert is_of_machine(
        "ValueError: Free memory on device cuda:0 (5.0/79.2 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.3 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )


@pytest.mark.parametrize(
    ("cause", "of_machine"),
    [
        ("OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): in use", True),
        ("PermissionError: [Errno 13] Permission denied: '/models/one/config.json'", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/one/config.json'", False),
        ("NotADirectoryError: [Errno 20] Not a directory: '/models/one/config.json'", False),
        ("safetensors_rust.SafetensorError: I/O error: Stale file handle (os error 116)", True),
        ("torch.distributed.DistNetworkError: the client socket has timed out", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("torch.AcceleratorError: the device is unsupported at present", True),
        ("ConnectionResetError: the other side went away", True),
        ("MemoryError: Unable to allocate 3.00 GiB", True),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp", True),
        ("ValueError: the field errno is wrong", False),
        ("KeyError: 'rope_scaling'", False),
        ("unrecognized arguments: --other", False),
    ],
)
def test_what_may_pass_is_told_by_number_type_and_last_by_words(cause: str, of_machine: bool) -> None:
    assert is_of_machine(cause) is of_machine
    assert not is_of_input(cause)


@pytest.mark.parametrize(
    "cause",
    [
        "NotImplementedError: no kernel",
        "pydantic_core.ValidationError: Value is wrong",
        "ValueError: fp4 is not supported",
    ],
)
def test_what_no_other_start_would_take(cause: str) -> None:
    assert is_of_input(cause)
    assert not is_of_machine(cause)
