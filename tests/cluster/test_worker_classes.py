"""Whether a job's classes are workers, told by their sources: what certainly is none is refused, what may be one passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from counterpoint.cluster import JobBuilder, PrimeMaster, Worker
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.cluster.worker_classes import require_classes
from counterpoint.transport.errors import UserError

BASES = """
from counterpoint.cluster import Worker
class Base(Worker): ...
class Other: ...
"""

SOURCE = """
import threading
import threading as threads
from typing import Generic, TypeVar
import counterpoint.cluster
import counterpoint.cluster as whole
from counterpoint import cluster as renamed
from counterpoint.cluster import SelfLoopWorker, SubMaster, Worker as Work
from .bases import Base, Other
from . import bases
T = TypeVar("T")
class Plain: ...
class Below(Plain): ...
class Error(Exception): ...
class Thread(threading.Thread): ...
class Thread2(threads.Thread): ...
class Worker(Plain): ...
class Foreign(Other): ...
class Foreign2(bases.Other): ...
def function(context): ...
class A(Work): ...
class B(A): ...
class C(SelfLoopWorker): ...
class D(counterpoint.cluster.WorkLoad): ...
class E(whole.Worker): ...
class F(renamed.Worker): ...
class G(Base): ...
class H(bases.Base): ...
class I(Plain, Base): ...
class J(Work, Generic[T]): ...
class K(J[int]): ...
class L(SubMaster): ...
Alias = Plain
@id
class Decorated(Plain): ...
class Made(id(3)): ...
class Twice(Plain): ...
if T:
    class Twice(Work): ...
class Itself(Itself): ...
class Lost(nowhere.Base): ...
from counterpoint.cluster.nowhere import Gone
class Later(Gone): ...
"""


def job(worker: str, sub_master: str | None = None) -> JobSpec:
    return JobSpec(name="mine", roles=(RoleSpec(name="role", worker=worker, sub_master=sub_master),))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "__init__.py").touch()
    (tmp_path / "of_mine" / "bases.py").write_text(BASES)
    (tmp_path / "of_mine" / "classes.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["Plain", "Below", "Error", "Thread", "Thread2", "Worker", "Foreign", "Foreign2", "function"]
)
def test_what_is_no_worker_is_refused(place: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"role 'role': worker = .*{name} of .* is no subclass of Worker"):
        require_classes(job(f"of_mine.classes:{name}"), [str(place)])
    assert "of_mine" not in sys.modules


@pytest.mark.parametrize("name", [*"ABCDEFGHIJKL", "Alias", "Decorated", "Made", "Twice", "Itself", "Lost", "Later"])
def test_what_is_or_may_be_a_worker_passes(place: Path, name: str) -> None:
    if name == "L":
        with pytest.raises(UserError, match=r"role 'role': worker = .*L is a SubMaster"):
            require_classes(job("of_mine.classes:L"), [str(place)])
    else:
        require_classes(job(f"of_mine.classes:{name}"), [str(place)])
    sub_master = job("of_mine.classes:A", f"of_mine.classes:{name}")
    if name in "ABCDEFGHIJK":
        with pytest.raises(UserError, match=f"sub_master = .*{name} of .* is no subclass of SubMaster"):
            require_classes(sub_master, [str(place)])
    else:
        require_classes(sub_master, [str(place)])


class Mine:
    """No worker."""


class Aide(Worker):
    """A worker."""


@pytest.mark.parametrize("worker", [Mine, f"{__name__}:Mine", f"{__name__}:job", f"{__name__}:BASES", JobBuilder, dict])
def test_create_refuses_what_this_program_has_imported_and_is_no_worker(tmp_path: Path, worker: type | str) -> None:
    with pytest.raises(UserError, match="is no subclass of Worker"):
        PrimeMaster.create(JobBuilder("mine").role("role", worker=worker).build(), tmp_path / "job")
    with pytest.raises(UserError, match="is no subclass of SubMaster"):
        PrimeMaster.create(JobBuilder("mine").role("role", worker=Aide, sub_master=worker).build(), tmp_path / "job")
    assert not (tmp_path / "job").exists()
