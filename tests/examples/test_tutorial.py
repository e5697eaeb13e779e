"""The tutorial's commands, run as they stand there, in this checkout: with fewer steps, and on free ports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "tutorial.md"
STEPS = 2


@pytest.mark.vllm
@pytest.mark.slow
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    [job] = re.findall(r"^```toml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    install, *rest = re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert "make setup" in install
    job, count = re.subn(r"^steps = 40$", f"steps = {STEPS}", job, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "my_adapter.toml").write_text(job.replace("[inference]\n", f"[inference]\nport = {free_port()}\n"))
    script = "".join(rest)
    for words, instead in (("step_40", f"step_{STEPS}"), ("8000", str(free_port()))):
        assert words in script
        script = script.replace(words, instead)
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = os.environ | {"PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join([".", str(REPOSITORY)])}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    answer, _ = json.JSONDecoder().raw_decode(ended.stdout[ended.stdout.index('{"id"') :])  # the server prints, too
    assert answer["model"] == "sums"
    [choice] = answer["choices"]
    # On some processors the model of two steps ends its answer at once, by its one token.
    ended_at_once = (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)
    assert bool(choice["message"]["content"]) is not ended_at_once
