"""What the documentation cites exists: files, functions and classes in them, and the targets of links."""

from __future__ import annotations

import ast
import importlib
import os
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import counterpoint
from counterpoint.cli.main import main
from counterpoint.job.environments.new_environment import write_environment
from tests.test_imports import FLOOR_OF, folder_of, graph

REPOSITORY = Path(__file__).parents[1]

PAGES = sorted(
    [
        *REPOSITORY.glob("docs/*.md"),
        REPOSITORY / "README.md",
        REPOSITORY / "AGENTS.md",
        REPOSITORY / "CHANGELOG.md",
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "SECURITY.md",
        REPOSITORY / "perf/README.md",
        REPOSITORY / "findings/README.md",
        REPOSITORY / "tests/conformance/README.md",
        REPOSITORY / "tests/security/README.md",
    ]
)

PACKAGES = {*FLOOR_OF, "counterpoint", "tests"}

CITATION = re.compile(r"`([\w./-]+\.\w+)`(?::`([\w.]+)`)?")
"""`path/file.py`, or `path/file.py`:`function`."""

LINK = re.compile(r"\]\(([^)\s]+)\)")


def page_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions, classes, methods (`Class.method`) and module variables of a Python file."""

    def names(body: list[ast.stmt], prefix: str) -> set[str]:
        found: set[str] = set()
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    found |= names(node.body, f"{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return frozenset(names(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def cited(path: Path) -> list[tuple[str, str]]:
    """File and name (or nothing) of each citation of a file of this repository."""
    kept = {*PACKAGES, "docs", "configs", "deploy", "requirements", ".ci"}
    return [
        (file, name) for file, name in CITATION.findall(prose(path)) if file.partition("/")[0] in kept and "/" in file
    ]


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_of)
def test_cited_files_and_names_exist(page: Path) -> None:
    missing = []
    for file, name in cited(page):
        path = REPOSITORY / file
        # A job writes these, such as its log.
        written = path.suffix not in (".py", ".md", ".service") and file.startswith("trainer/")
        if not (path.exists() or written) or (name and name not in names_in(path)):
            missing.append(f"{file}:{name}" if name else file)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=page_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append(target)
    assert not broken


def test_every_page_is_linked_from_the_index() -> None:
    index = REPOSITORY / "docs/index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(prose(index))}
    assert "docs/index.md" in LINK.findall(prose(REPOSITORY / "README.md"))
    assert not {page_of(page) for page in PAGES if page.parent == index.parent and page != index} - {
        page_of(path) for path in linked if path.is_relative_to(REPOSITORY)
    }


def test_every_page_is_in_the_site_s_navigation() -> None:
    named = re.findall(
        r"^ +- (?:\w.*: )?(\S+\.md)$|^  - (\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE
    )
    outside = {"contributing.md", "benchmarks.md", "surprises.md"}  # docs/site.py makes them
    assert {inner or outer for inner, outer in named} - outside == {path.name for path in REPOSITORY.glob("docs/*.md")}


@pytest.mark.slow
def test_the_job_of_the_readme_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "new", "my_sums", "--directory", str(tmp_path)]) == 0
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # which a process checks
    [job] = re.findall(r"^```toml\n(.*?)^```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    file = tmp_path / "job.toml"
    file.write_text(job)
    assert main(["run", str(file), "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 0
    assert 'kind = "my_sums:MySums"' in capsys.readouterr().out


def code_for_users() -> dict[str, str]:
    """What users copy, by its place: the pages' blocks of Python, the examples, what `counterpoint env new` writes."""
    found = {
        f"{page_of(page)}, block {number}": block
        for page in PAGES
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE), 1
        )
    }
    found |= {page_of(path): path.read_text(encoding="utf-8") for path in REPOSITORY.glob("examples/*/*.py")}
    with TemporaryDirectory() as directory:
        return found | {path.name: path.read_text() for path in write_environment("some_sums", Path(directory))}


CODE = code_for_users()

OWN = PACKAGES - {"counterpoint"}
"""Folders, which users' code does not import by their own names."""

PUBLIC = {"counterpoint", "counterpoint.trainer.lora", "counterpoint.trainer.runs"}
PUBLIC |= {f"counterpoint.{name}" for name in dir(counterpoint)}
"""What users' code imports. What is further inside may move."""


@pytest.mark.parametrize("place", CODE)
def test_code_for_users_imports_public_names_alone(place: str) -> None:
    imported = re.findall(r"^ *(?:from|import) (\w+)", CODE[place], flags=re.MULTILINE)
    assert not OWN & {*imported}
    names = re.findall(r"^ *from (counterpoint[\w.]*) import (?:\(([^)]*)\)|(.*)$)", CODE[place], flags=re.MULTILINE)
    for module, *lists in names:
        assert module in PUBLIC
        for name in re.findall(r"\w+", "".join(lists).split("#")[0]):
            assert name in dir(importlib.import_module(module)), f"from {module} import {name}"


def test_import_paths_for_users_are_public() -> None:
    """Such as `worker = "counterpoint.cluster:HostWorker"`, of the pages, the examples' jobs and the configurations."""
    files = [*PAGES, *REPOSITORY.glob("examples/*/*.toml"), *REPOSITORY.glob("configs/**/*.toml")]
    texts = {page_of(path): path.read_text(encoding="utf-8") for path in files}
    paths = [
        (page, path) for page, text in texts.items() for path in re.findall(r"\b(\w+)(?:\.\w+)*:[A-Z][a-z]\w+", text)
    ]
    assert not [(page, top) for page, top in paths if top in OWN]
    assert ("docs/cluster.md", "counterpoint") in paths


def test_the_table_of_packages_is_true() -> None:
    table = re.findall(
        r"^\| (\d) \| `(\w+)/` \|.*\| (.+) \|$", prose(REPOSITORY / "docs/architecture.md"), flags=re.MULTILINE
    )
    assert {package: int(floor) for floor, package, _ in table} == FLOOR_OF
    for _, package, imported in table:
        found = {
            other.split(".")[0] for name, others in graph().items() if name.split(".")[0] == package for other in others
        }
        named = {*re.findall(r"`(\w+)`", imported)}
        if imported.startswith("everything below"):
            named = {other for other in FLOOR_OF if FLOOR_OF[other] < FLOOR_OF[package]} - named
        assert named == found - {package}, package


def test_the_table_of_sub_packages_names_each() -> None:
    rows = re.findall(r"^\| `(\w+)/` \| (`.+) \|$", prose(REPOSITORY / "docs/architecture.md"), flags=re.MULTILINE)
    assert {package for package, _ in rows} >= {"job", "trainer"}
    for package, named in rows:
        found = {path.parent.name for path in folder_of(package).glob("*/__init__.py")}
        assert not found - {*re.findall(r"`(\w+)/`", named)}, package


def test_the_docstrings_follow_the_reading_order() -> None:
    page = prose(REPOSITORY / "docs/architecture.md")
    sittings = re.findall(r"^\| (\d)\. [^|]+ \| ([^|]+) \|", page, flags=re.MULTILINE)
    assert [number for number, _ in sittings] == [*"12345678"]
    files = re.findall(r"`([\w/]+\.py)`", " ".join(cell for _, cell in sittings))
    for file, following in pairwise(files):
        docstring = ast.get_docstring(ast.parse((REPOSITORY / file).read_text())) or ""
        assert f"Next in the reading order of `docs/architecture.md`: `{following}`." in docstring, file


def test_files_cited_in_the_source_exist() -> None:
    sources = [(folder, path) for folder in map(folder_of, FLOOR_OF) for path in folder.rglob("*.py")]
    sources += [
        (path.parent, path) for pattern in ("counterpoint/*.py", "tests/**/*.py") for path in REPOSITORY.glob(pattern)
    ]
    missing = []
    for folder, path in sources:
        for file in re.findall(r"`([\w./-]+\.(?:py|md))`", path.read_text(encoding="utf-8")):
            first, inside, _ = file.partition("/")
            alone = not inside and not page_of(path).startswith("tests/") and not any(folder.rglob(file))
            if alone or (inside and first in PACKAGES | {"docs"} and not (REPOSITORY / file).exists()):
                missing.append(f"{page_of(path)}: {file}")
    assert not missing
