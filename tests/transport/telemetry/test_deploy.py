"""Dashboard and alert rules: every expression parses, and names metrics and labels of the catalogue alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from counterpoint.cli.metrics import PROCESSES
from counterpoint.inference.pool import meters as pool
from counterpoint.job.serving import telemetry as supervisor
from counterpoint.job.sweep import telemetry as sweep
from counterpoint.orchestrator.telemetry import catalogue as orchestrator
from counterpoint.trainer.telemetry import catalogue as trainer
from counterpoint.transport.telemetry.exposition import Exposition
from counterpoint.transport.telemetry.metric import DROPPED_SERIES, EVERYWHERE, Process
from counterpoint.transport.telemetry.values import MetricValues
from tests.transport.telemetry.promql import PromQLError, firing, parse

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "counterpoint.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]

NOW = 1_000_000.0

OF_TARGETS = {"counterpoint_job", "process", "job", "instance"}
"""Labels that Prometheus adds."""


def labels_by_sample() -> dict[str, set[str]]:
    """The labels of each name that a query may have."""
    found: dict[str, set[str]] = {"up": set(OF_TARGETS)}
    for process in PROCESSES:
        for metric in (*process.metrics, *EVERYWHERE):
            own = {*metric.labels, *process.labels, *OF_TARGETS}
            names = {metric.full_name: own}
            if metric.kind == "histogram":
                names = {f"{metric.name}_bucket": own | {"le"}, f"{metric.name}_sum": own, f"{metric.name}_count": own}
            for name, labels in names.items():
                found.setdefault(name, set()).update(labels)
    return found


LABELS = labels_by_sample()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_what_there_is(expression: str) -> None:
    parsed = parse(expression)
    assert parsed.metrics
    for name, labels in parsed.metrics:
        assert name in LABELS, f"{name} is in no process's exposition"
        assert set(labels) <= LABELS[name], (name, labels)
    assert set(parsed.grouping) <= set.union(*(LABELS[name] for name, _ in parsed.metrics))


@pytest.mark.parametrize(
    "expression",
    [
        "sum(up",
        "up)",
        "up up",
        'up{a="b"',
        "up{a=b}",
        'up{a="b" c="d"}',
        "up >",
        'up{a~"b"}',
        "",
        "sum by up",
        "up ? 1",
    ],
)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(PromQLError):
        parse(expression)


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"] == "counterpoint"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows[:5] == ["Overview", "Run", "Loop", "Fleet", "Trainer"]
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) <= variables
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells


def test_a_legend_names_labels_of_its_query() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = set.union(*(LABELS[name] for name, _ in parse(target["expr"]).metrics))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_what_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Counterpoint[A-Za-z]+", rule["alert"])
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    parsed = parse(rule["expr"])
    assert named <= set.union(*(LABELS[name] for name, _ in parsed.metrics))
    if parsed.grouping:
        assert named <= set(parsed.grouping)
    assert rule["annotations"].keys() == {"summary", "description"}


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


Samples = list[tuple[str, dict[str, str], float]]


def exposed(process: Process, fill: Callable[[MetricValues], None]) -> Samples:
    """The samples of a process as Prometheus would have them after a scrape."""
    values = MetricValues((*process.metrics, *EVERYWHERE))
    fill(values)
    text, _ = Exposition(values, dict.fromkeys(process.labels, "a")).encode("application/openmetrics-text")
    families = text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    samples = [
        (sample.name, dict(sample.labels), float(sample.value)) for family in families for sample in family.samples
    ]
    return [*samples, ("up", {"job": "counterpoint", "process": process.name}, 1.0)]


def samples_of(sick: bool) -> Samples:
    """Expositions of all processes that are well, or in every trouble that a threshold tells."""

    def run(values: MetricValues) -> None:
        values.set(orchestrator.COMMITTED_AT, NOW - (7200 if sick else 60))
        values.set(pool.SERVERS, 0 if sick else 2, "serving")
        values.set(pool.SERVERS, 2 if sick else 0, "out")
        for kind in ("server", "trainer"):
            values.set(orchestrator.OUTAGE_START, NOW - (3600 if sick else 60), kind, f"the {kind} at x")
        for number in range(2000 if sick else 2):
            values.set(orchestrator.ENVIRONMENT_METRIC, 1.0, "toy", f"metric {number}")

    def training(values: MetricValues) -> None:
        values.set(trainer.MISMATCH, 0.5 if sick else 0.002, "a")

    def supervising(values: MetricValues) -> None:
        values.set(supervisor.WORKERS, 1 if sick else 0, "failed")
        values.set(supervisor.HEARTBEAT_AGE, 55.0 if sick else 4.0, "trainer")

    def sweeping(values: MetricValues) -> None:
        values.set(sweep.TARGETS, 1 if sick else 0, "FAILED")
        values.set(sweep.STORE_UP, 0 if sick else 1)

    down: Samples = [("up", {"job": "counterpoint", "process": "trainer"}, 0.0)] if sick else []
    return [
        *exposed(orchestrator.ORCHESTRATOR, run),
        *exposed(trainer.TRAINER, training),
        *exposed(supervisor.SUPERVISOR, supervising),
        *exposed(sweep.SWEEP, sweeping),
        *down,
    ]


NEED_A_HISTORY = {
    "CounterpointLoopLate",
    "CounterpointEnvironmentFails",
    "CounterpointUnanswered",
    "CounterpointWorkerRestarts",
    "CounterpointTrialsFail",
}
"""Rules over rates, which one scrape cannot tell."""


@pytest.mark.parametrize("sick", [False, True])
def test_rules_fire_for_the_sick_and_not_for_the_well(sick: bool) -> None:
    samples = samples_of(sick)
    fired = {rule["alert"]: firing(rule["expr"], samples, NOW) for rule in RULES}
    assert {name for name, fires in fired.items() if fires is None} == NEED_A_HISTORY
    assert {name for name, fires in fired.items() if fires is not sick} == NEED_A_HISTORY


def test_every_metric_has_a_place_that_the_dashboard_knows() -> None:
    """A row of the dashboard for each process; not every metric has a panel."""
    shown = {name for expression in EXPRESSIONS for name, _ in parse(expression).metrics}
    for process in PROCESSES:
        assert any(metric.full_name in name for metric in process.metrics for name in shown), process.name
    assert DROPPED_SERIES.full_name in shown
