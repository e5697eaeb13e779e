"""Floor 1: a run's configuration, which orchestrator and trainer share."""
