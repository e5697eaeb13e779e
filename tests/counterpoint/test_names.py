"""What users import: every public name is the internal object itself, and nothing is loaded before it is used."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import counterpoint
from counterpoint.cluster.entrypoint import Entrypoint
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.cluster.worker import Worker
from counterpoint.cluster.worker_classes import require_classes
from counterpoint.environments.base import Example
from counterpoint.transport.errors import UserError
from counterpoint.tune.registry import import_path_of

FUNCTIONS = {"read", "start"}
"""What the package itself has, beside its modules."""

MODULES = sorted(
    [f"counterpoint.{name}" for name in dir(counterpoint) if name not in FUNCTIONS]
    + ["counterpoint.trainer.lora", "counterpoint.trainer.runs"]
)
"""What users import."""


def in_another_process(program: str) -> object:
    """What a program prints as JSON."""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return json.loads(printed)


@pytest.mark.slow
def test_importing_the_package_loads_nothing_else() -> None:
    program = "import json, sys, counterpoint; print(json.dumps(sorted(sys.modules)))"
    loaded = in_another_process(program)
    assert isinstance(loaded, list)
    own = {name for name in loaded if name.split(".")[0] == "counterpoint"}
    assert own == {"counterpoint", "counterpoint.public_names"}
    assert not {"torch", "vllm", "ray", "numpy"} & {*loaded}


@pytest.mark.slow
def test_importing_every_module_loads_nothing_heavy() -> None:
    program = f"import json, sys, {', '.join(MODULES)}; print(json.dumps(sorted(sys.modules)))"
    loaded = in_another_process(program)
    assert isinstance(loaded, list)
    assert not {"torch", "vllm", "ray", "numpy", "pydantic"} & {*loaded}


def test_the_package_leads_to_its_modules() -> None:
    inner = {found.name for found in pkgutil.iter_modules(counterpoint.__path__)}
    assert {*dir(counterpoint)} - FUNCTIONS <= inner
    assert {name for name in dir(counterpoint) if not isinstance(getattr(counterpoint, name), ModuleType)} == FUNCTIONS


@pytest.mark.parametrize("module", MODULES)
def test_no_public_name_is_a_module_inside_its_package(module: str) -> None:
    """Once such a module is imported, Python puts it in the name's place."""
    found = importlib.import_module(module)
    inner = {each.name for each in pkgutil.iter_modules(getattr(found, "__path__", []))}
    assert all(isinstance(getattr(found, name), ModuleType) for name in inner & {*dir(found)})


@pytest.mark.slow
@pytest.mark.parametrize("module", ["counterpoint", *MODULES])
def test_every_name_is_the_internal_object(module: str) -> None:
    """Where the object says that it was defined, it is found, and that is not here."""
    found = importlib.import_module(module)
    assert dir(found)
    for name in dir(found):
        item = getattr(found, name)
        if isinstance(item, ModuleType):
            assert item.__name__ == f"{module}.{name}"
        elif isinstance(item, type) or callable(item):
            assert item.__module__ != module
            assert getattr(importlib.import_module(item.__module__), item.__name__) is item
        else:
            assert isinstance(item, str | float), name


def test_a_name_that_there_is_not_is_an_error_with_its_module() -> None:
    for module in ("counterpoint", "counterpoint.tune", "counterpoint.cluster"):
        with pytest.raises(AttributeError, match=f"{module!r} has no attribute 'Nonsense'"):
            _ = importlib.import_module(module).Nonsense


@pytest.mark.slow
def test_no_file_is_loaded_as_two_modules() -> None:
    """Two would have two classes of each name, of which `isinstance` knows one, and two registries."""
    program = f"""
import importlib, json, sys
for name in {MODULES!r}:
    module = importlib.import_module(name)
    [getattr(module, each) for each in dir(module)]
print(json.dumps([
    module.__file__ for name, module in sys.modules.items() if name != "__main__" and getattr(module, "__file__", None)
    and name.split(".")[0] in {sorted(path.parent.name for path in Path(__file__).parents[2].glob("*/__init__.py"))!r}
]))
"""
    files = in_another_process(program)
    assert isinstance(files, list)
    assert len(files) > 100
    assert [file for file, count in Counter(files).items() if count > 1] == []


def test_classes_of_users_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_user.py").write_text(
        "from counterpoint.cluster import Worker\n"
        "from counterpoint.environments import Example\n\n\n"
        "class Mine(Worker):\n    pass\n\n\n"
        "def example():\n    return Example(3, 'prompt', 'answer')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("of_a_user")
    assert issubclass(mine.Mine, Worker)
    assert isinstance(mine.example(), Example)
    assert import_path_of(mine.Mine) == "of_a_user:Mine"
    assert Entrypoint.from_callable(mine.example).source == "of_a_user"
    for value in (mine.Mine, mine.example()):
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301


def test_a_job_names_public_classes_and_a_misspelt_one_is_refused() -> None:
    def job(worker: str) -> JobSpec:
        return JobSpec(name="mine", roles=(RoleSpec(name="host", worker=worker),))

    require_classes(job("counterpoint.cluster:HostWorker"), [])
    with pytest.raises(UserError, match=r"counterpoint\.cluster:HostWorkr.*the nearest is HostWorker"):
        require_classes(job("counterpoint.cluster:HostWorkr"), [])
