"""What orchestrator, service and trainer share: the configuration of a run, requests to it, the health of a loop."""
