"""The metrics of a run's orchestrator: its steps, event loop and evaluations.

Those of its pool of servers are in `counterpoint/inference/pool/meters.py`.
"""

from __future__ import annotations

from counterpoint.inference.pool import meters
from counterpoint.run.loop_health.lag import LAG
from counterpoint.transport.telemetry.metric import (
    LONG_SECONDS,
    RESIDENT_MEMORY,
    LineName,
    Metric,
    Process,
)

STEP = Metric("counterpoint_step", "gauge", "newest committed step")
STEPS_PLANNED = Metric("counterpoint_steps_planned", "gauge", "configured number of steps")
COMMITTED_AT = Metric(
    "counterpoint_step_timestamp_seconds", "gauge", "Unix time at which the newest step was committed", "seconds"
)
GENERATING_SECONDS = Metric(
    "counterpoint_generating_seconds", "gauge", "since this process of the run began to generate", "seconds"
)
REWARD_MEAN = Metric("counterpoint_reward_mean", "gauge", "mean reward of the step's completed rollouts")
REWARD_STD = Metric("counterpoint_reward_std", "gauge", "standard deviation of these rewards")
REWARD_MIN = Metric("counterpoint_reward_min", "gauge", "lowest of these rewards")
REWARD_MAX = Metric("counterpoint_reward_max", "gauge", "highest of these rewards")
ENVIRONMENT_REWARD = Metric(
    "counterpoint_environment_reward_mean", "gauge", "mean reward in an environment", labels=("environment",)
)
PLAYER_REWARD = Metric(
    "counterpoint_player_reward_mean",
    "gauge",
    "mean reward of a player that has one of its own",
    labels=("environment", "player"),
)
TURN_REWARD = Metric(
    "counterpoint_turn_reward_mean",
    "gauge",
    "mean reward of the turns of a number, of rollouts whose turns have rewards",
    labels=("environment", "turn"),
    most_series=1024,
)
ENVIRONMENT_METRIC = Metric(
    "counterpoint_environment_metric_mean",
    "gauge",
    "mean of a number that an environment gave its rollouts",
    labels=("environment", "metric"),
    most_series=1024,
)
ROLLOUTS = Metric(
    "counterpoint_rollouts",
    "counter",
    "rollouts that ended: completed, failed, inference_failed (a model call got no answer), cancelled, or unrecorded "
    "(completed or failed, and in no record)",
    labels=("outcome",),
)
FILTERED = Metric(
    "counterpoint_filtered_rollouts", "counter", "completed rollouts that are not trained on: a filter caught them"
)
TRAINED = Metric(
    "counterpoint_trained_rollouts",
    "counter",
    "rollouts in batches, by their time from the start of their group to their end",
    labels=("environment", "length"),
    most_series=1024,
)
STALE = Metric(
    "counterpoint_stale_rollouts",
    "counter",
    "rollouts of groups that were too old to be trained, by their time to their end, or until they were dropped",
    labels=("environment", "length"),
    most_series=1024,
)
SHARE = Metric(
    "counterpoint_examples_due_ratio",
    "gauge",
    "share of the trained groups that an environment has by its ratio",
    "ratio",
    labels=("environment",),
)
CAUGHT = Metric(
    "counterpoint_caught_rollouts",
    "counter",
    "rollouts that a filter caught, by its kind; untrained: without a token to train",
    labels=("filter", "environment"),
)
FAILURES = Metric(
    "counterpoint_rollout_failures",
    "counter",
    "rollouts that their environment failed, by the error's kind",
    labels=("environment", "error"),
)
LENGTH_MEAN = Metric(
    "counterpoint_completion_length_mean_tokens",
    "gauge",
    "mean completion tokens of the step's completed rollouts",
    "tokens",
)
CUT = Metric(
    "counterpoint_cut_rollouts_ratio", "gauge", "share of the completed rollouts with a turn cut at its limit", "ratio"
)
CUT_IN = Metric(
    "counterpoint_environment_cut_rollouts_ratio", "gauge", "the same of an environment", "ratio", ("environment",)
)
CUT_REWARD = Metric(
    "counterpoint_environment_cut_reward_mean", "gauge", "mean reward of these rollouts", labels=("environment",)
)
NO_DIFFERENCE = Metric(
    "counterpoint_groups_without_difference_ratio", "gauge", "share of the groups with equal rewards", "ratio"
)
REPEATED = Metric(
    "counterpoint_environment_repeated_answers_ratio",
    "gauge",
    "share of the completed rollouts that repeat the tokens of an earlier one of their group",
    "ratio",
    ("environment",),
)
SHARED = Metric(
    "counterpoint_environment_shared_answers_ratio",
    "gauge",
    "share of the completed rollouts with an answer that another example got, too",
    "ratio",
    ("environment",),
)
STALENESS_MEAN = Metric("counterpoint_staleness_mean_steps", "gauge", "mean of the batch's samples", "steps")
STALENESS_MAX = Metric("counterpoint_staleness_max_steps", "gauge", "highest of the batch's samples", "steps")
LOSSLESS = Metric(
    "counterpoint_staleness_lossless_steps", "gauge", "max_off_policy_steps with which no rollout is too old", "steps"
)
LOST = Metric("counterpoint_staleness_lost_ratio", "gauge", "share of the rollouts that are too old", "ratio")
TOKENS = Metric(
    "counterpoint_rollout_tokens",
    "counter",
    "tokens of finished rollouts: prompt, and completion; untrained is the part of completion that no loss may use",
    "tokens",
    labels=("kind",),
)
BATCH_SAMPLES = Metric("counterpoint_batch_samples", "gauge", "samples in the newest batch")
BATCH_TOKENS = Metric("counterpoint_batch_tokens", "gauge", "tokens in the newest batch", "tokens")
BATCH_BYTES = Metric("counterpoint_batch_bytes", "gauge", "size of the newest batch", "bytes")
BRANCH_SAMPLES = Metric("counterpoint_rollout_samples_mean", "gauge", "mean samples of a trained rollout")
BRANCH_FACTOR = Metric(
    "counterpoint_rollout_tokens_factor",
    "gauge",
    "tokens of the trained rollouts' samples over those of the longest ones",
)
EPOCH = Metric(
    "counterpoint_examples_epoch",
    "gauge",
    "epochs of an environment's examples that have been drawn",
    labels=("environment",),
)
DRAWS = Metric(
    "counterpoint_examples_draws_ratio",
    "gauge",
    "with a curriculum: share of the draws by the example's pass rate (unseen, hard, band, easy)",
    "ratio",
    labels=("environment", "band"),
)
PASS_RATE = Metric(
    "counterpoint_examples_pass_ratio", "gauge", "with a curriculum: mean pass rate", "ratio", labels=("environment",)
)
WORKER_LAG = Metric(
    "counterpoint_environment_worker_lag_max_seconds",
    "gauge",
    "largest lag of a worker's event loop in the newest step",
    "seconds",
    labels=("environment",),
)
WORKER_RESTARTS = Metric(
    "counterpoint_environment_worker_restarts",
    "counter",
    "restarts of an environment's workers",
    labels=("environment",),
)
SESSIONS = Metric(
    "counterpoint_environment_sessions",
    "gauge",
    "rollouts in progress in an environment's workers",
    labels=("environment",),
)
WORKERS = Metric(
    "counterpoint_environment_workers", "gauge", "ready workers of an environment", labels=("environment",)
)
SILENT = Metric(
    "counterpoint_event_loop_silent_seconds",
    "gauge",
    "time since the event loop last noted how servers and rollouts are, which it does every second",
    "seconds",
)
LAG_MAX = Metric("counterpoint_event_loop_lag_max_seconds", "gauge", "largest lag in the newest step", "seconds")
LATE = Metric("counterpoint_event_loop_late", "counter", "moments at which the event loop was late")
LATE_SECONDS = Metric(
    "counterpoint_event_loop_late_seconds",
    "counter",
    "time for which the event loop was late, by what made it so",
    "seconds",
    labels=("kind",),
)
PHASE = Metric(
    "counterpoint_phase_seconds",
    "histogram",
    "time of a step in each phase; the phases add up to the step",
    "seconds",
    labels=("phase",),
    buckets=LONG_SECONDS,
)
STEP_SECONDS = Metric("counterpoint_step_seconds", "histogram", "time of a step", "seconds", buckets=LONG_SECONDS)
IN_FLIGHT = Metric(
    "counterpoint_inflight_rollouts", "gauge", "rollouts in progress: training, evaluation", labels=("purpose",)
)
PAUSED = Metric("counterpoint_paused", "gauge", "1 while somebody has paused the run, else 0")
OUTAGE_START = Metric(
    "counterpoint_outage_start_timestamp_seconds",
    "gauge",
    "since when the trainer or a server has been out, in unix seconds; absent for one that is well",
    "seconds",
    labels=("kind", "who"),
)
POLICY_VERSION = Metric("counterpoint_policy_version", "gauge", "version that new rollouts are played with")
CACHE_HITS = Metric(
    "counterpoint_inference_cache_hit_ratio",
    "gauge",
    "share of the prompts' tokens that a server's prefix cache had, in the newest step",
    "ratio",
)
EVALUATION = Metric(
    "counterpoint_evaluation_score",
    "gauge",
    "newest result of an evaluation",
    labels=("evaluation", "metric"),
    most_series=512,
)
EVALUATION_LOW = Metric(
    "counterpoint_evaluation_score_low",
    "gauge",
    "lower bound of its confidence interval",
    labels=("evaluation", "metric"),
    most_series=512,
)
EVALUATION_HIGH = Metric(
    "counterpoint_evaluation_score_high",
    "gauge",
    "upper bound of its confidence interval",
    labels=("evaluation", "metric"),
    most_series=512,
)
EVALUATION_STEP = Metric(
    "counterpoint_evaluation_step", "gauge", "step whose version was evaluated last", labels=("evaluation",)
)
EVALUATION_FAILED = Metric(
    "counterpoint_evaluation_failed_rollouts",
    "gauge",
    "failed rollouts of the newest evaluation",
    labels=("evaluation",),
)

LINES = (
    LineName("step", "number of the step", STEP),
    LineName("time", "Unix time of the commit, in seconds", COMMITTED_AT),
    LineName("uptime_seconds", "since this process of the run began to generate", GENERATING_SECONDS),
    LineName("reward/mean", "of the completed rollouts", REWARD_MEAN),
    LineName("reward/std", "of the completed rollouts", REWARD_STD),
    LineName("reward/min", "of the completed rollouts", REWARD_MIN),
    LineName("reward/max", "of the completed rollouts", REWARD_MAX),
    LineName("reward/<environment>/mean", "of the environment's completed rollouts", ENVIRONMENT_REWARD),
    LineName("reward/<environment>/player/<player>/mean", "of each player that has a reward of its own", PLAYER_REWARD),
    LineName(
        "reward/<environment>/turn/<turn>/mean",
        "of the turns of that number, from 1, in the completed rollouts whose turns have rewards: `1` to `8`, then `9-16`, "
        "`17-32` and so on to `513-1024`, and `1025-`",
        TURN_REWARD,
    ),
    LineName(
        "environment/<environment>/<metric>/mean",
        "of `rollout.metrics` over the completed rollouts that have it: 64 names of 64 characters an environment, others are "
        "left out",
        ENVIRONMENT_METRIC,
    ),
    LineName(
        "environment/<environment>/lag/max",
        "of an environment with workers: largest lag of a worker's event loop since the last step, in seconds",
        WORKER_LAG,
    ),
    LineName(
        "environment/<environment>/restarts", "of an environment with workers: since the last step", WORKER_RESTARTS
    ),
    LineName("environment/<environment>/sessions", "of an environment with workers: rollouts in progress", SESSIONS),
    LineName("environment/<environment>/workers", "of an environment with workers: ready ones", WORKERS),
    LineName("rollouts/completed", "rollouts; filtered ones are among them", ROLLOUTS, {"outcome": "completed"}),
    LineName("rollouts/failed", "rollouts that their environment failed", ROLLOUTS, {"outcome": "failed"}),
    LineName(
        "rollouts/inference_failed",
        "rollouts that failed because a model call got no answer; in neither `rollouts/failed` nor `failures/...`",
        ROLLOUTS,
        {"outcome": "inference_failed"},
    ),
    LineName("rollouts/cancelled", "rollouts that were not wanted any more", ROLLOUTS, {"outcome": "cancelled"}),
    LineName(
        "rollouts/unrecorded",
        "discarded rollouts that are in no record; absent without any",
        ROLLOUTS,
        {"outcome": "unrecorded"},
    ),
    LineName("rollouts/filtered", "completed rollouts that a filter caught", FILTERED),
    LineName(
        "filters/<filter>/<environment>",
        "rollouts that a filter caught; `untrained`: those without a token to train",
        CAUGHT,
    ),
    LineName("failures/<environment>/<error>", "rollouts that their environment failed, by the error's kind", FAILURES),
    LineName(
        "trained/<environment>/<length>",
        "rollouts in the batch, by their time from the start of their group to their end, such as `8-16s`; `unknown`: it ended "
        "before a resume",
        TRAINED,
    ),
    LineName(
        "stale/<environment>/<length>",
        "rollouts of groups that were dropped as too old ([Shares](scheduling.md#shares)), by their time to their end, or "
        "until they were dropped",
        STALE,
    ),
    LineName("staleness/mean", "of the batch's samples, in steps", STALENESS_MEAN),
    LineName("staleness/max", "of the batch's samples, in steps", STALENESS_MAX),
    LineName("staleness/allowed", '`max_off_policy_steps`; of `"auto"`, what it has become'),
    LineName(
        "staleness/lossless",
        "the least `max_off_policy_steps` with which none would be too old ([Shares](scheduling.md#shares)), over 20 steps",
        LOSSLESS,
    ),
    LineName("staleness/lossless_lead", "the largest `max_lead_steps` with which none would be; 0: none"),
    LineName("staleness/lost_share", "of the rollouts, too old, over 20 steps", LOST),
    LineName("staleness/lost_mean", "what theirs would be at least"),
    LineName("length/mean", "completion tokens of a completed rollout, of all its turns", LENGTH_MEAN),
    LineName("length/cut", "share of the completed rollouts with a turn that was cut at its limit", CUT),
    LineName("length/<environment>/cut", "the same of an environment", CUT_IN),
    LineName("length/<environment>/cut_reward", "mean reward of its cut rollouts; absent without any", CUT_REWARD),
    LineName(
        "groups/no_difference",
        "share of the groups with equal rewards, those of players and turns as well, filtered ones included",
        NO_DIFFERENCE,
    ),
    LineName(
        "answers/<environment>/repeated",
        "share of the completed rollouts that repeat, token for token, an earlier one of their group",
        REPEATED,
    ),
    LineName(
        "answers/<environment>/shared",
        "share of the completed rollouts with an answer that another example got, too; absent below four examples",
        SHARED,
    ),
    LineName("tokens/prompt", "of all turns", TOKENS, {"kind": "prompt"}),
    LineName("tokens/completion", "of all turns", TOKENS, {"kind": "completion"}),
    LineName("tokens/restored", "completion tokens from before a resume", TOKENS, {"kind": "restored"}),
    LineName(
        "tokens/untrained", "completion tokens that their environment left untrained", TOKENS, {"kind": "untrained"}
    ),
    LineName("batch/samples", "in the batch", BATCH_SAMPLES),
    LineName("batch/tokens", "in the batch", BATCH_TOKENS),
    LineName("batch/bytes", "of the batch", BATCH_BYTES),
    LineName(
        "branches/samples_per_rollout",
        "samples of a trained rollout ([Histories and tokens](gateway.md#histories-and-tokens))",
        BRANCH_SAMPLES,
    ),
    LineName(
        "branches/tokens_factor",
        "tokens of the trained rollouts' samples over those of each rollout's (each player's) longest one",
        BRANCH_FACTOR,
    ),
    LineName(
        "inference/cache_hit_share",
        "share of the prompts' tokens that a server's prefix cache had; absent where no server says so",
        CACHE_HITS,
    ),
    LineName(
        "examples/<environment>/share",
        "share of the trained groups that it has by its `ratio` ([Shares](scheduling.md#shares))",
        SHARE,
    ),
    LineName("examples/<environment>/epoch", "how many epochs of its examples have been drawn", EPOCH),
    *(
        LineName(
            f"examples/<environment>/{band}",
            "with a curriculum: share of the draws of such examples ([Curriculum](data.md#curriculum))",
            DRAWS,
            {"band": band},
        )
        for band in ("unseen", "hard", "band", "easy")
    ),
    LineName("examples/<environment>/pass_rate", "with a curriculum: the mean pass rate", PASS_RATE),
    *(
        LineName(f"event_loop_lag/{name}", f"{meaning} of the lag since the last step, in seconds")
        for name, meaning in (
            ("min", "lowest"),
            ("mean", "mean"),
            ("median", "median"),
            ("p90", "90th percentile"),
            ("p99", "99th percentile"),
        )
    ),
    LineName("event_loop_lag/max", "highest lag since the last step, in seconds", LAG_MAX),
    LineName("event_loop_lag/n", "samples of the lag"),
    LineName(
        "event_loop_late/n",
        "late moments ([Blame](debugging.md#blame-which-code-made-the-event-loop-late)); absent once the loop is not watched",
        LATE,
    ),
    LineName("event_loop_late/<kind>", "seconds for which the loop was late, by what made it so", LATE_SECONDS),
    LineName(
        "event_loop_blame",
        "a list: the code that made the loop late ([Blame](debugging.md#blame-which-code-made-the-event-loop-late))",
    ),
    LineName(
        "early_warnings",
        "a list: what goes wrong, its figure, since when, and advice ([Early warnings](metrics.md#early-warnings)); else absent",
    ),
    LineName(
        "changes",
        "a table: the keys that have new values from this step on ([Steering](serve.md#steering-a-job-that-runs)); else absent",
    ),
    LineName(
        "phase/<phase>",
        "seconds; the phases add up to the wall time ([Where the time goes](scheduling.md#where-the-time-goes))",
        PHASE,
    ),
    LineName("wall_seconds", "the step, in seconds", STEP_SECONDS),
    LineName("inflight/rollouts", "at the commit", IN_FLIGHT, {"purpose": "training"}),
    LineName("inflight/evaluation_rollouts", "at the commit", IN_FLIGHT, {"purpose": "evaluation"}),
    LineName("policy/version", "at the commit", POLICY_VERSION),
    LineName("memory/rss_bytes", "resident memory of the orchestrator, at the commit", RESIDENT_MEMORY),
    LineName("evaluation/<evaluation>/step", "step whose version was evaluated", EVALUATION_STEP),
    LineName("evaluation/<evaluation>/rollouts/failed", "of the evaluation", EVALUATION_FAILED),
    LineName(
        "evaluation/<evaluation>/<metric>/low",
        "lower bound of the confidence interval ([Evaluation](evaluation.md#results))",
        EVALUATION_LOW,
    ),
    LineName("evaluation/<evaluation>/<metric>/high", "upper bound of the confidence interval", EVALUATION_HIGH),
    LineName(
        "evaluation/<evaluation>/<metric>",
        "results of evaluations that have ended since the step before; in Prometheus the newest",
        EVALUATION,
    ),
)

METRICS = (
    STEP, STEPS_PLANNED, COMMITTED_AT, GENERATING_SECONDS, REWARD_MEAN, REWARD_STD, REWARD_MIN, REWARD_MAX,
    ENVIRONMENT_REWARD, PLAYER_REWARD, TURN_REWARD, ENVIRONMENT_METRIC, ROLLOUTS, FILTERED, TRAINED, STALE, SHARE,
    CAUGHT, FAILURES, LENGTH_MEAN, CUT, CUT_IN, CUT_REWARD, NO_DIFFERENCE, REPEATED, SHARED, STALENESS_MEAN,
    STALENESS_MAX, LOSSLESS, LOST, TOKENS, BATCH_SAMPLES, BATCH_TOKENS, BATCH_BYTES,
    BRANCH_SAMPLES, BRANCH_FACTOR, EPOCH, DRAWS, PASS_RATE, WORKER_LAG,
    WORKER_RESTARTS, SESSIONS, WORKERS, LAG, SILENT, LAG_MAX, LATE, LATE_SECONDS, PHASE, STEP_SECONDS, IN_FLIGHT, PAUSED,
    OUTAGE_START,
    POLICY_VERSION, CACHE_HITS, EVALUATION, EVALUATION_LOW, EVALUATION_HIGH, EVALUATION_STEP, EVALUATION_FAILED,
)  # fmt: skip

ORCHESTRATOR = Process(
    "orchestrator",
    "Orchestrator",
    "One for each run. Its port is `prometheus_port` of the run (`[orchestrator]`, or each of `[[runs]]`).",
    {"run": "the run's id"},
    (*METRICS, *meters.METRICS),
    LINES,
    "run_<id>/metrics.jsonl",
)
