"""What is packed: every package of the repository is in the wheel, in the image, and under the eyes of ruff and mypy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

from tests.test_imports import FLOOR_OF

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
NOT_SHIPPED = {"tests", "examples", "perf"}

TOPS = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - NOT_SHIPPED
"""The folders that have what is installed."""


def test_the_wheel_has_one_name() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["counterpoint", "counterpoint.*"]


def test_the_image_is_built_from_every_package() -> None:
    """`COPY NAME NAME` for each, of what `.dockerignore` does not keep back; and what else the build copies is sent, too."""
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1].rstrip("/") for line in lines if re.fullmatch(r"COPY (\S+) \1", line)}
    sources = {
        word.split("/")[0]
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert copied == TOPS
    sent = {
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert sent == sources


def test_ruff_and_mypy_know_every_package() -> None:
    """A package imported by its folder's name would be loaded a second time, from the checkout."""
    linter = PROJECT["tool"]["ruff"]["lint"]
    assert set(PROJECT["tool"]["mypy"]["packages"]) == {"counterpoint", *NOT_SHIPPED}
    assert set(linter["isort"]["known-first-party"]) == {"counterpoint", *NOT_SHIPPED}
    assert linter["flake8-tidy-imports"]["banned-api"].keys() >= TOPS - {"counterpoint"}


def test_make_reads_every_file_of_pips_configuration(tmp_path: Path) -> None:
    """`pip config get` reads the user's or the environment's alone. Several folders are separated by commas for uv."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nfind-links =\n    /a/wheels\n    https://b/wheels\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    found = subprocess.run(
        ["make", "--silent", "--eval=show: ; @echo '$(FIND_LINKS)'", "show", f"BIN={Path(sys.executable).parent}"],
        cwd=REPOSITORY, env=variables | {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.strip() == "/a/wheels,https://b/wheels"


def _pins(file: str) -> dict[str, str]:
    """The versions of a lock by the packages' names."""
    lines = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", (REPOSITORY / "requirements" / file).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


def test_the_least_versions_are_those_of_the_lock() -> None:
    """A plain install of the wheel keeps no version that the lock has left behind, perhaps for an advisory."""
    pins, project = _pins("cpu.lock"), PROJECT["project"]
    needed = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    floors = (re.match(r"([\w.-]+?)(?:\[[\w,-]+\])?>=([^;]+)", each) for each in needed)
    least = {found[1]: found[2] for found in floors if found}
    assert least
    assert {name: pins[name.lower().replace("_", "-")] for name in least} == least


def test_the_lock_with_hashes_has_what_the_wheel_needs() -> None:
    pins, base = _pins("cpu.lock"), _pins("base.lock")
    needed = {re.match(r"[\w.-]+", each)[0].lower() for each in PROJECT["project"]["dependencies"]}  # type: ignore[index]
    assert needed <= base.keys()
    assert {name: version for name, version in base.items() if name in pins and pins[name] != version} == {}
    text = (REPOSITORY / "requirements" / "base.lock").read_text()
    assert len(re.findall(r"^[a-z][^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)) == len(base)


def test_torchvision_is_the_same_everywhere() -> None:
    """Of PyTorch's releases, torchvision 0.N + 15 goes with torch 2.N."""
    made = re.search(r"^TORCHVISION := (\S+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert made is not None
    assert set(re.findall(r"torchvision(?:==| )(\d\S+)", (REPOSITORY / "Dockerfile").read_text())) == {made[1]}
    torch = re.search(r"^torch==2\.(\d+)\.", (REPOSITORY / "requirements" / "cpu.lock").read_text(), re.MULTILINE)
    assert torch is not None
    assert int(made[1].split(".")[1]) == int(torch[1]) + 15


def test_every_package_is_typed_for_those_who_import_it() -> None:
    """PEP 561 wants the file: without it a type checker takes what a wheel has for Any."""
    assert PROJECT["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]
    assert (REPOSITORY / "counterpoint" / "py.typed").exists()
    typed = {path.parent.name for path in REPOSITORY.glob("counterpoint/*/py.typed")}
    assert typed == FLOOR_OF.keys() - NOT_SHIPPED
