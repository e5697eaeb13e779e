"""What the orchestrator of a run shows to Prometheus."""
