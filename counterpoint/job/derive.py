"""Derives what one section of a job takes from another, and refuses what cannot work together.

`counterpoint/job/config.py` calls `derive` for a whole job; `counterpoint/job/join.py` calls `check_fits` for a run that joins
one. Errors are `ValueError`s that name both keys and their values.

Next in the reading order of `docs/architecture.md`: `counterpoint/job/supervision.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pydantic import ValidationError

from counterpoint.inference.config import InferenceConfig, LoraServingConfig, PoolConfig
from counterpoint.job.placement import check_placement, servers_file, servers_move
from counterpoint.job.sections import FIRST_PORT, JobSections, ServersConfig
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.loopback import host_in_url
from counterpoint.transport.process.start_time import LONGEST_STARTS

CLIENTS = 4
"""Runs of clients for which a trainer has room beside those of the job, where `max_runs` is not set."""

IDENTITY_FILE = "servers.key"
"""File in a job's directory with the secret of its servers."""


def derive(job: JobSections, runs: Mapping[str, RunConfig]) -> None:
    """Sets the derived values in place and checks the job. `runs` are the job's own, by their names in the file."""
    if job.backend != "local" and not job.inference.port:
        job.inference = job.inference.model_copy(update={"port": FIRST_PORT})
    _check_names(job, runs)
    for name, run in runs.items():
        for key in ("output_dir", "model", "resume", "transport"):
            if getattr(run, key) != getattr(job, key):
                raise ValueError(f"{name}.{key} = {getattr(run, key)!r}: a job sets {key} once, at the top")
    if job.inference.replicas and job.inference.identity_file is None:
        job.inference = job.inference.model_copy(update={"identity_file": job.output_dir / IDENTITY_FILE})
    clients = CLIENTS if job.tinker is not None else 0
    slots = max(len(runs) + clients, 1) if "max_runs" not in job.trainer.model_fields_set else job.trainer.max_runs
    losses = {run.training.loss.kind for run in runs.values() if ":" in run.training.loss.kind}
    allowed = sorted({*job.trainer.allowed_imports, *losses})
    job.trainer = job.trainer.model_copy(
        update={"max_runs": slots, "stay": True, "allowed_imports": allowed, **_server_dtypes(job)}
    )
    _derive_adapters(job, runs)
    for name, run in {"orchestrator": job.orchestrator, **runs}.items():
        run.inference = pool_of(job, f"{name}.inference", run.inference)
    for name, run in runs.items():
        check_fits(name, run, job.inference, job.trainer)
    if job.trainer.row_tokens < job.inference.max_model_len:
        raise ValueError(
            f"trainer.max_tokens = {job.trainer.max_tokens} is below inference.max_model_len = {job.inference.max_model_len}: "
            "a sample of that length could not be trained on"
        )
    if job.inference.port + job.inference.replicas > 65536:
        raise ValueError(
            f"inference.port = {job.inference.port} leaves no ports for inference.replicas = {job.inference.replicas}, "
            "which take those that follow it, up to 65535"
        )
    _check_gpus(job)
    _check_sft(job)
    _check_server_of_the_page(job)
    check_placement(job)


def check_fits(name: str, run: RunConfig, servers: InferenceConfig, trainer: TrainerConfig) -> None:
    """Raises `ValueError` unless the servers and the trainer can take this run. `name` precedes its keys in an error."""
    dot = f"{name}." if name else ""
    if not run.environments:
        raise ValueError(f"{dot}environments is required and not set: a run needs at least one")
    check_lengths(name, run, servers.max_model_len)
    _check_sampling(name, run, servers)
    if (refusal := trainer.refuses_value_head(run.training)) is not None:
        raise ValueError(f"{dot}{refusal}")
    lora = run.training.lora
    if lora is None and trainer.max_runs > 1:
        raise ValueError(
            f"{dot}training.lora is not set: runs that share a trainer (trainer.max_runs = {trainer.max_runs}) train an "
            f"adapter each; write [{dot}training.lora]"
        )
    if lora is None and servers.lora is not None:
        raise ValueError(
            f"inference.lora is set, but {dot}training.lora is not: nothing would train an adapter; set both or neither"
        )
    if lora is not None and servers.lora is None:
        raise ValueError(f"{dot}training.lora is set, but inference.lora is not: the servers would take no adapter")
    if lora is not None and servers.lora is not None:
        for limit, most in (
            ("inference.lora.max_rank", servers.lora.max_rank),
            ("trainer.max_lora_rank", trainer.max_lora_rank),
        ):
            if lora.rank > most:
                raise ValueError(f"{dot}training.lora.rank = {lora.rank} is above {limit} = {most}")


def check_lengths(name: str, run: RunConfig, max_model_len: int) -> None:
    """Raises `ValueError` for completions that leave no room for a prompt at the job's servers. `name` as in `check_fits`."""
    dot = f"{name}." if name else ""
    for place, (environment, sampling) in run.every_environment.items():
        own = "" if environment.sampling.max_tokens is None else f"{place}."
        if (longest := sampling.max_tokens) >= max_model_len:
            raise ValueError(
                f"{dot}{own}sampling.max_tokens = {longest} leaves no room for a prompt in "
                f"inference.max_model_len = {max_model_len}"
            )


def _check_sampling(name: str, run: RunConfig, servers: InferenceConfig) -> None:
    """Raises `ValueError` for sampling with which the servers refuse every request. `name` as in `check_fits`."""
    dot = f"{name}." if name else ""
    if not any(map(servers.sets, ("--speculative-config", "-sc", "--spec-method", "--spec-model"))):
        return
    for place, (environment, sampling) in run.every_environment.items():
        own = "" if environment.sampling.min_p is None else f"{place}."
        if sampling.min_p > 0:
            raise ValueError(
                f"{dot}{own}sampling.min_p = {sampling.min_p:g}: vLLM refuses min_p with speculative decoding, which "
                "inference.extra_args turns on; leave out one of them"
            )


def _check_names(job: JobSections, runs: Mapping[str, RunConfig]) -> None:
    for run_id, count in Counter(run.run_id for run in runs.values()).items():
        if count > 1:
            raise ValueError(f"runs: run_id = {run_id!r} is used {count} times; each run needs its own")
    _check_ports(job, runs)


def _check_ports(job: JobSections, runs: Mapping[str, RunConfig]) -> None:
    for port, count in Counter(run.prometheus_port for run in runs.values()).items():
        if port and count > 1:
            raise ValueError(
                f"prometheus_port = {port} is that of {count} runs; give each its own under [[runs]], or leave it out: each "
                "then takes a free one"
            )
    servers = range(job.inference.replicas if job.inference.port else 0)
    ports = set_ports(job, runs) | {f"inference.port + {n}": job.inference.port + n for n in servers}
    keys: dict[int, str] = {}
    for key, port in ports.items():
        if (other := keys.setdefault(port, key)) != key:
            raise ValueError(f"{key} = {port} is the port of {other}, too; leave it out, and a free one is taken")


def set_ports(job: JobSections, runs: Mapping[str, RunConfig]) -> dict[str, int]:
    """Returns the ports of the job's other roles, but for those of the page, by their keys; without those that are left free."""
    ports = {
        "prometheus_port": job.prometheus_port,
        "trainer.prometheus_port": job.trainer.prometheus_port,
        **({"tinker.port": job.tinker.port} if job.tinker is not None else {}),
        **{f"{name}.prometheus_port": run.prometheus_port for name, run in runs.items()},
    }
    return {key: port for key, port in ports.items() if port}


def pool_of(job: JobSections, name: str, pool: PoolConfig) -> PoolConfig:
    """Returns a run's view of the servers, with their addresses and key from the job.

    Without a port of theirs, as before a start, the addresses are left as they are by default.

    Raises `ValueError` if `pool` has others.
    """
    servers = job.inference
    if not servers.replicas:
        if not pool.model_fields_set & {"urls", "dns", "urls_file"}:
            raise ValueError(
                f"inference.replicas = 0 starts no server, and {name} names none that runs already: write urls = "
                f'["http://HOST:PORT"] under [{name}], or dns, or urls_file'
            )
        return pool
    if servers_move(job):
        derived: dict[str, object] = {"urls": [], "urls_file": servers_file(job)}
    elif not servers.port:
        if pool.urls != PoolConfig().urls:
            raise ValueError(
                f"{name}.urls = {pool.urls!r} does not fit [inference], whose servers are the job's own, at a free port, since "
                "inference.port is unset; set that, or leave urls out"
            )
        pool = pool.model_copy()
        pool.model_fields_set.discard("urls")
        derived = {}
    else:
        derived = {"urls": _urls(servers)}
    derived |= {"api_key_file": servers.api_key_file, "identity_file": servers.identity_file}
    for key, value in derived.items():
        if key in pool.model_fields_set and getattr(pool, key) != value:
            raise ValueError(
                f"{name}.{key} = {getattr(pool, key)!r} does not fit [inference], which gives {value!r}; leave it out"
            )
    if "startup_timeout_seconds" not in pool.model_fields_set:  # a server that computes is waited for
        longest = LONGEST_STARTS * servers.startup_timeout_seconds
        derived["startup_timeout_seconds"] = max(pool.startup_timeout_seconds, longest)
    return pool.model_copy(update=derived)


def _urls(servers: ServersConfig) -> list[str]:
    host = host_in_url(servers.host)
    ports = range(servers.port, servers.port + servers.replicas)
    return [f"{servers.scheme}://{host}:{port}" for port in ports]


def _server_dtypes(job: JobSections) -> dict[str, object]:
    """Returns `trainer.server_dtypes` where the file leaves it out and the servers' precision is known.

    Arguments of vLLM's own may set another one than `inference.dtype`.

    Raises `ValueError` if it is set and lacks that precision.
    """
    servers, trainer = job.inference, job.trainer
    if not servers.replicas or servers.dtype == "auto" or servers.sets("--dtype"):
        return {}
    if "server_dtypes" not in trainer.model_fields_set:
        return {"server_dtypes": [servers.dtype]}
    if servers.dtype not in trainer.server_dtypes:
        raise ValueError(
            f"trainer.server_dtypes = {trainer.server_dtypes} lacks inference.dtype = {servers.dtype!r}, for which the proof of "
            "published weights needs a digest; leave it out"
        )
    return {}


def _derive_adapters(job: JobSections, runs: Mapping[str, RunConfig]) -> None:
    """Sets the adapter limits of trainer and servers that the file leaves out.

    The rank is the largest of the runs; the servers get an adapter slot for each slot at the trainer. A job without runs is sized
    for runs like `[orchestrator]`.
    """
    expected = list(runs.values()) or [job.orchestrator]
    ranks = [run.training.lora.rank for run in expected if run.training.lora is not None]
    ranks += [job.tinker.max_rank] if job.tinker is not None else []
    if ranks and "max_lora_rank" not in job.trainer.model_fields_set:
        largest = max(*ranks, job.trainer.max_lora_rank)
        job.trainer = job.trainer.model_copy(update={"max_lora_rank": largest})
    if ranks and job.inference.lora is None:
        evaluating = sum(bool(run.evaluations) for run in expected)  # an evaluation has an adapter of its own
        slots = max(job.trainer.max_runs + evaluating, LoraServingConfig().max_adapters)
        lora = LoraServingConfig(max_rank=max(ranks), max_adapters=slots)
        job.inference = job.inference.model_copy(update={"lora": lora})
    if job.tinker is not None:
        _check_rank_of_clients(job, job.tinker.max_rank)
        if job.tinker.strict_replay and not (job.trainer.router_replay and job.inference.return_routed_experts):
            raise ValueError(
                "tinker.strict_replay is set, and needs trainer.router_replay and inference.return_routed_experts; set both, or "
                "leave it out"
            )
    if not runs and job.inference.lora is None:
        raise ValueError(
            "stay = true without a run of the job's own: runs that join train an adapter each; write "
            "[orchestrator.training.lora] with the largest rank there will be"
        )


def _check_rank_of_clients(job: JobSections, rank: int) -> None:
    limits = {"trainer.max_lora_rank": job.trainer.max_lora_rank}
    limits |= {"inference.lora.max_rank": job.inference.lora.max_rank} if job.inference.lora is not None else {}
    for key, most in limits.items():
        if rank > most:
            raise ValueError(f"tinker.max_rank = {rank} is above {key} = {most}")


_OF_ROLLOUTS = {"output_dir", "seed", "resume", "transport", "prometheus_host", "prometheus_port", "max_runs", "stay"}
"""Keys of a job's trainer that its fine-tuning has otherwise."""


def sft_of(job: JobSections) -> SftConfig:
    """Returns the configuration of a job's fine-tuning: its model, trainer and adapter, and what `[sft]` says."""
    assert job.sft is not None
    section, lora = job.sft.model_dump(exclude_unset=True), job.orchestrator.training.lora
    training = ({} if lora is None else {"lora": lora.model_dump(exclude_unset=True)}) | section.pop("training", {})
    shared = {"model": job.trainer.model, "seed": job.seed, "resume": True, "training": training}
    trainer = job.trainer.model_dump(exclude_unset=True, exclude=_OF_ROLLOUTS)
    return SftConfig.model_validate(
        section | shared | {"output_dir": job.output_dir.absolute() / "sft", "run_id": "sft", "trainer": trainer}
    )


def _check_sft(job: JobSections) -> None:
    if job.sft is None:
        return
    if job.backend != "local":
        raise ValueError(
            f"sft: it trains on this machine, and not with backend = {job.backend!r}; run `counterpoint sft` first, and begin "
            "with its result (docs/sft.md)"
        )
    for run in job.runs:
        if run.training.lora != job.orchestrator.training.lora:
            raise ValueError(
                f"sft: it trains what [orchestrator.training] says, an adapter or all weights, and run {run.run_id!r} has "
                "another lora; all runs begin with the same weights"
            )
    try:
        sft_of(job)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("sft", *first["loc"])))
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def _check_gpus(job: JobSections) -> None:
    servers = job.inference
    each = "inference.tensor_parallel_size" + (" x inference.replicas" if servers.replicas != 1 else "")
    needs = {
        "inference": (each, servers.tensor_parallel_size * servers.replicas, job.gpus.inference),
        "trainer": (
            "trainer.processes" + (" x trainer.nodes" if job.trainer.nodes > 1 else ""),
            job.trainer.ranks,
            job.gpus.trainer,
        ),
    }
    for role, (name, needed, given) in needs.items():
        if given is not None and len(given) < needed:
            raise ValueError(f"gpus.{role} = {given} are fewer than {name} = {needed}")
        if given is not None and len(given) > needed:
            raise ValueError(
                f"gpus.{role} = {given} are more than {name} = {needed}, and the others would stay idle: raise "
                f"{name.partition(' x ')[0]}, or name fewer"
            )


def _check_server_of_the_page(job: JobSections) -> None:
    if job.serve is None:
        return
    if job.backend != "local":
        raise ValueError(
            f"serve is set, and with backend = {job.backend!r} it would run on any node: leave it out, and run "
            "`counterpoint serve DIRECTORY` where you want to look from"
        )
    if job.inference.port and 0 <= job.serve.port - job.inference.port < job.inference.replicas:
        raise ValueError(f"serve.port = {job.serve.port} is a server's, from inference.port = {job.inference.port} on")
