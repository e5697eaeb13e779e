"""Prints the test files that a change against main reaches: `python -m tests.changed`, for `make test-changed`.

A module reaches whoever imports it or names it in a text; another file the modules of its package, else the tests that name it;
what sets up everything all tests. Commands that our own code starts are not followed."""

import re
import subprocess
from functools import cache
from pathlib import Path

from tests.test_imports import REPOSITORY, imports_of

DOTTED = re.compile(r"\b(?:counterpoint|tests|perf|examples)(?:\.\w+)+")
IMPORTS = re.compile(r"^\s*from [\w.]+ import", re.MULTILINE)
FIXTURE = re.compile(r"^@pytest\w*\.fixture.*\n(?:async )?def (\w+)", re.MULTILINE)
SETS_UP = re.compile(r"pyproject\.toml|requirements/.*|tests/(conftest|__init__)\.py")
OURS = ("counterpoint", "orchestrator", "transport")
GLOBS = tuple(f"{top}/**/*.py" for top in (*OURS, "perf", "tests", "examples"))
TEXTS = {path.relative_to(REPOSITORY): path.read_text() for pattern in GLOBS for path in REPOSITORY.glob(pattern)}
NAMES = {
    str(path)[:-3].replace("/", ".").removesuffix(".__init__").removeprefix("counterpoint."): path for path in TEXTS
}


def used_by(path: Path, text: str) -> set[Path]:
    """What a file imports or names, and the files of fixtures that it may find."""
    names = imports_of(REPOSITORY / path, set(NAMES))
    for found in DOTTED.findall(IMPORTS.sub("", text)):
        words = found.removeprefix("counterpoint.").split(".")
        names |= {max({".".join(words[: end + 1]) for end in range(len(words))} & set(NAMES), default="", key=len)}
    names -= {"", "cli.main" if path.parts[0] in OURS else ""}
    names |= {"cli.main"} if 'with_name("counterpoint")' in text else set()
    return {NAMES[name] for name in names} | {folder / "conftest.py" for folder in path.parents}


@cache
def graph() -> dict[Path, set[Path]]:
    """What each file uses."""
    return {path: used_by(path, text) for path, text in TEXTS.items()}


def reached(changed: set[Path]) -> set[Path]:
    """Returns the files of tests that use a changed file, and those beside this one, which look at all files."""
    seen = {path for path in TEXTS if path.parent == Path("tests")}
    rest = [path for path in changed if path.suffix == ".py"]
    for path in changed.difference(rest):
        package = next((folder for folder in path.parents if folder / "__init__.py" in TEXTS), None)
        named = [each for each, text in TEXTS.items() if each.parts[0] == "tests" and path.name in text]
        rest += [each for each in TEXTS if each.parent == package] if package else named
    while rest:
        path = rest.pop()
        fixtures = FIXTURE.findall(TEXTS.get(path, "")) if path.name == "conftest.py" and path not in changed else [""]
        new = {each for each, used in graph().items() if path in used and any(name in TEXTS[each] for name in fixtures)}
        rest += new - seen
        seen |= new | {path}
    return {path for path in seen if path.name.startswith("test_") and path in TEXTS}


if __name__ == "__main__":
    commands = ("git diff --name-only --merge-base main", "git ls-files --others --exclude-standard")
    names = "".join(subprocess.check_output(each.split(), cwd=REPOSITORY, text=True) for each in commands).splitlines()
    print(*(["tests"] if any(map(SETS_UP.fullmatch, names)) else sorted(reached(set(map(Path, names))))))
