"""The trainer of a job: the steps of its runs, its slots and its memory. Also of `counterpoint sft`."""

from __future__ import annotations

from counterpoint.transport.telemetry.metric import LONG_SECONDS, LineName, Metric, Process, Unit

RUN = ("run",)


def _of_run(name: str, meaning: str, unit: Unit = "") -> Metric:
    return Metric(f"counterpoint_trainer_{name}", "gauge", meaning, unit, RUN)


STEP = _of_run("step", "newest trained step, which is the version of the weights")
STEPPED_AT = _of_run("step_timestamp_seconds", "Unix time at which the newest step was trained", "seconds")
EPOCH = _of_run("epoch", "epochs of the data that are trained, of supervised fine-tuning")
LOSS = _of_run("loss", "loss of the newest step")
ENTROPY = _of_run("entropy_nats", "mean entropy of the trainer's distributions of the trained tokens", "nats")
MISMATCH = _of_run(
    "mismatch_kl_nats",
    "KL(inference || trainer) of the trained tokens, estimator k3: staleness, precision, and what sampling truncates",
    "nats",
)
RATIO_MEAN = _of_run("importance_weight_mean", "mean of p_trainer / p_inference")
RATIO_MAX = _of_run("importance_weight_max", "highest p_trainer / p_inference")
MASKED = _of_run(
    "masked_tokens_ratio", "share of the trained tokens that the loss left out: their ratio was too far from 1", "ratio"
)
EFFECTIVE = _of_run(
    "effective_sample_ratio", "effective sample size of the importance weights over the trained tokens", "ratio"
)
EFFECTIVE_BY_LAG = Metric(
    "counterpoint_trainer_lag_effective_sample_ratio",
    "gauge",
    "the same of the samples of one staleness, in steps; 16 has those above, too",
    "ratio",
    ("run", "lag"),
)
REPLAYED = _of_run(
    "replayed_tokens_ratio", "share of the trained tokens that a position with a routing record predicted", "ratio"
)
REFERENCE_KL = _of_run("reference_kl_nats", "KL(trainer || reference), estimator k3", "nats")
VALUE_LOSS = _of_run("value_loss", "loss of the value head")
VALUE_MEAN = _of_run("value_mean", "mean estimate of the value head")
RETURN_MEAN = _of_run("return_mean", "mean return that the value head learns")
CUSTOM = Metric(
    "counterpoint_trainer_custom_loss",
    "gauge",
    "a metric of a loss of one's own, mean over trained tokens",
    labels=("run", "name"),
)
OF_ENVIRONMENT = Metric(
    "counterpoint_trainer_environment_mean",
    "gauge",
    "a mean over the trained tokens of one environment, by its name in the line",
    labels=("run", "environment", "metric"),
    most_series=2048,
)
GRADIENT_KEPT = _of_run(
    "gradient_kept_ratio", "share of the gradient's norm that clipping leaves, mean over the step's updates", "ratio"
)
GRADIENT = _of_run("gradient_norm", "norm of the gradient before clipping, mean over the step's updates")
UPDATES = _of_run("updates_per_step", "updates of the newest step, if there may be several")
LEARNING_RATE = _of_run("learning_rate", "of the newest update")
TOKENS_PER_SECOND = _of_run("tokens_per_second", "tokens of the newest batch over the time of its training")
TOKENS = Metric("counterpoint_trainer_batch_tokens", "counter", "tokens of the batches", "tokens", RUN)
TRAINED = Metric("counterpoint_trainer_trained_tokens", "counter", "tokens that the loss counted", "tokens", RUN)
TRAINED_IN = Metric(
    "counterpoint_trainer_environment_trained_tokens",
    "counter",
    "tokens that the loss counted, of one environment",
    "tokens",
    ("run", "environment"),
)
SAMPLES = Metric("counterpoint_trainer_samples", "counter", "samples of the batches", labels=RUN)
PHASE = Metric(
    "counterpoint_trainer_phase_seconds",
    "histogram",
    "time of a step: wait for its batch, train, broadcast the weights",
    "seconds",
    ("run", "phase"),
    LONG_SECONDS,
)
ROWS = Metric("counterpoint_trainer_rows", "counter", "rows that all ranks have trained, each of one run or of several")
LATE_GRAPHS = Metric(
    "counterpoint_trainer_late_graphs",
    "counter",
    "graphs that torch compiled for a row on rank 0, although those of all rows should have been there: each took seconds",
)
RUNS = Metric("counterpoint_trainer_runs", "gauge", "runs by their stage at the trainer", labels=("stage",))
SLOTS = Metric("counterpoint_trainer_slots", "gauge", "runs that can be trained at once")
WAITING = Metric(
    "counterpoint_trainer_waiting_batches", "gauge", "batches that are received and not yet trained", labels=RUN
)
OUTAGE_START = Metric(
    "counterpoint_trainer_outage_start_timestamp_seconds",
    "gauge",
    "since when the orchestrator of a run in a slot has been out, in unix seconds; absent for one that is well",
    "seconds",
    labels=("kind", "who"),
)
DEVICE_MEMORY = Metric(
    "counterpoint_trainer_device_memory_bytes",
    "gauge",
    "memory of rank 0's GPU that torch has allocated: now, and at most",
    "bytes",
    ("kind",),
)

_BY_ENVIRONMENT = (
    ("loss", "<environment>"),
    ("entropy", "<environment>"),
    ("mismatch_kl", "<environment>"),
    ("importance_ratio", "<environment>/mean"),
    ("importance_ratio", "<environment>/max"),
    ("masked_share", "<environment>"),
    ("replayed_share", "<environment>"),
    ("reference_kl", "<environment>"),
    ("value_loss", "<environment>"),
    ("value", "<environment>/mean"),
    ("return", "<environment>/mean"),
)


def _row_of(name: str, rest: str) -> LineName:
    statistic = rest.partition("/")[2]
    metric = f"{name}/{statistic}" if statistic else name
    return LineName(f"{name}/{rest}", f"`{metric}` of one environment", OF_ENVIRONMENT, {"metric": metric})


LINES = (
    LineName("run_id", "the run's id, text"),
    LineName("step", "the trained step", STEP),
    LineName("time", "Unix time, in seconds", STEPPED_AT),
    LineName("epoch", "of supervised fine-tuning: epochs of the data that are trained", EPOCH),
    LineName("loss", "the step's loss", LOSS),
    LineName("entropy", "of the trainer's distributions of the trained tokens, in nats", ENTROPY),
    LineName(
        "mismatch_kl",
        "KL(inference || trainer), estimator k3 over trained tokens: staleness, precision, and what `[sampling]` truncates",
        MISMATCH,
    ),
    LineName("entropy/all", "`entropy`, beside those of environments"),
    LineName("mismatch_kl/all", "`mismatch_kl`, beside those of environments"),
    LineName("importance_ratio/mean", "p_trainer / p_inference", RATIO_MEAN),
    LineName("importance_ratio/max", "p_trainer / p_inference", RATIO_MAX),
    LineName(
        "masked_share",
        "share of the trained tokens that the loss left out because their ratio was too far from 1",
        MASKED,
    ),
    LineName("replayed_share", "share of the trained tokens that a position with a routing record predicted", REPLAYED),
    LineName("reference_kl", "of a run with a reference policy: KL(trainer || reference), estimator k3", REFERENCE_KL),
    LineName("value_loss", "of a run with a value head: its loss", VALUE_LOSS),
    LineName("value/mean", "of a run with a value head: its mean estimate", VALUE_MEAN),
    LineName("return/mean", "of a run with a value head: the mean return", RETURN_MEAN),
    LineName("custom_loss/<name>", "a metric of your own loss, mean over trained tokens", CUSTOM),
    LineName(
        "custom_loss/<environment>/<metric>",
        "the same of one environment",
        OF_ENVIRONMENT,
    ),
    LineName(
        "ess/mean",
        "effective sample size of the importance weights p_trainer / p_inference, as a share of the trained tokens: 1 if all are "
        "equal",
        EFFECTIVE,
    ),
    LineName(
        "ess/<lag>",
        "the same of the samples of one staleness, in steps; `ess/16` has those above, too",
        EFFECTIVE_BY_LAG,
    ),
    LineName(
        "grad_kept",
        "share of `grad_norm` that clipping leaves: 1 without clipping; of several updates their mean",
        GRADIENT_KEPT,
    ),
    LineName("grad_norm", "before clipping; of several updates their mean", GRADIENT),
    LineName("updates", "of a run with `updates_per_step` above 1: updates of the step", UPDATES),
    LineName("learning_rate", "of this update", LEARNING_RATE),
    LineName("tokens", "in the batch", TOKENS),
    LineName("tokens/trained", "in the batch", TRAINED),
    LineName("tokens/trained/<environment>", "in the batch, of one environment", TRAINED_IN),
    LineName("samples", "in the batch", SAMPLES),
    LineName("tokens_per_second", "of the batch, over `phase/train`", TOKENS_PER_SECOND),
    LineName("phase/<phase>", "seconds: `wait`, `train`, `broadcast`", PHASE),
    LineName("copied/run", "of a step that was a copy, and has no other metric than its times: the source, text"),
    LineName("copied/step", "of such a step: that of the source"),
    *(_row_of(name, rest) for name, rest in _BY_ENVIRONMENT),
)

TRAINER = Process(
    "trainer",
    "Trainer",
    "One for each job; of several ranks the first one serves. Its port is `trainer.prometheus_port`. The metrics of a run that "
    "has left its slot are gone.",
    {},
    (
        STEP, STEPPED_AT, EPOCH, LOSS, ENTROPY, MISMATCH, RATIO_MEAN, RATIO_MAX, MASKED, EFFECTIVE, EFFECTIVE_BY_LAG, REPLAYED,
        REFERENCE_KL, VALUE_LOSS, VALUE_MEAN, RETURN_MEAN, CUSTOM, OF_ENVIRONMENT, GRADIENT, GRADIENT_KEPT, UPDATES,
        LEARNING_RATE, TOKENS_PER_SECOND, TOKENS, TRAINED, TRAINED_IN, SAMPLES, PHASE, ROWS, LATE_GRAPHS, RUNS, SLOTS, WAITING,
        OUTAGE_START, DEVICE_MEMORY,
    ),
    LINES,
    "trainer/metrics.jsonl",
)  # fmt: skip
