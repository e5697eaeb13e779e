"""The floors of the house: packages import downwards only, no modules import each other in a circle, no folder is too full."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from counterpoint.models import write_tokenizer
from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[1]

FLOORS = (
    ("transport", "sweep", "verify"),
    ("environments",),
    ("inference", "models"),
    ("run",),
    ("orchestrator", "service", "trainer", "cluster"),
    ("job",),
    ("tune",),
    ("serve",),
    ("cli",),
    ("perf",),
)
"""From the ground up. A package imports those of the floors below its own. `counterpoint` itself, the one name that is installed,
stands apart: it has the packages, and public names, which load nothing."""

FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}

AT_THE_TOP = ("orchestrator", "transport", "perf")
"""Packages whose folders stand there. `counterpoint/` has the others, and links to the first two."""

MOST_FILES = 20
"""In one folder; more are sub-packages by purpose."""


def folder_of(package: str) -> Path:
    """Where a package lies."""
    return REPOSITORY / package if package in AT_THE_TOP else REPOSITORY / "counterpoint" / package


def modules() -> dict[str, Path]:
    """Every module of the floors, by its dotted name without `counterpoint`."""
    found = [(folder_of(package).parent, path) for package in FLOOR_OF for path in folder_of(package).rglob("*.py")]
    files = [path for _, path in found]
    names = [path.relative_to(parent).with_suffix("").parts for parent, path in found]
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for parts, path in zip(names, files, strict=True)
    }


def import_statements(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """The statements that import, at a file's top or inside functions. Expressions, most of a tree, are not visited.

    Nor is the list of public names in an `__init__.py`: none of them is loaded there.
    """
    rest: list[ast.AST] = [ast.parse(path.read_text())]
    while rest:
        node = rest.pop()
        if path.name == "__init__.py" and isinstance(node, ast.If):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, [])
            rest += inner if isinstance(inner, list) else []


def imports_of(path: Path, known: set[str]) -> set[str]:
    """The modules that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix("counterpoint.")
            inner = {alias.name if module == "counterpoint" else f"{module}.{alias.name}" for alias in node.names}
            found |= (inner & known) or {module}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("counterpoint.") for alias in node.names}
    return found & known


FILES = modules()


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports. It takes seconds, so it is not made where these tests are only collected."""
    return {name: imports_of(path, set(FILES)) - {name} for name, path in FILES.items()}


def test_every_package_has_a_floor() -> None:
    assert {path.parent for path in REPOSITORY.glob("*/__init__.py")} == {
        REPOSITORY / name for name in (*AT_THE_TOP, "counterpoint", "tests")
    }
    inside = {path.parent.name for path in REPOSITORY.glob("counterpoint/*/__init__.py")}
    assert inside == FLOOR_OF.keys() - {"perf"}


def test_every_package_is_installed_under_the_one_name() -> None:
    links = {path.name: path.readlink() for path in (REPOSITORY / "counterpoint").iterdir() if path.is_symlink()}
    assert links == {name: Path("..", name) for name in AT_THE_TOP if name != "perf"}


def test_packages_import_downwards_only() -> None:
    upwards = [
        f"{name} imports {imported}"
        for name, others in graph().items()
        for imported in others
        if (mine := name.split(".")[0]) != (other := imported.split(".")[0]) and FLOOR_OF[mine] <= FLOOR_OF[other]
    ]
    assert not upwards


def test_what_runs_without_a_job_of_many_workers_does_not_know_the_cluster() -> None:
    """Not by an import, nor by the name of a module that a command would run."""
    unaware = {package for floor in FLOORS[: FLOOR_OF["job"]] for package in floor} - {"cluster"}
    assert {"transport", "inference", "run", "trainer", "orchestrator", "service"} <= unaware
    assert not [
        name
        for name, path in FILES.items()
        if name.split(".")[0] in unaware
        if "counterpoint.cluster" in path.read_text()
        or any(other.split(".")[0] == "cluster" for other in graph()[name])
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_rooms_and_files_of_a_folder_import_each_other_in_no_circle() -> None:
    """A room is a folder with all in it. Two modules are told apart by the folder where their paths part."""
    inner: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, others in graph().items():
        for other in others:
            mine, its = name.split("."), other.split(".")
            shared = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, its, strict=False))])
            if 0 < shared < min(len(mine), len(its)):
                inner[".".join(mine[:shared])][".".join(mine[: shared + 1])].add(".".join(its[: shared + 1]))
    for folder in inner.values():
        try:
            TopologicalSorter(folder).prepare()
        except CycleError as error:
            pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_only_vllm_loads_the_plugin() -> None:
    """By entry points. What others share with it (digests, checkpoints, deltas) lies beside it."""
    importing = {
        name for name, others in graph().items() if any(other.startswith("inference.plugin") for other in others)
    }
    assert {name.split(".")[0] for name in importing if not name.startswith("inference.plugin")} == {"perf"}


def test_only_commands_and_benches_print_tables_and_pictures() -> None:
    for name, path in FILES.items():
        if name.split(".")[0] not in ("cli", "perf"):
            imported = {
                (node.module or "").split(".")[0]
                if isinstance(node, ast.ImportFrom)
                else node.names[0].name.split(".")[0]
                for node in import_statements(path)
            }
            assert not imported & {"rich", "matplotlib"}, name


def test_a_sweep_needs_storage_and_nothing_else() -> None:
    assert {
        other.split(".")[0] for name, others in graph().items() if name.startswith("sweep") for other in others
    } == {"sweep"}


TORCH_AGENT = "transport.process.ranks.torch_agent"
"""A command: who starts it need not have torch."""


def test_the_orchestrator_needs_neither_torch_nor_vllm() -> None:
    assert not [name for name, others in graph().items() if TORCH_AGENT in others]
    heavy = {"torch", "vllm", "transformers", "ray"}
    for name, path in FILES.items():
        if name.split(".")[0] in ("orchestrator", "transport", "run", "sweep") and name != TORCH_AGENT:
            tree = ast.parse(path.read_text())
            named = {
                alias.name.split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            named |= {
                node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
            }
            assert not named & heavy, name


def test_no_folder_is_too_full() -> None:
    folders = {path.parent for path in FILES.values()}
    full = {
        str(folder.relative_to(REPOSITORY)): count
        for folder in folders
        if (count := len([*folder.glob("*.py")])) > MOST_FILES
    }
    assert not full


MOST_CLUSTER_LINES = 6_600
"""Lines of `cluster` that a job of commands on one machine loads, counted when its first worker is started. They are to become
fewer: 4,500 is the aim."""

FIRST_WORKER = """
import os, sys
from pathlib import Path
from counterpoint.cli.main import main
from counterpoint.transport.process import child

def spawn(*_, **__):
    loaded = [module.__file__ for name, module in sys.modules.items() if name.startswith("counterpoint.cluster")]
    Path(sys.argv[1]).write_text("\\n".join(loaded))
    os._exit(0)

child.spawn = spawn
sys.exit(main(["run", *sys.argv[2:]]))
"""
"""Runs a job as far as its first keeper, and writes down the files of `cluster` that were loaded."""


@pytest.mark.slow
def test_a_job_on_one_machine_loads_no_more_of_the_cluster_than_it_needs(job_file: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    write_tokenizer(model, longest=1024)
    command = [sys.executable, "-c", FIRST_WORKER, str(tmp_path / "loaded"), str(job_file), "--model", str(model)]
    given = [*command, "--inference.port", str(free_port())]
    done = subprocess.run(given, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (tmp_path / "loaded").exists(), done.stdout + done.stderr
    files = [Path(line) for line in (tmp_path / "loaded").read_text().splitlines()]
    folder = folder_of("cluster")
    names = {str(file.relative_to(folder)) for file in files}
    assert not {name for name in names if "ray" in name}
    assert not {name.split("/")[0] for name in names} & {"calls", "channel", "elastic", "worker_process", "worker.py"}
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_CLUSTER_LINES
