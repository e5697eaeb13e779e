"""A run's configuration, which orchestrator and trainer share."""
