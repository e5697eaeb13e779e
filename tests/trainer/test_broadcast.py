"""What a broadcast leaves on the disk, beside what inference loads from it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.lone_run import make_lone_run
from trainer.broadcast import Broadcaster
from transport.files.atomic import published_steps


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_umask_says_who_may_read_a_broadcast(
    dense_directory: Path, tmp_path: Path, umask: int, lora: dict[str, Any] | None
) -> None:
    """Inference may run as another user of the same group."""
    lone = make_lone_run(tmp_path, dense_directory, lora=lora)
    Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2).publish(
        lone.model, lone.learner.replay, lone.run
    )
    files = list((tmp_path / "run_default" / "broadcast" / "step_0").iterdir())
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in {file.name for file in files}
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, file.name


def test_broadcasts_that_lead_elsewhere_are_left_alone(dense_directory: Path, tmp_path: Path) -> None:
    """Such as to those of another run, of which the newer would be removed."""
    lone = make_lone_run(tmp_path, dense_directory)
    (tmp_path / "run_other" / "broadcast" / "step_7").mkdir(parents=True)
    (tmp_path / "run_other" / "broadcast" / "step_7" / "STABLE").touch()
    (tmp_path / "run_default" / "broadcast").symlink_to(tmp_path / "run_other" / "broadcast")
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2)
    with pytest.raises(OSError, match=r"leads to .*run_other"):
        broadcaster.remove_beyond(0)
    with pytest.raises(OSError, match=r"leads to .*run_other"):
        broadcaster.publish(lone.model, None, lone.run)
    assert published_steps(tmp_path / "run_other" / "broadcast") == [7]
