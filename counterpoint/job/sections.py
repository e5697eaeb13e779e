"""The sections of a job file and their keys.

`counterpoint/job/config.py` validates them together, `counterpoint/job/derive.py` derives values of one from another.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.config import InferenceConfig
from counterpoint.job.serving.config import ServeConfig
from counterpoint.job.tracking.config import TrackingConfig
from counterpoint.run.config import RunConfig
from counterpoint.service.config import TinkerConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.config import Config, Seed, TransportConfig


class GpuConfig(Config):
    """Which GPUs a role sees, by index. Unset, it sees all, and vLLM and the trainer share the first."""

    inference: list[int] | None = None
    """vLLM's; `inference.tensor_parallel_size` of them for each of `inference.replicas`."""

    trainer: list[int] | None = None
    """The trainer's; `trainer.processes` of them for each of `trainer.nodes`."""


FIRST_PORT = 8000
"""From here on a free port is looked for, below those that the kernel gives to connections (32768 and above)."""


class ServersConfig(InferenceConfig):
    """The vLLM servers, all alike."""

    port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the first server; further ones take those after it. Unset, or 0: the first that is free from 8000 on, which the
    start chooses and `job.json` has; a resume takes it again if it is free. With `backend = "ray"`, whose nodes are not looked at
    from here: 8000. A port that is set and taken is refused before anything is started."""

    replicas: int = Field(default=1, ge=0)
    """Servers, each with the whole model, on `port` and the ports after it. 0 starts none: `[orchestrator.inference]` then names
    running servers, and `max_model_len` and `lora` must be what they were started with."""


class SharedRunConfig(RunConfig):
    """What all runs have in common, or the one run where there are no `[[runs]]`."""

    environments: list[EnvironmentConfig] = []
    """The mix of tasks. A run with environments of its own does not use these."""


if TYPE_CHECKING:
    SftSection = SftConfig
else:
    _OWN: dict[str, Any] = {
        name: (field.rebuild_annotation(), field)
        for name, field in SftConfig.model_fields.items()
        if name not in ("output_dir", "model", "run_id", "seed", "resume", "trainer")  # which are the job's
    }
    SftSection = create_model(
        "SftSection",
        __base__=Config,
        __doc__="Supervised fine-tuning before the first rollout: the keys of a file of `counterpoint sft` (docs/sft.md).",
        __module__=__name__,
        **_OWN,
    )


class JobSections(Config):
    """The keys of a job file: inference, a trainer, and one run or several."""

    output_dir: Path
    """The job's directory. It must be empty, unless `--resume` or `--fresh` is given."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds (`tiny-moe`, `tiny-dense`, `tiny-math`, `smollm2`)."""

    seed: Seed = 0
    """The seed of everything random in all three roles."""

    resume: bool = False
    """Go on from the newest checkpoint of each role; `--resume` for short."""

    transport: TransportConfig = TransportConfig()
    """The wire between orchestrator and trainer."""

    backend: Literal["local", "ray"] = "local"
    """The place where the roles run: `local`, on this machine; `ray`, on the nodes of the Ray cluster at `$RAY_ADDRESS`
    (`HOST:PORT`). All nodes share `output_dir`."""

    gpus: GpuConfig = GpuConfig()
    """Placement on a machine with several GPUs. On Ray it says how many GPUs each role gets, and which roles share one."""

    max_restarts: int = Field(default=3, ge=0)
    """How often in a row a process that died is restarted, from its newest checkpoint, before it counts as failed. The count
    starts again after three minutes without a problem."""

    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Port of the supervisor's metrics; 0 takes a free one, which `prometheus/` in the job's directory names. Trainer and runs
    have a key of the same name."""

    prometheus_host: str = "127.0.0.1"
    """Address at which the metrics of supervisor, trainer and runs are served. `0.0.0.0` in a container, whose loopback
    Prometheus does not reach: whoever reaches the ports can read them."""

    inference: ServersConfig
    """The section of the vLLM servers."""

    trainer: TrainerConfig
    """The section of the trainer."""

    orchestrator: SharedRunConfig
    """The run; or, with `[[runs]]`, what the runs have in common."""

    runs: list[RunConfig] = []
    """The runs: each has a `run_id`, takes every key and section of `[orchestrator]`, and needs those that differ. Tables are
    merged, any other value is replaced."""

    sft: SftSection | None = None
    """Train on conversations first, with the job's model, trainer and adapter; the runs begin with the result."""

    serve: ServeConfig | None = None
    """The web page and the admin API of this job, as `counterpoint serve` has them; `serve = true` for the defaults. The job goes
    on whatever becomes of that process."""

    tracking: TrackingConfig | None = None
    """Other systems that get the job's metrics, in a process of its own."""

    tinker: TinkerConfig | None = None
    """A service for the Tinker SDK, whose clients train runs of their own at the job's trainer; the job then stays. `tinker =
    true` for the defaults (docs/tinker.md)."""

    stay: bool = False
    """Whether trainer and servers keep running for runs that join, until the job is stopped. Such a job needs no run of its own:
    it has none without `[[runs]]` and `[[orchestrator.environments]]`."""
