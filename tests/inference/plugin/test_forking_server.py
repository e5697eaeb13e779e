"""The engine of a server on a CPU is forked: what it shares with the API server, and what it must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.inference.plugin import program
from counterpoint.transport.process.launch import live_processes
from tests.support.vllm_server import ServerProcess

REGISTERS = """
import gc, sys
from counterpoint.inference.plugin import program
assert not gc.isenabled(), "imports run without it"
with program.quick_imports():
    import counterpoint.inference.plugin.forking_server
    from vllm.compilation.decorators import support_torch_compile
late = {"vllm.entrypoints.launchers.app", "counterpoint.inference.plugin.routes"}
never = {"ray", "scipy", "pandas", "torch._inductor.lowering", "opentelemetry"}
assert not (late | never) & sys.modules.keys(), (late | never) & sys.modules.keys()
from counterpoint.inference.plugin import register
register()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
"""

FORKS = """
import os
from counterpoint.inference.plugin import forking_server
forking_server.ROUTES = ()
for engines in (2, 1):
    importing = forking_server.import_beside(engines)
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    assert (importing.ident is None) == (engines == 2), engines
"""


def processes_of(server: ServerProcess) -> tuple[int, int]:
    """The ids of vLLM's API server and of its engine."""
    parents = {pid: parent for pid, _, parent, _ in live_processes()}
    (guardian,) = [pid for pid, parent in parents.items() if parent == server.process.pid]
    (api,) = [pid for pid, parent in parents.items() if parent == guardian]
    (engine,) = [
        pid
        for pid, parent in parents.items()
        if parent == api and Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Engine")
    ]
    return api, engine


def sockets_of(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    return {target for target in found if target.startswith("socket:")}


def listening_socket(port: int) -> str:
    """The socket that listens on a port of IPv4, as in /proc/PID/fd."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = [line[9] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]
    return f"socket:[{inode}]"


@pytest.mark.vllm
def test_the_engine_shares_the_imports_of_the_server_but_not_its_port(moe_server: ServerProcess) -> None:
    api, engine = processes_of(moe_server)
    first_mapping = [Path(f"/proc/{pid}/maps").read_text().split(" ", 1)[0] for pid in (api, engine)]
    assert first_mapping[0] == first_mapping[1], "a process of its own program would have the addresses of its own"
    listening = listening_socket(moe_server.config.port)
    assert listening in sockets_of(api)
    assert listening not in sockets_of(engine)


@pytest.mark.vllm
def test_a_server_on_a_cpu_does_without_packages_for_other_purposes(moe_server: ServerProcess) -> None:
    for pid in processes_of(moe_server):
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "/torch/" in mapped
        assert [name for name in ("scipy", "pandas", "grpc") if f"/{name}/" in mapped] == []


def test_what_a_server_does_without_depends_on_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for arguments, needed in (
        ([], set()),
        (["--otlp-traces-endpoint", "http://localhost"], {"opentelemetry"}),
        (["--data-parallel-backend=ray"], {"ray"}),
        (["--config", "file.yaml"], {"opentelemetry", "ray"}),
    ):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        assert set(program.unused()) == {*program.UNUSED, *program.UNUSED_WITHOUT} - needed
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    assert program.unused() == ()


@pytest.mark.slow
def test_the_imports_before_the_fork_are_few_and_then_the_collector_runs_and_a_thread_if_one_engine_is_forked() -> None:
    """In one process, which spares an import of vLLM."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_PLUGINS": "counterpoint", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1"}
    program = REGISTERS + FORKS
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
