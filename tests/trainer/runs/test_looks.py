"""How soon a trainer looks for new runs and for requests again."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import pytest

from counterpoint.trainer.loop import DISCOVERY_SECONDS
from tests.trainer.one_process_trainer import life, write_member


@pytest.mark.slow
def test_an_admission_that_takes_long_does_not_put_off_the_next_look(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of a trainer with many runs follows from what a look takes, and no look at a run admits it."""
    write_member(tmp_path, dense_directory, "one")
    with life(tmp_path, dense_directory, {"one": 0}) as one:
        discover = one.trainer._entrance.discover

        def slow(present: Collection[str]) -> bool:
            has_news = discover(present)
            if has_news:
                time.sleep(0.3)
            return has_news

        monkeypatch.setattr(one.trainer._entrance, "discover", slow)
        one.turn()
        assert one.step_of("one") == 0, "it is admitted"
        assert one.trainer._discovery_due() - one.trainer._discovered <= DISCOVERY_SECONDS
