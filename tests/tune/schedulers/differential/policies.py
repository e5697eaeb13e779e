"""Ray's policy files and ours, of the same streams: each side's replay reads the other's files to the same schedule.

    python -m tests.tune.schedulers.differential.policies DIRECTORY

The iterations differ on purpose: we log that of the checkpoint that was copied, Ray that of the source's last result.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from ray.tune.schedulers.pbt import PopulationBasedTrainingReplay as RaysReplay

from counterpoint.tune.schedulers.pbt_replay import PopulationBasedTrainingReplay
from tests.tune.schedulers.differential.ours import OurSide
from tests.tune.schedulers.differential.rays import RaySide
from tests.tune.schedulers.differential.scenario import scenario
from tests.tune.schedulers.differential.world import World


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    compared = 0
    for seed in range(12):
        compared += compare(seed, Path(sys.argv[1]) / str(seed))
    assert compared > 20, f"only {compared} policies were written"
    print(f"{compared} policies are read alike")


def compare(seed: int, directory: Path) -> int:
    """Plays one stream on both sides with the log; returns how many trials have a policy."""
    for name in ("rays", "ours"):
        (directory / name).mkdir(parents=True)
    stream = scenario("pbt", seed)
    rays, ours = World(stream), World(stream)
    rays_side, our_side = RaySide(stream, rays), OurSide(stream, ours)
    rays_side.scheduler._log_config = True
    rays_side.directory = str(directory / "rays")
    ours.play(our_side)
    rays.play(rays_side)
    for trial in ours.trials:
        trial.local_dir = str(directory / "ours")
    for callback in our_side.scheduler.callbacks():
        callback.on_experiment_end(ours.trials)
    written = {path.name for path in (directory / "ours").iterdir()}
    assert written == {path.name for path in (directory / "rays").iterdir()}
    for name in written - {"pbt_global.txt"}:
        mine, rays_file = directory / "ours" / name, directory / "rays" / name
        assert ours_reads(mine) == ray_reads(mine)
        assert ours_reads(rays_file) == ray_reads(rays_file)
        assert configs(*ours_reads(mine)) == configs(*ours_reads(rays_file))
    return len(written - {"pbt_global.txt"})


def ours_reads(path: Path) -> tuple[Any, Any]:
    replay = PopulationBasedTrainingReplay(str(path))
    return replay.config, [list(change) for change in replay.changes]


def ray_reads(path: Path) -> tuple[Any, Any]:
    replay = RaysReplay(str(path))
    return replay.config, [list(change) for change in replay._policy]


def configs(first: Any, changes: Any) -> list[Any]:
    return [first, *(config for _, config in changes)]


main()
