"""Scrapes an endpoint."""

from __future__ import annotations

import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families


def families(port: int) -> dict[str, float]:
    """The families of an exposition, each with the sum of its samples."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return {
        family.name: sum(sample.value for sample in family.samples)
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    }
