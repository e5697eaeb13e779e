"""The metrics of a run's orchestrator for Prometheus."""
