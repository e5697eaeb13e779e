from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.tune.errors import TuneError
from counterpoint.tune.registry import (
    adopt_environments,
    env_creator,
    import_path_of,
    load,
    register_env,
    register_trainable,
    trainable_name,
    trainable_path,
)
from tests.support.polling import DEADLINE_SECONDS
from tests.tune.executors import trainables

HERE = "tests.tune.executors.trainables"


def decorated(config: object) -> None:
    """Stands for what a decorator made."""


shadowed = decorated


def test_a_name_leads_to_what_was_registered() -> None:
    register_trainable("counter", trainables.Counter)
    assert trainable_path("counter") == f"{HERE}:Counter"
    assert load(trainable_path("counter")) is trainables.Counter
    assert trainable_name("counter") == "counter"
    assert trainable_name(trainables.reports) == f"{HERE}:reports"
    assert trainable_path(f"{HERE}:reports") == f"{HERE}:reports"
    register_env("room", trainables.reports)
    assert env_creator("room") is trainables.reports
    adopt_environments({"hall": f"{HERE}:raises"})
    assert env_creator("hall") is trainables.raises


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (lambda config: None, "a lambda of"),
        (functools.partial(trainables.reports), "is a partial"),
        (trainables.Counter.step, "inside something else"),
        (trainables.Counter(), "neither a class nor a function"),
        ("nothing", "no trainable 'nothing' is registered"),
    ],
)
def test_what_has_no_import_path_is_refused(target: object, reason: str) -> None:
    with pytest.raises(TuneError, match=reason):
        import_path_of(target)  # type: ignore[arg-type]


def test_what_its_name_does_not_mean_is_refused() -> None:
    def inner(config: object) -> None:
        pass

    with pytest.raises(TuneError, match="inside something else"):
        import_path_of(inner)
    inner.__qualname__ = "decorated"
    with pytest.raises(TuneError, match="something else in its module"):
        import_path_of(inner)
    assert import_path_of(shadowed).endswith(":decorated")


@pytest.mark.parametrize("name", ["", "a:b"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(TuneError, match="is no name to register"):
        register_env(name, trainables.reports)


@pytest.mark.parametrize("path", ["nothing", ":x", "x:", "/no/script.py:f", f"{HERE}:Missing"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(TuneError):
        load(path)


def test_no_environment_of_a_name_is_said() -> None:
    with pytest.raises(TuneError, match="no environment 'cellar' is registered"):
        env_creator("cellar")


@pytest.mark.slow
def test_a_function_of_a_script_is_named_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(
        "from counterpoint.tune.registry import import_path_of, load\n"
        "def it(config):\n    return 7\n"
        "if __name__ == '__main__':\n"
        "    path = import_path_of(it)\n"
        "    print(path, load(path)({}))\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    assert ran.stdout == f"{script.resolve()}:it 7\n"
