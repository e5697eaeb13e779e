"""The threat model, `README.md` here, against the code: each socket that listens is there, and each line names real tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from counterpoint.environments.registry import BUILT_IN
from counterpoint.environments.rewards.rubric import AnyPart

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "tests" / "security" / "README.md"

LISTENS = {
    "bind",
    "bind_to_random_port",
    "create_server",
    "create_unix_server",
    "start_server",
    "start_unix_server",
    "TCPSite",
    "UnixSite",
    "SockSite",
    "run_app",
    "make_server",
    "server_bind",
    "start_http_server",
    "TCPStore",
    "init_process_group",
}
"""Names of calls at which a process begins to listen."""

OUTSIDE = ("tests", "perf")
"""What no job of a user runs: tests, benches and chaos."""

NAMED_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def sources() -> dict[str, str]:
    """The text of each module of the product, and of the examples, by its path."""
    packages = {path.parent for path in REPOSITORY.glob("*/__init__.py")} | {REPOSITORY / "examples"}
    files = [file for package in packages if package.name not in OUTSIDE for file in package.rglob("*.py")]
    return {str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8") for file in files}


SOURCES = sources()


def listening(source: str) -> set[int]:
    """The lines at which a module begins to listen. `inspect.Signature.bind` binds arguments."""
    found: set[int] = set()
    if not re.search(rf"\b({'|'.join(LISTENS)})\(", source):
        return found
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name in LISTENS and "signature" not in of.lower():
            found.add(node.lineno)
    return found


def rows() -> list[str]:
    """The lines of the tables of sockets, connections and files."""
    text = PAGE.read_text(encoding="utf-8").partition("## Sockets at which we listen")[2]
    return [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| tests |")]


def test_every_socket_at_which_the_code_listens_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listeners = {name: lines for name, source in SOURCES.items() if (lines := listening(source))}
    assert len(listeners) > 12
    missing = {name: lines for name, lines in listeners.items() if f"`{name}`" not in page}
    assert not missing, "these begin to listen, and tests/security/README.md does not say who may reach them"


def test_a_listener_is_found() -> None:
    assert listening("import zmq\ns.bind('tcp://*')\ninspect.signature(f).bind(1)\nasyncio.start_server(f)") == {2, 4}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_line_names_code_and_tests_that_exist(row: str) -> None:
    cells = row.strip("|").split("|")
    assert len(cells) == 5, "a line has five cells"
    for name in re.findall(r"`((?:\w+/)+\w+(?:\.py)?)`", cells[0]):
        assert (REPOSITORY / name).exists(), name
    named = NAMED_TEST.findall(cells[4])
    assert named, "a line without a test"
    for file, test in named:
        path = REPOSITORY / "tests" / file
        assert path.exists(), file
        assert re.search(rf"^(?:async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"


def test_tests_that_the_text_names_exist() -> None:
    for file, test in NAMED_TEST.findall(PAGE.read_text(encoding="utf-8")):
        assert f"def {test}(" in (REPOSITORY / "tests" / file).read_text(), f"{file}::{test}"


def test_each_kind_of_reward_is_on_the_page() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## What decides a reward")[2].partition("## ")[0]
    decides = " ".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| `"))
    parts = {get_args(get_type_hints(part)["kind"])[0] for part in get_args(get_args(AnyPart)[0])}
    assert len(parts) > 5
    assert not {kind for kind in parts | BUILT_IN.keys() if f"`{kind}`" not in decides}


UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "jsonpickle"}


def test_nothing_is_unpickled_but_by_the_restricted_reader() -> None:
    importing = set()
    for name, source in SOURCES.items():
        if not any(module in source for module in UNPICKLING):
            continue
        for node in ast.walk(ast.parse(source)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(module.split(".")[0] in UNPICKLING for module in modules):
                importing.add(name)
    assert importing == {"counterpoint/job/replay/restricted_pickle.py"}


def test_no_code_listens_on_all_addresses_by_itself() -> None:
    wildcards = re.compile(
        r"""(?:bind|create_server|start_server|TCPSite)\([^)\n]*["'](?:tcp://\*|tcp://0\.0\.0\.0|0\.0\.0\.0|::)"""
    )
    assert not [name for name, source in SOURCES.items() if wildcards.search(source)]
