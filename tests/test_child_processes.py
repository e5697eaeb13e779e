"""The product starts processes as `Child`ren (`transport/process/child.py`): each is named, and ended in one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

STARTS = re.compile(
    r"\b(?:Popen|create_subprocess_\w+|posix_spawnp?|forkpty|fork_exec|ProcessPoolExecutor)\b"
    r"|\bos\.(?:fork|system|popen|spawn\w+)\("
    r"|\bsubprocess\.(?:run|call|check_\w+|getoutput|getstatusoutput)\b"
    r"|\bfrom subprocess import .*\b(?:run|call|check_\w+)\b"
    r"|\bmultiprocessing\.(?:Process|Pool|get_context)\b"
)

EXCEPTIONS = {
    "transport/process/child.py": "here it is done",
    "transport/process/launch.py": "the guardian becomes the parent of its command",
    "transport/process/keeper/": "a keeper becomes the parent of its worker",
    "transport/process/first_process.py": "the first process of a container stays behind, and is no parent by choice",
    "counterpoint/environments/sandbox/": "its processes have namespaces of their own, in which a guardian cannot look",
    "counterpoint/environments/gateway/agent_guard.py": "the guard of an agent, which a template may have forked",
    "counterpoint/environments/gateway/agent_template.py": "a fork server of agents",
    "counterpoint/tune/executors/forked_here.py": "trials of closures are forks of the tuner",
}
"""Files and folders that start processes in another way, and why."""


UNGUARDED = {
    "transport/process/child.py": "what it is by default, and not",
    "counterpoint/job/start.py": "a job outlives the notebook that started it",
    "counterpoint/job/admin/join.py": "a guest outlives the command that joined it",
    "counterpoint/cluster/devices.py": "nvidia-smi starts nothing, and is asked every few seconds",
    "counterpoint/cluster/backends/keeper_link.py": "a keeper outlives its supervisor for a lease, and guards its worker",
    "counterpoint/cluster/master/standby.py": "a standby outlives the master that started it",
    "counterpoint/tune/runs/host_job.py": "its roles outlive it for the lease of their keepers; it is bound to its parent",
    "counterpoint/environments/rewards/processes.py": "a worker's processes are counted; it is bound to its parent",
    "counterpoint/environments/gateway/agent_process.py": "an agent has a guard of its own (`agent_guard.py`)",
}
"""Files whose children have no guardian, and why."""


def product() -> dict[str, str]:
    """The text of each file of the product, by its path in the repository."""
    folders = [REPOSITORY / name for name in ("counterpoint", "orchestrator", "transport")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in files}


def test_processes_are_started_as_children_alone() -> None:
    found = {name for name, text in product().items() if STARTS.search(text)}
    allowed = [{name for name in found if name.startswith(exception)} for exception in EXCEPTIONS]
    assert found == {name for each in allowed for name in each}, "start a Child, or `run` one to its end"
    assert all(allowed), "what starts none is no exception"


def test_children_end_with_their_parents_unless_the_reason_stands_here() -> None:
    """That nothing of a guarded child is left when its parent is killed: `tests/transport/process/test_child.py`."""
    unguarded = re.compile(r"""guarded(=|": )False|guarded: bool|process\.child import .*\bspawn\b""")
    assert {name for name, text in product().items() if unguarded.search(text)} == {*UNGUARDED}


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("subprocess.Popen(command)", True),
        ("asyncio.create_subprocess_exec(*command)", True),
        ("if os.fork() == 0:", True),
        ("os.posix_spawn(command[0], command, environment)", True),
        ("subprocess.run(command)", True),
        ("from subprocess import check_output, PIPE", True),
        ("multiprocessing.get_context('spawn')", True),
        ("from subprocess import DEVNULL, PIPE", False),
        ("run('nvidia-smi', command, 5.0)", False),
    ],
)
def test_what_starts_a_process_is_seen(text: str, starts: bool) -> None:
    assert bool(STARTS.search(text)) == starts
