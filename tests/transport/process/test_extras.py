"""What is missing is named with the extras that have all of it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from counterpoint.transport.errors import UserError
from counterpoint.transport.process import extras
from counterpoint.transport.process.extras import SERVING, TRAINING, explained, lacking, require

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_nothing_is_said_of_what_is_there() -> None:
    assert lacking("pydantic", "numpy") == ""
    require("this", "numpy")


def test_the_extras_are_those_that_have_everything_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TRAINING, *SERVING):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^the trainer needs torch, .*'counterpoint\[train\]'$"):
        require("the trainer", *TRAINING)
    with pytest.raises(UserError, match=r"needs .*vllm, which are not .*: pip install '[^ ]*cpu\]' or '[^ ]*gpu\]'$"):
        require("a job", *TRAINING, *SERVING)


def test_only_an_extras_package_explains_a_failed_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "needs torch" in str(explained(ModuleNotFoundError(name="torch.nn")))
    assert explained(ModuleNotFoundError(name="no_such_module")) is None
    assert explained(ModuleNotFoundError(name="pydantic")) is None


def test_the_extras_exist_and_have_these_packages() -> None:
    declared = PROJECT["optional-dependencies"]
    for package, names in extras._EXTRAS.items():
        for name in names:
            requirements = [*declared[name], *(declared["train"] if name in ("cpu", "gpu") else [])]
            assert any(requirement.startswith(package.replace("_", "-")) for requirement in requirements), (
                package,
                name,
            )
