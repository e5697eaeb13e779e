"""Where a run comes from that goes on from a step of another one: `branch.json` in its directory."""

from __future__ import annotations

from pathlib import Path

from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import read_json

BRANCH_FILE = "branch.json"
"""The file with the `BranchOrigin`, in the directory of a run that is a branch."""

FORMAT = 1

_MAX_BYTES = 2**20


class BranchOrigin(Config, frozen=True):
    """Where a branch comes from."""

    format: int = FORMAT
    job: str | None = None
    """The directory of that run's job. None if it is the branch's own, and in files of a former version."""
    run: Identifier
    """The run that it goes on from."""
    step: int
    """The step after which it goes on."""
    trained: int
    """The last step whose weights it has in common with that run; the later ones it trains again, of the recorded batches."""
    changes: dict[str, str] = {}
    """The keys that were asked to be other values, by dotted key, as they were written."""
    without: list[str] = []
    """What was left out of the batches that it trains again: rollouts, examples, environments."""
    without_from: int | None = None
    """The step from which on that is left out. Earlier ones cannot be trained again, and were trained with what they had of it.
    None if nothing is left out, and in files of a former version."""
    head: str = ""
    """The hash of the other run's receipt of the step; empty if it has none."""


def origin_of(run_dir: Path) -> BranchOrigin | None:
    """Returns where the run in a directory comes from; None if it is no branch. Raises `UserError` for a damaged file."""
    try:
        content = read_json(run_dir / BRANCH_FILE, _MAX_BYTES)
        # A former version trained no step again, and did not write this.
        return BranchOrigin.model_validate({"trained": content.get("step"), **content})
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / BRANCH_FILE} cannot be read: {error}") from None
